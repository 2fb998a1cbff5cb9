"""Guesses of several MTP modules, each for one place (2412.19437, 2.2): module k says the token k + 2 places behind what it is shown.

    position          0 …  n−3    n−2    n−1          tokens t0 … tn, tn = root; g: guesses
    module 0 reads    t1 … tn−2   tn−1   tn    ─▶ g1
    module 1 reads    t2 … tn−1   tn     g1    ─▶ g2
    module 2 reads    t3 … tn     g1     g2    ─▶ g3       beside it: the target's features there (MiMo), or what the module before made

Every module is one layer with entries of its own (a layer of the pool) for every position, as in training: module k has true ones up to
n − 1 − k, and those behind them, which read guesses, are made anew with each draft. What a module cannot enter yet waits: a few rows, or
more while nobody guesses so deep; never more than `LAG` behind a step.

A draft is a chain of at most as many tokens as there are modules, with the runners-up of each place as leaves (`branches.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.backends.base import Pool, PoolSpec
from forerun.engine.batch import Batch, Stem, grow
from forerun.engine.drafters.branches import ROOT, Branches, Tree
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Place, Terms
from forerun.engine.drafters.entries import COPIES, rehearsals, stem
from forerun.engine.drafters.lattice import Levels
from forerun.engine.drafters.listener import CATCH_UP, Listener
from forerun.engine.drafters.recursive_load import Embed
from forerun.engine.drafters.recursive_net import Net, Stage, Stepped
from forerun.engine.drafters.registry import Host
from forerun.engine.drafters.taps import STORAGE, Traced, Trail

LAG = 16
"""true rows that may wait in front of a module behind the first, of each sequence"""


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """Modules as they were loaded, in order. `tap`: the target layer they read; `chained`: a module reads what the one before made of a
    position, instead of the target's features there; `width`: of the embeddings; `bytes`: their weights."""

    nets: list[Net]
    embeds: list[Embed]
    tap: int
    chained: bool
    width: int
    pool: PoolSpec
    bytes: int


@dataclasses.dataclass(eq=False, slots=True)
class _Progress:
    """How far the modules behind the first are with a row. `entered[k]`: positions up to which module k's entries are true (those of module
    0 are the row's own `computed`); `inputs[k]`: what it reads at the positions from there on, as far as that is known, [w, W]."""

    traced: Traced
    base: int
    entered: list[int]
    inputs: list[Tensor]


@dataclasses.dataclass(eq=False, slots=True)
class _Growing:
    """A draft under way. `made`: what the module before made at positions behind the true ones, which the next reads where they are
    chained, [g, W]."""

    progress: _Progress
    tree: Tree
    made: Tensor


class Cascade:
    """`most`: nodes of a draft."""

    def __init__(self, stages: Stages, levels: Levels, host: Host, most: int) -> None:
        self._stages = stages
        self._ops, self._backend, self._told = host.backend.ops, host.backend, host.progress
        self._hidden = host.model.hidden
        self._levels = levels
        self._branches = Branches(levels, beams=1)
        self._most, self._deepest = most, len(stages.nets)
        self._progress: dict[int, _Progress] = {}
        self.listener = Listener(levels.calibration, self._enter_behind)
        rows, net = host.start.max_rows, stages.nets[0]
        self._room = CATCH_UP + rows * (most + 2 + LAG + self._deepest)
        work = self._room * (COPIES * self._deepest * max(each.width for each in stages.nets) + stages.width + 3 * net.carried)
        work += 2 * rows * net.vocab * self._deepest + rows * self._deepest * 2 * LAG * net.carried + STORAGE * host.model.hidden
        taps = (stages.tap,)
        self.needs = Needs(
            taps,
            (stages.pool,),
            most,
            lazy=False,
            weight_bytes=stages.bytes,
            work_bytes=4 * work,
            attach=self._attach,
            late=self.listener.lacks,
            behind=self.listener.behind,
        )

    def absorb(self, commit: Commit) -> None:
        self.listener.absorb(commit)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self.listener.asked()
        began = time.perf_counter()
        growing, heard, entered = self._enter(rows, budget, terms)
        self._levels.pace.observe(entered, time.perf_counter() - began)
        going = list(growing.values())
        for place in range(1, self._deepest):
            going = [one for one in going if self._branches.wanted(one.tree, terms)]
            if not self._branches.pays([one.tree for one in going], [[one.tree.opened[-1]] for one in going], terms):
                going = []
            began = time.perf_counter()
            self._step(place, going, heard, terms)
            if going:
                self._levels.pace.observe(len(going), time.perf_counter() - began)
        self._settle(heard)
        return [self._branches.finish(growing[number].tree if number in growing else None) for number in rows]

    def forget(self, rows: list[int]) -> None:
        self.listener.forget(rows)
        for number in rows:
            self._progress.pop(number, None)

    # -- what came true ----------------------------------------------------------------------------------------------------------

    def _attach(self, place: Place) -> None:
        pool, stages = place.pools[0], self._stages
        self._table = place.table
        self.listener.open(Trail(place.table, pool.keys.shape[1], successor=True))
        self._stage = Stage.open(self._room, stages.width, stages.nets[0].carried, self._backend.device)
        self._runs = [self._recorded(net, pool) for net in stages.nets]
        for module in range(self._deepest):
            for stems in rehearsals(place, self._room, 1):
                self._told("warming", 0, 1)
                count = sum(each.known for each in stems)
                for _ in range(2):
                    fused = self._fused(torch.zeros(count, self._hidden, device=self._backend.device))
                    self._levels.rehearse(self._run(module, stems, [0] * count, fused).logits)

    def _recorded(self, net: Net, pool: Pool) -> Callable[[Batch], Stepped]:
        ops, stage = self._ops, self._stage
        return self._backend.capture(lambda batch: net.through(ops, stage, batch, pool), None)

    def _enter(self, rows: Sequence[int], budget: Sequence[int], terms: Terms) -> tuple[dict[int, _Growing], list[_Progress], int]:
        """The first module enters what waits of the rows asked about: all, where it is not much. Returns drafts of one level for those
        that are then up to date, all rows that were entered, and how many entries that were."""
        trail = self.listener.trail
        asked = trail.portion(trail.able(rows, budget), self._most, CATCH_UP)
        if not asked:
            return {}, [], 0
        heard = [self._of(one.traced) for one in asked]
        stems = [stem(one.traced, one.count, (one.count - 1,) if one.ends else ()) for one in asked]
        parts = [trail.take(one.traced, one.count) for one in asked]
        stepped = self._first(stems, heard, [token for tokens, _ in parts for token in tokens], [features for _, features in parts])
        growing: dict[int, _Growing] = {}
        for progress, one in zip(heard, asked):
            if one.ends:
                tree = Tree(one.traced.row, one.most, min(one.depth, self._deepest))
                growing[one.traced.row.number] = _Growing(progress, tree, stepped.carried[:0])
        if growing:
            self._branches.add([one.tree for one in growing.values()], [ROOT] * len(growing), stepped.logits, terms)
        return growing, heard, sum(one.count for one in asked)

    def _of(self, traced: Traced) -> _Progress:
        """How far the modules are; from the beginning for a row that is new, or that begins late."""
        progress = self._progress.get(traced.row.number)
        if progress is None or progress.traced is not traced or progress.base != traced.base:
            none = torch.zeros(0, self._stages.nets[0].carried, device=self._backend.device)
            computed = traced.row.computed
            progress = _Progress(traced, traced.base, [computed] * self._deepest, [none] * self._deepest)
            self._progress[traced.row.number] = progress
        return progress

    def _first(self, stems: list[Stem], heard: list[_Progress], tokens: list[int], features: list[Tensor]) -> Stepped:
        """True rows of the first module; what it made of them, or what was there, waits for the others."""
        fused = self._fused(features[0] if len(features) == 1 else torch.cat(features))
        stepped = self._run(0, stems, tokens, fused)
        made = torch.split(stepped.carried if self._stages.chained else fused, [each.known for each in stems])
        for progress, rows in zip(heard, made):
            for place in (1,) if self._stages.chained else range(1, self._deepest):
                progress.inputs[place] = torch.cat([progress.inputs[place], rows])
        return stepped

    def _fused(self, features: Tensor) -> Tensor:
        return self._stages.nets[0].fusion(self._ops, features).float()

    def _enter_behind(self, traced: Traced, count: int) -> None:
        progress = self._of(traced)
        row = stem(traced, count, ())
        tokens, features = self.listener.trail.take(traced, count)
        self._first([row], [progress], tokens, [features])
        for place in range(1, self._deepest):
            self._step(place, [], [progress], FREE)
        self._settle([progress])

    def _settle(self, heard: Sequence[_Progress]) -> None:
        """Entries of all modules are there, for other rows to find."""
        for progress in heard:
            self.listener.trail.entered(progress.traced, min(progress.traced.row.computed, *progress.entered[1:]))

    # -- guesses -----------------------------------------------------------------------------------------------------------------

    def _step(self, place: int, going: list[_Growing], heard: Sequence[_Progress], terms: Terms) -> None:
        """Module `place` over what waits in front of it: of drafts that go on together with the rows that read guesses, of other rows if
        it is much."""
        chained = self._stages.chained
        drafts = {one.progress.traced.row.number: one for one in going}
        stems: list[Stem] = []
        tokens: list[int] = []
        staged: list[Tensor] = []
        parts: list[tuple[_Progress, _Growing | None, int]] = []
        for progress in heard:
            row, first = progress.traced.row, progress.entered[place]
            one = drafts.get(row.number)
            waiting = progress.inputs[place]
            true = max(0, min(waiting.shape[0], len(row.tokens) - 1 - place - first))
            if one is None and true <= LAG:
                continue
            if one is None:
                inputs, text = waiting[:true], row.tokens
            else:
                inputs = torch.cat([waiting, one.made]) if chained else waiting
                text = row.tokens + [one.tree.token[node] for node in one.tree.opened]
            count = inputs.shape[0]
            stems.append(Stem(row.number, progress.base, first, count, (), () if one is None else (count - 1,)))
            tokens += text[first + 1 + place : first + 1 + place + count]
            staged.append(inputs)
            parts.append((progress, one, true))
            self.listener.trail.scribbles(progress.traced, first, first + count)
        if not stems:
            return
        stepped = self._run(place, stems, tokens, torch.cat(staged))
        for (progress, one, true), rows in zip(parts, torch.split(stepped.carried, [each.known for each in stems])):
            progress.entered[place] += true
            progress.inputs[place] = progress.inputs[place][true:]
            if chained and place + 1 < self._deepest:
                progress.inputs[place + 1] = torch.cat([progress.inputs[place + 1], rows[:true]])
            if one is not None:
                one.made = rows[true:]
        if going:
            ordered = [one for _, one, _ in parts if one is not None]
            self._branches.add([one.tree for one in ordered], [one.tree.opened[-1] for one in ordered], stepped.logits, terms)

    def _run(self, place: int, stems: list[Stem], tokens: Sequence[int], carried: Tensor) -> Stepped:
        ids = torch.tensor(tokens, dtype=torch.int32, device=self._backend.device)
        self._stage.put(self._stages.embeds[place](self._ops, ids), carried)
        return self._runs[place](grow(stems, self._table, self._backend.device))
