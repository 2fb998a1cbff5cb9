"""Rows of a drafter that reads the target's features and has a KV pool of its own: which features came, which entries are made of them.

    position     0 … base−1 │ base … computed−1 │ computed … end−1 │ end …
                 no entries │ entries in the    │ features that    │ nothing is
                 (late row) │ drafter's pool    │ wait            │ known yet

The pool has the target's page ids, and the entry for position p is made of the target's features at p: for DFlash and DSpark of these
alone, for EAGLE and MTP of the pair (features at p, token p + 1), so that the last features of a prompt chunk wait for the next one's
first token. Features can never be had again. So:

* They wait until somebody drafts, and are entered in bounded parts. While nobody asks, they cost their storage and no more.
* What a prefix hit of the target did not compute has no features. Where the pool holds its entries (`held.py`: another row with the
  same beginning made them) the row goes on behind them. Otherwise it begins late: at the first whole page behind the hole, with
  positions counted from there (rotations are relative). It drafts from less context; `late` counts the positions that it lacks, and
  the log says when they are twice as many.
* The last entry of a page that was found may be of another row's successor token; that costs a little acceptance and nothing else.
* Storage is bounded. What is too much is entered at once while somebody drafts (`excess`), and otherwise the row with most gives up the
  older half of what waits, and is late then.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.engine.drafters import ear
from forerun.engine.drafters.calibration import Calibration
from forerun.engine.drafters.draft import Commit
from forerun.engine.drafters.held import Held
from forerun.engine.drafters.history import fresh
from forerun.engine.kv import Table
from forerun.engine.rows import Row
from forerun.messages import SamplingParams

log = logging.getLogger(__name__)

STORED = 4096
"""feature rows that may wait, of all rows together"""
SPARSE, LOOSE = 8, 2
"""A view of storage so many times its size is copied: at once, and when it waits longer than a step."""
STORAGE = LOOSE * STORED + ear.ROWS
"""feature rows for which there is memory"""


@dataclasses.dataclass(eq=False, slots=True)
class Traced:
    """What is known of a row. `row.computed`: entries reach so far; `base`: where they begin; `waiting`: positions whose features wait."""

    row: Row
    base: int = 0
    waiting: int = 0
    parts: deque[Tensor] = dataclasses.field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.row.computed + self.waiting

    @property
    def ready(self) -> bool:
        """All that is behind the root has its entry, and there is some."""
        return self.row.computed == len(self.row.tokens) - 1 and self.row.computed > self.base


@dataclasses.dataclass(frozen=True, slots=True)
class Due:
    """A row whose next `count` entries are to be made. `ends`: then it has all, and can have `most` nodes in `depth` levels."""

    traced: Traced
    most: int
    depth: int
    count: int
    ends: bool


class Trail:
    """`pages`: of the pool. `successor`: an entry needs the token that follows too. `stored`: feature rows that may wait."""

    def __init__(self, table: Table, pages: int, successor: bool, stored: int = STORED) -> None:
        self._table = table
        self._held = Held(table, pages)
        self.successor = successor
        self._stored = stored
        self._rows: dict[int, Traced] = {}
        self.waiting = 0
        """feature rows that wait"""
        self.late = 0
        """positions of the target that have no entry and will have none, so far"""
        self._told = 1
        """the log hears of it at twice as many"""

    def absorb(self, commit: Commit) -> list[tuple[Traced, list[int]]]:
        """Stores; returns each row with the tokens that are new."""
        told: list[tuple[Traced, list[int]]] = []
        for i, number in enumerate(commit.rows):
            traced, begins = self._rows.get(number), not commit.start[i]
            if traced is None or begins:
                self.forget([number])
                traced = self._rows[number] = Traced(open_row(commit, i))
                begins = True
            row = traced.row
            new = fresh(commit, i, len(row.tokens))
            row.commit(new, row.computed)
            if begins:
                row.computed = self._held.open(number, row.tokens)
            features = commit.features[i] if commit.features is not None else None
            if features is not None and features.shape[0]:
                self._store(traced, commit.start[i] + len(commit.tokens[i]) - features.shape[0], features)
            told.append((traced, new))
        return told

    def get(self, number: int) -> Traced | None:
        return self._rows.get(number)

    def behind(self) -> list[Traced]:
        """Rows with features that could be entered, the shortest way first."""
        return sorted((each for each in self._rows.values() if self.due(each) > 0), key=self.due)

    def due(self, traced: Traced) -> int:
        """How many entries can be made now."""
        return min(traced.end, len(traced.row.tokens) - self.successor) - traced.row.computed

    def able(self, rows: Sequence[int], budget: Sequence[int]) -> list[tuple[Traced, int]]:
        """Those of these rows that were heard of, may have guesses, and whose pages hold all their tokens."""
        found = []
        for number, most in zip(rows, budget):
            traced = self._rows.get(number)
            if traced is not None and most > 0 and len(traced.row.tokens) <= self._table.reach(number):
                found.append((traced, most))
        return found

    def portion(self, able: Sequence[tuple[Traced, int]], usual: int, left: int) -> list[Due]:
        """What is to be entered now of rows that may have so many guesses, those with little first: all, where it is no more than a draft
        leaves behind; more than `usual` + 1 only as far as `left` goes."""
        found: list[Due] = []
        for traced, most in sorted(able, key=lambda each: self.due(each[0])):
            due, row = self.due(traced), traced.row
            count = due if due <= most + 1 or due <= left else left
            if count < 1:
                continue
            left -= count if count > usual + 1 else 0
            ends = count == due and row.computed + count == len(row.tokens) - 1
            room = self._table.reach(row.number) - len(row.tokens) + 1
            found.append(Due(traced, most, min(most, room), count, ends))
        return found

    def take(self, traced: Traced, count: int) -> tuple[list[int], Tensor]:
        """The next `count` entries (at most `due`) are about to be made: the tokens that follow their positions (or, without successors,
        those at them) and the features there, [count, taps · hidden]. They are there when `entered` says so."""
        row, first = traced.row, traced.row.computed
        parts: list[Tensor] = []
        left = count
        while left:
            part = traced.parts.popleft()
            if part.shape[0] > left:
                traced.parts.appendleft(close(part[left:], LOOSE))
                part = part[:left]
            parts.append(part)
            left -= part.shape[0]
        traced.waiting -= count
        self.waiting -= count
        self.scribbles(traced, first, first + count)
        row.computed += count
        shift = int(self.successor)
        return row.tokens[first + shift : first + shift + count], parts[0] if len(parts) == 1 else torch.cat(parts)

    def entered(self, traced: Traced, count: int) -> None:
        """The entries of the first `count` positions were made: other rows may find them. Not sooner, since what makes them may fail."""
        if not traced.base:
            self._held.wrote(traced.row.number, traced.row.tokens, count)

    def scribbles(self, traced: Traced, first: int, last: int) -> None:
        """Entries of positions first … last−1 are about to be written."""
        if last > first:
            self._held.writes(traced.row.number, first, last)

    @property
    def excess(self) -> int:
        """Feature rows that wait beyond what may."""
        return max(0, self.waiting - self._stored)

    def learn(self, commit: Commit, calibration: Calibration) -> None:
        """Absorbs, and tells what became of the guesses for these rows; a row that begins anew has none."""
        for i, (traced, new) in enumerate(self.absorb(commit)):
            if not commit.start[i]:
                calibration.forget(traced.row.number)
            calibration.settle(traced.row.number, new)

    def shed(self) -> None:
        """Give up what is too much."""
        while self.excess:
            most = max(self._rows.values(), key=lambda each: each.waiting)
            self._begin_late(most, most.end - most.waiting // 2)

    def forget(self, rows: Sequence[int]) -> None:
        for number in rows:
            traced = self._rows.pop(number, None)
            if traced is not None:
                self.waiting -= traced.waiting
                self._held.forget(number)

    def _store(self, traced: Traced, first: int, features: Tensor) -> None:
        if first > traced.end:
            self._begin_late(traced, first)
        known = traced.end - first
        if known > 0:
            features = features[known:]
        if not features.shape[0]:
            return
        if traced.parts:
            traced.parts[-1] = close(traced.parts[-1], LOOSE)
        traced.parts.append(close(features, SPARSE))
        traced.waiting += features.shape[0]
        self.waiting += features.shape[0]

    def _begin_late(self, traced: Traced, first: int) -> None:
        """There will be no entries below the first page that begins at `first` or behind it."""
        size, row = self._table.page_tokens, traced.row
        base = -(-first // size) * size
        kept = max(0, traced.end - base)
        self.late += base - traced.base
        if self.late >= self._told:
            log.info("guesses are made without the first %d tokens that they should see, counted over all sequences so far", self.late)
            self._told = 2 * self.late
        features = torch.cat(list(traced.parts))[traced.waiting - kept :].clone() if kept else None
        self.waiting -= traced.waiting - kept
        traced.base, row.computed, traced.waiting = base, base, kept
        traced.parts = deque([] if features is None else [features])
        self._held.forget(row.number)


def close(part: Tensor, most: int) -> Tensor:
    """A copy of its own, if it is a view of storage more than `most` times its size."""
    return part.clone() if part.untyped_storage().nbytes() > most * part.nbytes else part


def open_row(commit: Commit, i: int) -> Row:
    """A row that is heard of for the first time, without its tokens."""
    prompt = commit.prompt[i] if commit.prompt else len(commit.tokens[i])
    params = commit.params[i] if commit.params else SamplingParams(seed=0, prompt_tokens=prompt, max_new_tokens=1 << 30)
    return Row.open(commit.rows[i], params, [])
