"""Order statistics of measured values. Knows nothing of where they come from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """Percentiles in the unit of the values. All zero when there were no values (`count` says so)."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile (0 … 100) of ascending values, linear between the two nearest ranks.

    Raises ValueError for no values or q outside 0 … 100."""
    if not ordered:
        raise ValueError("a percentile needs at least one value")
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile lies in 0 … 100, not at {q}")
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = math.ceil(rank)
    if ordered[low] == ordered[high]:
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median(values: Iterable[float]) -> float:
    return percentile(sorted(values), 50)


def summarize(values: Iterable[float], scale: float = 1.0) -> Summary:
    """Percentiles of values · scale (a scale of 1000 turns seconds into milliseconds)."""
    ordered = sorted(value * scale for value in values)
    if not ordered:
        return Summary()
    mean = math.fsum(ordered) / len(ordered)
    p50, p90, p99 = (percentile(ordered, q) for q in (50, 90, 99))
    return Summary(len(ordered), mean, p50, p90, p99, ordered[-1])
