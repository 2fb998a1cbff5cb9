"""Guesses of a net that goes on from the target's features by itself, over entries (`entries.py`) and trees (`branches.py`).

    known tokens    t0 … tn−1 │ tn = root          features: f0 … fn−1
    entered         (f0, t1) … (fn−1, tn)          one for each position 0 … n−1; the last gives the candidates behind the root
    a draft         (h, g1) at position n ─▶ (h', g2) at n + 1 ─▶ …       h: what the net returned for the row before
    what came true  features at n … n+m            are entered over it next time

All rows that are asked about take each step together, in one forward. With one beam a level is one more token of a chain: a row for each
sequence. With more, a forward sees every opened node of a tree again, because a node's ancestors are looked for within one forward.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.engine.batch import Stem
from forerun.engine.drafters.branches import ROOT, Branches, Tree
from forerun.engine.drafters.draft import FREE, Commit, Draft, Terms
from forerun.engine.drafters.entries import Entries, Made, stem
from forerun.engine.drafters.lattice import Levels
from forerun.engine.drafters.registry import Host
from forerun.engine.drafters.taps import Traced


@dataclasses.dataclass(eq=False, slots=True)
class Growing:
    """A tree under way. `last`: the fused features of the newest real entry, [W]. `out`: what the net returned for the root and for each
    opened node, [W]."""

    traced: Traced
    tree: Tree
    last: Tensor
    out: dict[int, Tensor] = dataclasses.field(default_factory=dict)


class Recursive:
    """`most`: nodes of a draft; `beams`: nodes that a level goes on from."""

    def __init__(self, made: Made, levels: Levels, host: Host, most: int, beams: int) -> None:
        self._entries = Entries(made, levels, host, most, beams)
        self._levels, self._beams = levels, beams
        self._branches = Branches(levels, beams)
        self.needs, self.listener = self._entries.needs, self._entries.listener

    def absorb(self, commit: Commit) -> None:
        self.listener.absorb(commit)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self.listener.asked()
        began = time.perf_counter()
        growing, entered = self._enter(rows, budget, terms)
        self._levels.pace.observe(entered, time.perf_counter() - began)
        going = list(growing.values())
        while going:
            nodes = [self._branches.wanted(one.tree, terms) for one in going]
            kept = [(one, each) for one, each in zip(going, nodes) if each]
            if not kept or not self._branches.pays([one.tree for one, _ in kept], [each for _, each in kept], terms):
                break
            began = time.perf_counter()
            self._grow(kept, terms)
            self._levels.pace.observe(len(kept), time.perf_counter() - began)
            going = [one for one, _ in kept]
        return [self._branches.finish(growing[number].tree if number in growing else None) for number in rows]

    def forget(self, rows: list[int]) -> None:
        self.listener.forget(rows)

    def _enter(self, rows: Sequence[int], budget: Sequence[int], terms: Terms) -> tuple[dict[int, Growing], int]:
        """Enters what waits of the rows asked about: all, where it is not much. Returns the trees of those that are then up to date, and
        how many entries that were."""
        asked = self._entries.due(rows, budget)
        if not asked:
            return {}, 0
        stems = [stem(one.traced, one.count, (one.count - 1,) if one.ends else ()) for one in asked]
        parts = self._entries.take(asked)
        carried = self._entries.fused(parts)
        stepped = self._entries.run(stems, [token for tokens, _ in parts for token in tokens], carried)
        self._entries.entered(asked)
        growing: dict[int, Growing] = {}
        at = -1
        for one in asked:
            at += one.count
            if one.ends:
                tree = Tree(one.traced.row, one.most, one.depth)
                growing[one.traced.row.number] = Growing(one.traced, tree, carried[at], {ROOT: stepped.carried[len(growing)]})
        if growing:
            self._branches.add([one.tree for one in growing.values()], [ROOT] * len(growing), stepped.logits, terms)
        return growing, sum(one.count for one in asked)

    def _grow(self, going: Sequence[tuple[Growing, list[int]]], terms: Terms) -> None:
        """One level more of each tree, from these nodes."""
        stems: list[Stem] = []
        tokens: list[int] = []
        carried: list[Tensor] = []
        for one, nodes in going:
            chain, staged = self._chained(one, nodes[0]) if self._beams == 1 else self._spread(one, nodes)
            stems.append(chain)
            tokens += [one.tree.token[node] if node >= 0 else one.traced.row.tokens[-1] for node in staged]
            carried += [one.out[one.tree.parent[node]] if node >= 0 else one.last for node in staged]
        stepped = self._entries.run(stems, tokens, torch.stack(carried))
        trees = [one.tree for one, nodes in going for _ in nodes]
        opened = [node for _, nodes in going for node in nodes]
        for i, (one, node) in enumerate((one, node) for one, nodes in going for node in nodes):
            one.out[node] = stepped.carried[i]
        self._branches.add(trees, opened, stepped.logits, terms)

    def _chained(self, one: Growing, node: int) -> tuple[Stem, list[int]]:
        """The newest guess of a chain as one more entry, and what is staged for it."""
        traced = one.traced
        at = traced.row.computed + len(one.tree.opened) - 1
        self.listener.trail.scribbles(traced, at, at + 1)
        return Stem(traced.row.number, traced.base, at, 1, (), (0,)), [node]

    def _spread(self, one: Growing, nodes: list[int]) -> tuple[Stem, list[int]]:
        """All opened nodes behind the last real entry, which is entered again."""
        traced, opened = one.traced, one.tree.opened
        place = {node: i for i, node in enumerate(opened)} | {ROOT: ROOT}
        last = traced.row.computed - 1
        self.listener.trail.scribbles(traced, last + 1, last + 1 + len(opened))
        scored = range(1 + len(opened) - len(nodes), 1 + len(opened))
        return Stem(traced.row.number, traced.base, last, 1, [place[one.tree.parent[node]] for node in opened], scored), [ROOT, *opened]
