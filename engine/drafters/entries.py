"""Entries that a net of `recursive_net.py` has of what is true: one for each position, made of the target's features there and the token
behind them. What drafters do from there on (`recursive.py`, `parallel.py`) is theirs.

    a forward   stems: rows that are entered, and whatever guesses stand behind them; staged beside: embeddings and what the net carries
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.backends.base import Ops, PoolSpec
from forerun.engine.batch import Batch, Stem, grow
from forerun.engine.drafters.draft import Needs, Place
from forerun.engine.drafters.lattice import Levels
from forerun.engine.drafters.listener import CATCH_UP, Listener
from forerun.engine.drafters.recursive_net import Net, Stage, Stepped
from forerun.engine.drafters.registry import Host
from forerun.engine.drafters.taps import STORAGE, Due, Traced, Trail

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


class Entries:
    """`most`: nodes of a draft; `scored`: logits of a row in one forward, at the most."""

    def __init__(self, made: Made, levels: Levels, host: Host, most: int, scored: int) -> None:
        self._net, self._embed, self._width, self._most = made.net, made.embed, made.width, most
        self._ops, self._backend, self._progress = host.backend.ops, host.backend, host.progress
        self._levels, self._scored = levels, scored
        self.listener = Listener(levels.calibration, self._enter_behind)
        rows = host.start.max_rows
        self._room = CATCH_UP + rows * (most + 2)
        self._tapped = len(made.taps) * host.model.hidden
        work = self._room * (made.net.width * COPIES + made.width + made.net.carried) + 2 * rows * scored * made.net.vocab
        work += (STORAGE + 2 * self._room) * self._tapped  # what waits; what is entered, joined and fused
        self.needs = Needs(
            made.taps,
            (made.pool,),
            most,
            lazy=False,
            weight_bytes=made.bytes,
            work_bytes=4 * work,
            attach=self._attach,
            late=self.listener.lacks,
            behind=self.listener.behind,
        )

    def due(self, rows: Sequence[int], budget: Sequence[int]) -> list[Due]:
        """What is to be entered of the rows asked about."""
        trail = self.listener.trail
        return trail.portion(trail.able(rows, budget), self._most, CATCH_UP)

    def take(self, asked: Sequence[Due]) -> list[tuple[list[int], Tensor]]:
        """Tokens and features of entries that are about to be made."""
        return [self.listener.trail.take(one.traced, one.count) for one in asked]

    def entered(self, asked: Sequence[Due]) -> None:
        """They were made."""
        for one in asked:
            self.listener.trail.entered(one.traced, one.traced.row.computed)

    def fused(self, parts: Sequence[tuple[list[int], Tensor]]) -> Tensor:
        """What the net carries of the features of these parts, [n, W]."""
        return self._net.fusion(self._ops, parts[0][1] if len(parts) == 1 else torch.cat([features for _, features in parts]))

    def run(self, stems: list[Stem], tokens: Sequence[int], carried: Tensor) -> Stepped:
        """One forward of these rows, each with its token and what the net carries there."""
        ids = torch.tensor(tokens, dtype=torch.int32, device=self._backend.device)
        self._stage.put(self._embed(self._ops, ids), carried)
        stepped: Stepped = self._run(grow(stems, self._table, self._backend.device))
        return stepped

    def _attach(self, place: Place) -> None:
        pool, net, ops = place.pools[0], self._net, self._ops
        self._table = place.table
        self.listener.open(Trail(place.table, pool.keys.shape[1], successor=True))
        self._stage = Stage.open(self._room, self._width, net.carried, self._backend.device)
        stage = self._stage

        def forward(batch: Batch) -> Stepped:
            return net.forward(ops, stage, batch, pool)

        self._run = self._backend.capture(forward, None)
        for stems in rehearsals(place, self._room, min(self._scored, place.longest)):
            self._progress("warming", 0, 1)
            count = sum(each.known for each in stems)
            for _ in range(2):
                features = torch.zeros(count, self._tapped, device=self._backend.device)
                self._levels.rehearse(self.run(stems, [0] * count, self.fused([([], features)])).logits)

    def _enter_behind(self, traced: Traced, count: int) -> None:
        row = stem(traced, count, ())
        parts = [self.listener.trail.take(traced, count)]
        self.run([row], parts[0][0], self.fused(parts))
        self.listener.trail.entered(traced, traced.row.computed)


def rehearsals(place: Place, most: int, scored: int) -> list[list[Stem]]:
    """Forwards of every kind that there will be, the largest and the smallest: `most` entries without logits, so many logits of all rows,
    `most` entries and one row's logits, one entry."""
    parts = place.spread(most)
    text = [Stem(row, 0, 0, count, (), ()) for row, count in enumerate(parts)]
    every = [Stem(row, 0, 0, scored, (), range(scored)) for row in range(place.rows)]
    return [text, every, [text[0]._replace(scored=(0,)), *text[1:]], [Stem(0, 0, 0, 1, (), (0,))]]


def stem(traced: Traced, count: int, scored: Sequence[int]) -> Stem:
    """The next `count` positions of a row."""
    return Stem(traced.row.number, traced.base, traced.row.computed, count, (), tuple(scored))
