"""Slowly moving logarithms seen through noise: by how much steps of 1, 2, 4, 8, … rows are slower (> 0) or faster now than when profiled.

A Kalman filter. All knots drift together (the machine gets busy), and each a little on its own (it gets busy in a way that hurts large
steps more). So a step of sixteen rows says nearly everything about steps of eight and a good deal about steps of one; and a step of a
size that was not seen for long says more than the hundredth in a row that were all alike.

Step times have heavy tails, so what lies far off counts as if it lay nearer (Huber's clipping), and what the noise is comes from a
running median, which outliers cannot move. Several in a row that are far off on the same side are no outliers but a change: then
the filter lets go of what it knew.
"""

from __future__ import annotations

import math

KNOTS = 10
"""knot k stands at 2^k rows; beyond the last one everything is alike"""
_COMMON, _OWN = 0.2**2, 0.05**2
"""variance before anything was seen: of all knots together, and of each by itself"""
_COMMON_DRIFT, _OWN_DRIFT = 0.01**2, 0.003**2
"""what is added with every observation"""
_CLIP = 2.0
"""standard deviations that one observation may count for"""
_STREAK = 4
_USUAL = 0.03
_LEAST_USUAL, _MOST_USUAL = 0.004, 0.3
_MEDIAN_STEP = 0.03
_NOISE = 1.5
"""standard deviations in a median absolute one"""
_MOST = math.log(16.0)


class Filter:
    """Mutated by `observe` alone."""

    __slots__ = ("_covariance", "_streak", "usual", "value")

    def __init__(self) -> None:
        self.value = [0.0] * KNOTS
        self.usual = _USUAL
        """median size of a surprise"""
        self._covariance = [[_COMMON + (_OWN if a == b else 0.0) for b in range(KNOTS)] for a in range(KNOTS)]
        self._streak = 0
        """observations in a row that were far off, by their sign"""

    @property
    def noise(self) -> float:
        """Standard deviation of a step as steps are now."""
        return _NOISE * self.usual

    def at(self, knot: int, share: float) -> float:
        """The value a `share` of the way from `knot` to the next."""
        value = self.value
        return value[knot] + share * (value[knot + 1] - value[knot]) if share else value[knot]

    def doubt(self, knot: int, other: int) -> float:
        """Variance of the difference of two knots."""
        p = self._covariance
        return max(0.0, p[knot][knot] + p[other][other] - 2 * p[knot][other])

    def shift(self, by: float) -> None:
        """All of it was seen with an error that is known now."""
        self.value = [value + by for value in self.value]

    def observe(self, knot: int, share: float, measured: float) -> float:
        """A noisy measurement of `at(knot, share)`. Returns the surprise."""
        surprise = max(-_MOST, min(_MOST, measured)) - self.at(knot, share)
        self._drift(_COMMON_DRIFT)
        seen, variance = self._seen(knot, share)
        bound = _CLIP * math.sqrt(variance)
        sign = (surprise > bound) - (surprise < -bound)
        self._streak = self._streak + sign if sign * self._streak > 0 else sign
        if abs(self._streak) == _STREAK:
            self._drift(surprise**2)
            seen, variance = self._seen(knot, share)
            bound = abs(surprise)
        self._update(seen, variance, max(-bound, min(bound, surprise)))
        step = math.exp(_MEDIAN_STEP if abs(surprise) > self.usual else -_MEDIAN_STEP)
        self.usual = max(_LEAST_USUAL, min(_MOST_USUAL, self.usual * step))
        return surprise

    def _drift(self, common: float) -> None:
        for a, row in enumerate(self._covariance):
            for b in range(KNOTS):
                row[b] += common
            row[a] += _OWN_DRIFT

    def _seen(self, knot: int, share: float) -> tuple[list[float], float]:
        """Covariance of what is measured with every knot, and its own variance, noise included."""
        covariance = self._covariance
        seen = list(covariance[knot])
        if share:
            seen = [low + share * (high - low) for low, high in zip(seen, covariance[knot + 1])]
        variance = seen[knot] + (share * (seen[knot + 1] - seen[knot]) if share else 0.0)
        return seen, variance + self.noise**2

    def _update(self, seen: list[float], variance: float, surprise: float) -> None:
        for a, row in enumerate(self._covariance):
            gain = seen[a] / variance
            self.value[a] += gain * surprise
            for b in range(KNOTS):
                row[b] -= gain * seen[b]
