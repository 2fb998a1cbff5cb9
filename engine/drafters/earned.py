"""What a source's drafts have earned, and which rows it is asked about.

For each row a running mean of accepted guesses of the source's own drafts; a new row starts from the mean of all. The source is worth its
time for the rows that together bring more, beyond what other sources promise there, than time and rows of the forward would have brought
otherwise:

    net(k) = Σ over the k best rows (worth − promised − reading) − verifying − goodput · seconds(k)

with the k that is best before verifying is counted. Reading is the row's share of what the source has to catch up with, spread over the
asks that it is read for; verifying is what the tolls of the step take of such guesses beside those of the others.

What is not asked is not learned about, so a row that is left out is tried again after a pause that doubles each time in vain, once the
rounds of all rows have saved what the try is expected to cost, and lasts until the source has read the row and guessed for it. What it took
is spent then; or what was expected, where that is less: a process that was stopped is no price. As long as nobody knows what asking
takes, one row is tried at a time. Hence a useless source costs a few tries at first and then `EXPLORE` at the most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from forerun.engine.drafters.asking import Asking
from forerun.engine.drafters.choose import profit

FIRST_WORTH = 1.0
"""accepted guesses of a draft that a source is credited with before it has shown what it earns"""
LEAST_GAIN = 0.05
"""a row that brings less than this is not worth handling"""
FIRST_PAUSE, LONGEST_PAUSE = 4, 128
"""times that a row is left out before it is tried again"""
EXPLORE, SAVED = 0.01, 8.0
"""tokens a round that trying may cost for each row, and how many can be saved for it"""
READ_ASKS = 4
"""asks over which it is spread what a source takes to catch up with a row"""
_STEP, _STEP_OF_ALL = 0.1, 0.01
"""shares of the newest draft in what a source has earned with a row, and with all rows, in the long run"""
_STEP_OF_TRY = 0.3
"""of a try: what was known before it is old"""
_PRIOR = 3
"""drafts of its own that the mean of all counts for in a new row"""


class Load(NamedTuple):
    """Of a round. promised[i]: survivals of the guesses that others have for rows[i]; unread[i]: tokens that the source has to catch up
    with there, beyond the usual; `goodput`: tokens that a second is worth; toll[n]: tokens that n + 1 guesses must bring."""

    rows: Sequence[int]
    promised: Sequence[Sequence[float]]
    unread: Sequence[int]
    goodput: float
    toll: Sequence[float]


@dataclasses.dataclass(eq=False, slots=True)
class _Row:
    """`worth`: mean of `seen` drafts (and the prior); `promised`: what others usually have for it; `left`: rounds until it may be tried
    although it does not pay; `needed`: what it has to bring for the try that it is in, −1 = it is in none."""

    worth: float
    promised: float
    seen: int = 0
    needed: float = -1.0
    pause: int = FIRST_PAUSE
    left: int = 0


class Earned:
    """`asking`: how long the source takes, which is measured outside."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._all = FIRST_WORTH
        self._seen = 0
        self._pause = FIRST_PAUSE
        """where new rows start: as long as the last one that was in vain had come to"""
        self._rows: dict[int, _Row] = {}
        self._saved = 0.0
        """tokens that trying may cost"""
        self._worthy = self._tried = 0
        """rows of the last round that it was asked about because it was worth it, and for a try"""
        self._shape: list[float] = []
        """survival of its likeliest guess, of the next, …, on average"""

    def worth(self, row: int) -> float:
        known = self._rows.get(row)
        return known.worth if known else self._all

    def offer(self, load: Load) -> tuple[float, list[int]]:
        """(net, places of the rows that the source is worth its time for). Changes nothing."""
        gains = sorted(((self._gain(load, i), i) for i in range(len(load.rows))), reverse=True)
        best = total = 0.0
        count = 0
        for k, (gain, _) in enumerate(gains, 1):
            if gain < LEAST_GAIN:
                break
            total += gain
            net = total - load.goodput * self._asking.seconds(k)
            if net > best:
                best, count = net, k
        if count:
            best -= self._verifying(load, [gain for gain, _ in gains[:count]])
        return (best, [i for _, i in gains[:count]]) if best > 0.0 else (0.0, [])

    def round(self, load: Load, worth: Sequence[int]) -> list[int]:
        """The places of the rows that the source is asked about in this round: those it is worth it for, and those that are tried."""
        worthy, asking = set(worth), self._asking
        asked = worthy | {i for i, number in enumerate(load.rows) if number in self._rows and self._rows[number].needed >= 0.0}
        more = load.goodput * (asking.seconds(len(worth) + 1) - asking.seconds(len(worth)))
        self._saved = saved = min(SAVED, self._saved + EXPLORE * len(load.rows))
        if worth:
            self._pause = FIRST_PAUSE
        for i, number in enumerate(load.rows):
            promised = sum(load.promised[i])
            row = self._rows.get(number) or self._open(number, promised)
            row.promised += _STEP * (promised - row.promised)
            if i in worthy:
                row.pause = row.left = FIRST_PAUSE
            elif i in asked:
                continue
            elif row.left > 0:
                row.left -= 1
            elif asked and not asking.seconds(1):
                continue  # what that takes shows first
            elif promised < row.promised + LEAST_GAIN:  # where others know how the text goes on, everybody does, and nothing is learned
                cost = more + load.goodput * asking.reading(load.unread[i])
                if saved >= min(cost, SAVED):  # what is dearer than can be saved is owed
                    saved -= cost
                    asked.add(i)
                    row.needed = max(0.0, promised + more + self._verifying(load, [row.worth]))
                    row.left = row.pause
                    row.pause = self._pause = min(2 * row.pause, LONGEST_PAUSE)
        self._worthy, self._tried = len(worthy), len(asked) - len(worthy)
        return sorted(asked)

    def took(self, goodput: float, seconds: float) -> None:
        """The ask of this round took so long; what it takes for the rows that are worth it is no part of what tries cost."""
        if self._tried:
            self._saved -= goodput * max(0.0, seconds - self._asking.seconds(self._worthy))

    def proposed(self, survival: Sequence[float]) -> None:
        """A draft of the source: the survivals of its guesses."""
        for rank, value in enumerate(sorted(survival, reverse=True)):
            if rank == len(self._shape):
                self._shape.append(value)
            self._shape[rank] += _STEP * (value - self._shape[rank])
        for rank in range(len(survival), len(self._shape)):
            self._shape[rank] -= _STEP * self._shape[rank]

    def saw(self, row: int, accepted: int) -> None:
        """What became of a draft for this row."""
        known = self._rows.get(row) or self._open(row, 0.0)
        known.seen += 1
        needed, known.needed = known.needed, -1.0
        known.worth += max(_STEP_OF_TRY if needed >= 0.0 else _STEP, 1 / (known.seen + _PRIOR)) * (accepted - known.worth)
        if 0.0 <= needed < accepted:  # it would have paid: look again at once
            known.left, known.pause = 0, FIRST_PAUSE
        self._seen += 1
        self._all += max(_STEP_OF_ALL, 1 / (self._seen + _PRIOR)) * (accepted - self._all)

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def _gain(self, load: Load, place: int) -> float:
        """Guesses that the source may be expected to add for this row, less its reading."""
        unread = load.unread[place]
        reading = load.goodput * self._asking.reading(unread) / READ_ASKS if unread else 0.0
        return self.worth(load.rows[place]) - sum(load.promised[place]) - reading

    def _verifying(self, load: Load, gains: Sequence[float]) -> float:
        """Tokens that it takes to verify guesses that bring so many, beside those that others promise; none as long as nobody knows how it
        spreads them."""
        if not load.toll or not self._shape:
            return 0.0
        others = [value for promised in load.promised for value in promised]
        whole = sum(self._shape) or 1.0
        own = [gain * value / whole for gain in gains for value in self._shape]
        return sum(gains) - (profit([*others, *own], load.toll) - profit(others, load.toll))

    def _open(self, row: int, promised: float) -> _Row:
        opened = self._rows[row] = _Row(self._all, promised, pause=self._pause, left=self._pause)
        return opened
