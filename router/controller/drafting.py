"""What drafting adds to a step, by the number of sequences that the drafter is asked about.

A drafter that looks things up takes its time for each sequence, one that computes takes it for all of them at once: so the time is learned
for 1, 2, 3–4, 5–8, … sequences, and where nothing was seen yet it is in proportion to the nearest that was.
"""

from __future__ import annotations

import math

_BUCKETS = 12
_FIRST = 4
_STEP = 0.05
_CLIP = 1.0


class Drafting:
    def __init__(self) -> None:
        self._log = [0.0] * _BUCKETS
        """logarithm of the seconds for each sequence"""
        self._seen = [0] * _BUCKETS

    def observe(self, asked: int, seconds: float) -> None:
        """A step's drafting. Means of logarithms with bounded steps: outliers count for little."""
        if asked < 1 or seconds <= 0.0:
            return
        at = _bucket(asked)
        each = math.log(seconds / asked)
        self._seen[at] += 1
        surprise = max(-_CLIP, min(_CLIP, each - self._log[at])) if self._seen[at] > 1 else each
        self._log[at] += surprise * max(_STEP, 1 / min(self._seen[at], _FIRST))

    def seconds(self, most: int) -> list[float]:
        """Of steps in which 0, 1, … `most` sequences are asked about; nothing as long as nothing is known."""
        known = [at for at in range(_BUCKETS) if self._seen[at]]
        if not known:
            return [0.0] * (most + 1)
        each = [math.exp(self._log[min(known, key=lambda at: abs(at - wanted))]) for wanted in range(_bucket(max(most, 1)) + 1)]
        return [asked * each[_bucket(asked)] for asked in range(most + 1)]


def _bucket(asked: int) -> int:
    return min(max(asked - 1, 0).bit_length(), _BUCKETS - 1)
