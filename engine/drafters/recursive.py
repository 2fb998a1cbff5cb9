"""Guesses of a net that goes on from the target's features by itself: `recursive_net.py` over rows (`taps.py`) and trees (`branches.py`).

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
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.backends.base import Ops, PoolSpec
from forerun.engine.batch import Batch, Stem, grow
from forerun.engine.drafters.branches import ROOT, Branches, Tree
from forerun.engine.drafters.draft import FREE, Commit, Draft, Late, Needs, Place, Terms
from forerun.engine.drafters.ear import Ear
from forerun.engine.drafters.lattice import Levels
from forerun.engine.drafters.recursive_net import Net, Stage, Stepped
from forerun.engine.drafters.registry import Host
from forerun.engine.drafters.taps import STORAGE, Traced, Trail

CATCH_UP = 512
"""entries that are made up for in one call, beside those behind each root"""
QUIET = 64
"""commits without a question after which nobody is drafting"""
COPIES = 3
"""A recorded forward keeps its memory, with half as much room again: one for steps with logits and one for steps without."""


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A net as it was loaded. `taps`: target layers it reads; `embed`: int32 [n] → float32 [n, width]; `pool`: of its layers; `bytes`: its
    own weights."""

    net: Net
    taps: tuple[int, ...]
    embed: Callable[[Ops, Tensor], Tensor]
    width: int
    pool: PoolSpec
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A row whose next `count` entries are due; `ends`: then it has all, and can have `most` nodes of `depth` levels."""

    traced: Traced
    most: int
    depth: int
    count: int
    ends: bool


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
        self._net, self._embed, self._width = made.net, made.embed, made.width
        self._ops, self._backend, self._progress = host.backend.ops, host.backend, host.progress
        self._levels = levels
        self._branches = Branches(levels, beams)
        self._most, self._beams = most, beams
        self._quiet = 0
        self._ear = Ear(self._learn)
        rows = host.start.max_rows
        self._room = CATCH_UP + rows * (most + 2)
        staged = made.width + made.net.carried
        work = self._room * (made.net.width * COPIES + staged) + 2 * rows * beams * made.net.vocab
        work += (STORAGE + 2 * self._room) * len(made.taps) * host.model.hidden  # what waits; what is entered, joined and fused
        self.needs = Needs(
            made.taps, (made.pool,), most, lazy=False, weight_bytes=made.bytes, work_bytes=4 * work, attach=self._attach, late=self._lacks
        )

    @property
    def late(self) -> int:
        """Positions of the target that this drafter never saw, so far."""
        self._ear.heed()
        return self._trail.late

    def _lacks(self) -> Late:
        return Late(positions=self._trail.late)

    def absorb(self, commit: Commit) -> None:
        self._quiet += 1
        self._ear.hear(commit)

    def _learn(self, commit: Commit) -> None:
        self._trail.learn(commit, self._levels.calibration)
        if self._trail.excess and self._quiet <= QUIET:
            self._enter_behind(self._trail.excess)
        self._trail.shed()

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self._quiet = 0
        self._ear.heed()
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
        self._ear.heed()
        for number in rows:
            self._levels.calibration.forget(number)
        self._trail.forget(rows)

    # -- what came true ----------------------------------------------------------------------------------------------------------

    def _attach(self, place: Place) -> None:
        pool, net, ops = place.pools[0], self._net, self._ops
        self._table = place.table
        self._trail = Trail(place.table, pool.keys.shape[1], successor=True)
        self._stage = Stage.open(self._room, self._width, net.carried, self._backend.device)
        stage = self._stage

        def forward(batch: Batch) -> Stepped:
            return net.forward(ops, stage, batch, pool)

        self._run = self._backend.capture(forward, None)
        longest = min(self._room, place.longest)
        every = [Stem(row, 0, 0, 1, (), (0,)) for row in range(place.rows)]
        alone = [[Stem(0, 0, 0, known, (), scored)] for known, scored in ((longest, ()), (longest, (0,)), (1, (0,)))]
        for stems in (alone[0], every, *alone[1:]):
            self._progress("warming", 0, 1)
            for _ in range(2):
                self._run(grow(stems, place.table, self._backend.device))

    def _enter(self, rows: Sequence[int], budget: Sequence[int], terms: Terms) -> tuple[dict[int, Growing], int]:
        """Enters what waits of the rows asked about: all, where it is not much. Returns the trees of those that are then up to date, and
        how many entries that were."""
        asked = self._waiting(rows, budget)
        if not asked:
            return {}, 0
        stems = [self._stem(one.traced, one.count, (one.count - 1,) if one.ends else ()) for one in asked]
        carried, stepped = self._forward_entries(stems, [self._trail.take(one.traced, one.count) for one in asked])
        growing: dict[int, Growing] = {}
        at = -1
        for one in asked:
            at += one.count
            if one.ends:
                tree = Tree(one.traced.row, one.most, one.depth)
                growing[one.traced.row.number] = Growing(one.traced, tree, carried[at], {ROOT: stepped.carried[len(growing)]})
        if growing:
            self._branches.add([one.tree for one in growing.values()], [ROOT] * len(growing), stepped.logits, terms)
        return growing, sum(stem.known for stem in stems)

    def _waiting(self, rows: Sequence[int], budget: Sequence[int]) -> list[Waiting]:
        """What is to be entered of the rows asked about, those with little first."""
        found: list[Waiting] = []
        left = CATCH_UP
        for traced, most in sorted(self._able(rows, budget), key=lambda each: self._trail.due(each[0])):
            due = self._trail.due(traced)
            count = due if due <= most + 1 or due <= left else left
            if count < 1:
                continue
            left -= count if count > self._most + 1 else 0
            ends = count == due and traced.row.computed + count == len(traced.row.tokens) - 1
            room = self._table.reach(traced.row.number) - len(traced.row.tokens) + 1
            found.append(Waiting(traced, most, min(most, room), count, ends))
        return found

    def _able(self, rows: Sequence[int], budget: Sequence[int]) -> list[tuple[Traced, int]]:
        """Rows that were heard of and whose pages hold all their tokens."""
        able = []
        for number, most in zip(rows, budget):
            traced = self._trail.get(number)
            if traced is not None and most > 0 and len(traced.row.tokens) <= self._table.reach(number):
                able.append((traced, most))
        return able

    def _enter_behind(self, count: int) -> None:
        """Enters so many of the entries that wait, the oldest of the rows with most first."""
        for traced in reversed(self._trail.behind()):
            # The newest stays: behind it the next draft begins.
            part = min(count, self._trail.due(traced) - 1)
            while part > 0:
                taken = min(part, self._room)
                stem = self._stem(traced, taken, ())
                self._forward_entries([stem], [self._trail.take(traced, taken)])
                part, count = part - taken, count - taken

    def _stem(self, traced: Traced, count: int, scored: tuple[int, ...]) -> Stem:
        return Stem(traced.row.number, traced.base, traced.row.computed, count, (), scored)

    def _forward_entries(self, stems: list[Stem], parts: list[tuple[list[int], Tensor]]) -> tuple[Tensor, Stepped]:
        """Real rows: (their fused features, what the net says)."""
        tokens = [token for each, _ in parts for token in each]
        carried = self._net.fusion(self._ops, parts[0][1] if len(parts) == 1 else torch.cat([features for _, features in parts]))
        self._stage.put(self._embedding(tokens), carried)
        return carried, self._run(grow(stems, self._table, self._backend.device))

    def _embedding(self, tokens: Sequence[int]) -> Tensor:
        return self._embed(self._ops, torch.tensor(tokens, dtype=torch.int32, device=self._backend.device))

    # -- guesses -----------------------------------------------------------------------------------------------------------------

    def _grow(self, going: Sequence[tuple[Growing, list[int]]], terms: Terms) -> None:
        """One level more of each tree, from these nodes."""
        stems: list[Stem] = []
        tokens: list[int] = []
        carried: list[Tensor] = []
        for one, nodes in going:
            stem, staged = self._chained(one, nodes[0]) if self._beams == 1 else self._spread(one, nodes)
            stems.append(stem)
            tokens += [one.tree.token[node] if node >= 0 else one.traced.row.tokens[-1] for node in staged]
            carried += [one.out[one.tree.parent[node]] if node >= 0 else one.last for node in staged]
        self._stage.put(self._embedding(tokens), torch.stack(carried))
        stepped = self._run(grow(stems, self._table, self._backend.device))
        trees = [one.tree for one, nodes in going for _ in nodes]
        opened = [node for _, nodes in going for node in nodes]
        for i, (one, node) in enumerate((one, node) for one, nodes in going for node in nodes):
            one.out[node] = stepped.carried[i]
        self._branches.add(trees, opened, stepped.logits, terms)

    def _chained(self, one: Growing, node: int) -> tuple[Stem, list[int]]:
        """The newest guess of a chain as one more entry, and what is staged for it."""
        traced = one.traced
        at = traced.row.computed + len(one.tree.opened) - 1
        self._trail.scribbles(traced, at, at + 1)
        return Stem(traced.row.number, traced.base, at, 1, (), (0,)), [node]

    def _spread(self, one: Growing, nodes: list[int]) -> tuple[Stem, list[int]]:
        """All opened nodes behind the last real entry, which is entered again."""
        traced, opened = one.traced, one.tree.opened
        place = {node: i for i, node in enumerate(opened)} | {ROOT: ROOT}
        last = traced.row.computed - 1
        self._trail.scribbles(traced, last + 1, last + 1 + len(opened))
        scored = range(1 + len(opened) - len(nodes), 1 + len(opened))
        return Stem(traced.row.number, traced.base, last, 1, [place[one.tree.parent[node]] for node in opened], scored), [ROOT, *opened]
