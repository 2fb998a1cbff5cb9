"""What a source's drafts have earned, and which rows it is asked about.

For each row a running mean of what the source's own drafts brought: accepted guesses, less what verifying the draft took. A new row starts
from the mean of all. The source is worth its time for the rows that together bring more, beyond what other sources promise there, than
the time would have brought otherwise:

    net(k) = Σ over the k best rows (worth − promised − reading) − goodput · seconds(k)       the k with the largest, if that is above 0

What is not asked is not learned about, so a row that is left out is tried again after a pause that doubles each time in vain, as long as
there is something in the purse: a share of all tokens. Hence a useless source costs that share at the most, and one that becomes useful
is found all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from forerun.engine.drafters.fee import ASKS, Fee

FIRST_WORTH = 2.0
"""what a draft of a source is taken to earn before one has"""
LEAST_GAIN = 0.05
"""a row that brings less than this is not worth handling"""
FIRST_PAUSE, LONGEST_PAUSE = 4, 128
"""times that a row is left out before it is tried again"""
EXPLORE, CREDIT = 0.005, 1.0
"""share of all tokens that trying may cost, and what of it may be saved up"""
_STEP, _STEP_OF_ALL = 0.1, 0.01
"""shares of the newest draft in what a source has earned with a row, and with all rows, in the long run"""
_STEP_OF_TRY = 0.3
"""of a try: what was known before it is old"""
_PRIOR = 3
"""drafts of its own that the mean of all counts for in a new row"""


class Round(NamedTuple):
    """Who may be asked about. `promised[i]`: what others are expected to bring for rows[i]; `unread[i]`: tokens of it that the source has
    to catch up with; `goodput`: tokens that a second is worth."""

    rows: Sequence[int]
    promised: Sequence[float]
    unread: Sequence[int]
    goodput: float


@dataclasses.dataclass(eq=False, slots=True)
class _Row:
    """`worth`: mean of `seen` drafts (and the prior); `left`: rounds until it is tried although it does not pay; `needed`: what it
    had to bring when it was tried, None = it was not."""

    worth: float
    seen: int = 0
    needed: float | None = None
    pause: int = FIRST_PAUSE
    left: int = 0


class Earned:
    def __init__(self) -> None:
        self._all = FIRST_WORTH
        self._seen = 0
        self._pause = FIRST_PAUSE
        """where new rows start: as long as the last one that was in vain had come to"""
        self._purse = CREDIT
        self._rows: dict[int, _Row] = {}

    def worth(self, row: int) -> float:
        known = self._rows.get(row)
        return known.worth if known else self._all

    def offer(self, round: Round, fee: Fee) -> tuple[float, list[int]]:
        """(net, places of the rows that the source is worth its time for). Changes nothing."""
        goodput = round.goodput
        gains = sorted(
            (
                (self.worth(row) - promise - goodput * fee.reading(unread) / ASKS, i)
                for i, (row, promise, unread) in enumerate(zip(round.rows, round.promised, round.unread))
            ),
            reverse=True,
        )
        best = total = 0.0
        count = 0
        for k, (gain, _) in enumerate(gains, 1):
            if gain < LEAST_GAIN:
                break
            total += gain
            net = total - goodput * fee.asking(k)
            if net > best:
                best, count = net, k
        return best, [i for _, i in gains[:count]]

    def choose(self, round: Round, worth: Sequence[int], fee: Fee) -> list[int]:
        """The places of the rows that the source is asked about in this round: those it is worth it for, and those whose turn it is to be
        tried."""
        asked = set(worth)
        if worth:
            self._pause = FIRST_PAUSE
        self._purse = min(CREDIT, self._purse + EXPLORE * len(round.rows))
        for i, number in enumerate(round.rows):
            row = self._row(number)
            if i in asked:
                row.pause = row.left = FIRST_PAUSE
            elif row.left > 0:
                row.left -= 1
            elif self._purse > 0.0:
                more = round.goodput * max(0.0, fee.asking(len(asked) + 1) - fee.asking(len(asked)))
                self._purse -= more + round.goodput * fee.reading(round.unread[i])
                asked.add(i)
                row.needed = round.promised[i] + more
                row.left = row.pause
                row.pause = self._pause = min(2 * row.pause, LONGEST_PAUSE)
        return sorted(asked)

    def saw(self, row: int, earned: float) -> None:
        """What became of a draft for this row: accepted guesses, less what verifying it took."""
        known = self._row(row)
        known.seen += 1
        needed, known.needed = known.needed, None
        known.worth += max(_STEP if needed is None else _STEP_OF_TRY, 1 / (known.seen + _PRIOR)) * (earned - known.worth)
        if needed is not None and needed < earned:  # it would have paid: look again at once
            known.left, known.pause = 0, FIRST_PAUSE
        self._seen += 1
        self._all += max(_STEP_OF_ALL, 1 / (self._seen + _PRIOR)) * (earned - self._all)

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def _row(self, row: int) -> _Row:
        known = self._rows.get(row)
        if known is None:
            known = self._rows[row] = _Row(self._all, pause=self._pause, left=self._pause)
        return known
