"""How long a draft model's forwards take, by their rows: learned while they run.

Means of logarithms, for 1, 2, 3–4, 5–8, … rows; a size that was not seen takes as long as the nearest one that was. What disturbs a forward
makes it longer, by seconds where the process is stopped: of the first few, the shortest counts.
"""

from __future__ import annotations

import math

_BUCKETS = 12
_FIRST = 3
"""forwards of which the shortest counts"""
_STEP = 0.1
_CLIP = 1.0
"""a surprise counts for no more than a factor of e"""


class Pace:
    def __init__(self) -> None:
        self._log = [0.0] * _BUCKETS
        self._seen = [0] * _BUCKETS

    def observe(self, rows: int, seconds: float) -> None:
        if rows < 1 or seconds <= 0.0:
            return
        at = _bucket(rows)
        self._seen[at] += 1
        off = math.log(seconds) - self._log[at]
        if self._seen[at] <= _FIRST:
            self._log[at] += off if self._seen[at] == 1 else min(0.0, off)
        else:
            self._log[at] += max(-_CLIP, min(_CLIP, off)) * max(_STEP, 1 / self._seen[at])

    def seconds(self, rows: int) -> float:
        """Expected; 0 as long as nothing is known."""
        wanted = _bucket(max(rows, 1))
        known = [at for at in range(_BUCKETS) if self._seen[at]]
        return math.exp(self._log[min(known, key=lambda at: abs(at - wanted))]) if known else 0.0


def _bucket(rows: int) -> int:
    return min((rows - 1).bit_length(), _BUCKETS - 1)
