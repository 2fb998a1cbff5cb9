"""What a source's drafts have earned, and which rows it is asked about.

For each row a running mean of accepted guesses of the source's own drafts; a new row starts from the mean of all. The source is worth its
time for the rows that together bring more, beyond what other sources promise there, than the time would have brought otherwise:

    net(k) = Σ over the k best rows (worth − promised) − goodput · seconds(k)          the k with the largest, if it is above nothing

What is not asked is not learned about, so a row that is left out is tried again after a pause that doubles each time in vain. Hence a
useless source costs a few tries a row and then one in `LONGEST_PAUSE`, and one that becomes useful is found within as many.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from forerun.engine.drafters.pace import Pace

FIRST_WORTH = 2.0
"""accepted guesses of a draft that a source is credited with before it has shown what it earns"""
LEAST_GAIN = 0.05
"""a row that brings less than this is not worth handling"""
FIRST_PAUSE, LONGEST_PAUSE = 4, 128
"""times that a row is left out before it is tried again"""
EXPLORE = 0.02
"""tokens a round that trying may cost a row"""
_STEP, _STEP_OF_ALL = 0.1, 0.01
"""shares of the newest draft in what a source has earned with a row, and with all rows, in the long run"""
_STEP_OF_TRY = 0.3
"""of a try: what was known before it is old"""
_PRIOR = 3
"""drafts of its own that the mean of all counts for in a new row"""


@dataclasses.dataclass(eq=False, slots=True)
class _Row:
    """`worth`: mean of `seen` drafts (and the prior); `left`: rounds until it is tried although it does not pay; `needed`: what it
    had to bring when it was tried, −1 = it was not."""

    worth: float
    seen: int = 0
    needed: float = -1.0
    pause: int = FIRST_PAUSE
    left: int = 0


class Earned:
    def __init__(self) -> None:
        self._all = FIRST_WORTH
        self._seen = 0
        self._pause = FIRST_PAUSE
        """where new rows start: as long as the last one that was in vain had come to"""
        self._rows: dict[int, _Row] = {}

    def worth(self, row: int) -> float:
        known = self._rows.get(row)
        return known.worth if known else self._all

    def offer(self, rows: Sequence[int], promised: Sequence[float], pace: Pace, goodput: float) -> tuple[float, list[int]]:
        """(net, places of the rows that the source is worth its time for). promised[i]: guesses that others are expected to bring for
        rows[i]; `goodput`: tokens that a second is worth. Changes nothing."""
        gains = sorted(((self.worth(row) - promise, i) for i, (row, promise) in enumerate(zip(rows, promised))), reverse=True)
        best = total = 0.0
        count = 0
        for k, (gain, _) in enumerate(gains, 1):
            if gain < LEAST_GAIN:
                break
            total += gain
            net = total - goodput * pace.seconds(k)
            if net > best:
                best, count = net, k
        return best, [i for _, i in gains[:count]]

    def round(self, rows: Sequence[int], promised: Sequence[float], worth: Sequence[int], pace: Pace, goodput: float) -> list[int]:
        """The places of the rows that the source is asked about in this round: those it is worth it for, and those whose pause is over."""
        asked = set(worth)
        more = goodput * (pace.seconds(len(worth) + 1) - (pace.seconds(len(worth)) if worth else 0.0))
        if worth:
            self._pause = FIRST_PAUSE
        for i, number in enumerate(rows):
            row = self._row(number)
            if i in asked:
                row.pause = row.left = FIRST_PAUSE
            elif row.left > 0:
                row.left -= 1
            else:
                asked.add(i)
                row.needed = promised[i] + more
                row.left = max(row.pause, math.ceil(more / EXPLORE))
                row.pause = self._pause = min(2 * row.pause, LONGEST_PAUSE)
        return sorted(asked)

    def saw(self, row: int, accepted: int) -> None:
        """What became of a draft for this row."""
        known = self._row(row)
        known.seen += 1
        needed, known.needed = known.needed, -1.0
        known.worth += max(_STEP_OF_TRY if needed >= 0.0 else _STEP, 1 / (known.seen + _PRIOR)) * (accepted - known.worth)
        if 0.0 <= needed < accepted:  # it would have paid: look again at once
            known.left, known.pause = 0, FIRST_PAUSE
        self._seen += 1
        self._all += max(_STEP_OF_ALL, 1 / (self._seen + _PRIOR)) * (accepted - self._all)

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def _row(self, row: int) -> _Row:
        known = self._rows.get(row)
        if known is None:
            known = self._rows[row] = _Row(self._all, pause=self._pause, left=self._pause)
        return known
