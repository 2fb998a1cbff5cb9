"""Levels from heads: the protocol between drafters that know rows and those that turn hidden states into logits, place by place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from forerun.backends.base import Ops
from forerun.engine.drafters.draft import Terms
from forerun.engine.drafters.lattice import Lattice, Levels

ROWS = 8
"""Rows of a head's product that cost hardly more than one, where memory is what it waits for: so many places are read at once."""


class Said(Protocol):
    """What heads say of several rows, place by place behind the root."""

    def level(self, place: int, newest: Sequence[int]) -> tuple[Tensor, list[float] | None]:
        """(logits [n, V'] of this place, what is said of the likeliest token of each row, if that is known better than its probability).
        `newest`: the token in front of the place, of each row: the root, then what was chosen. Places are asked for in order."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on, by their number among those so far."""
        ...


class Voice(Protocol):
    @property
    def free(self) -> bool:
        """A place does not depend on what was chosen for the ones before."""
        ...

    def says(self, hidden: Tensor) -> Said:
        """hidden [n, places, H]: the rows that guess, behind the net's last norm."""
        ...


def speak(levels: Levels, said: Said, growing: Sequence[Lattice], places: int, terms: Terms) -> None:
    """Grows all lattices place by place, as long as it pays."""
    ones = list(growing)
    for place in range(places):
        began = time.perf_counter()
        logits, trust = said.level(place, [one.chain[-1] if place else one.row.tokens[-1] for one in ones])
        levels.add(ones, logits, terms, trust)
        levels.pace.observe(len(ones), time.perf_counter() - began)
        kept = [i for i, one in enumerate(ones) if levels.goes_on(one, terms)]
        if len(kept) < len(ones):
            ones = [ones[i] for i in kept]
            said.keep(kept)
        if not levels.pays(ones, terms):
            return


def rehearse(levels: Levels, said: Said, rows: int, places: int) -> None:
    """Hears all places of so many rows, so that nothing is allocated or made for the first time when it counts. Nothing is learned."""
    for place in range(places):
        levels.rehearse(said.level(place, [0] * rows)[0])


class Heard:
    """A head's logits of states [n, places, H], several places at a time."""

    def __init__(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> None:
        self.hidden = hidden
        self._head = head
        self._chunk = max(1, ROWS // max(1, hidden.shape[0]))
        self._first = -1
        self._logits = hidden

    def at(self, place: int) -> Tensor:
        """[n, V']."""
        first = place - place % self._chunk
        if first != self._first:
            part = self.hidden[:, first : first + self._chunk]
            self._logits = self._head(part.reshape(-1, part.shape[2])).view(part.shape[0], part.shape[1], -1)
            self._first = first
        return self._logits[:, place - first]

    def keep(self, rows: Sequence[int]) -> None:
        self.hidden = self.hidden[list(rows)]
        if self._first >= 0:
            self._logits = self._logits[list(rows)]


class Marginals:
    """DFlash: each place by itself, straight from the head."""

    free = True

    def __init__(self, ops: Ops, output: Callable[[Ops, Tensor], Tensor]) -> None:
        self._ops = ops
        self._output = output

    def says(self, hidden: Tensor) -> Said:
        return Marginal(Heard(hidden, lambda x: self._output(self._ops, x)))


class Marginal:
    """Each place by itself, all from one head."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard

    def level(self, place: int, newest: Sequence[int]) -> tuple[Tensor, list[float] | None]:
        return self._heard.at(place), None

    def keep(self, rows: Sequence[int]) -> None:
        self._heard.keep(rows)
