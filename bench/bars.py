"""A measured figure beside the bar it has to meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """`sense`: the measured value must be at least, or at most, `limit`. `note`: the figures behind it, for the reader."""

    name: str
    measured: float
    sense: Literal["≥", "≤"]
    limit: float
    unit: str = ""
    note: str = ""

    @property
    def cost(self) -> float:
        """How far from the bar: 1 is exactly the bar, less is better, whatever the sense."""
        if self.sense == "≤":
            return self.measured / self.limit
        return self.limit / self.measured if self.measured > 0 else float("inf")

    @property
    def passed(self) -> bool:
        return self.measured >= self.limit if self.sense == "≥" else self.measured <= self.limit


def present(bars: Sequence[Bar], remarks: Sequence[str]) -> str:
    """A table for people."""
    width = max((len(bar.name) for bar in bars), default=0)
    lines = [f"{'':<6}{'bar':<{width}}  {'measured':>11}  {'limit':>11}"]
    for bar in bars:
        verdict = "pass" if bar.passed else "MISS"
        limit = f"{bar.sense} {bar.limit:,g}"
        lines.append(f"{verdict:<6}{bar.name:<{width}}  {bar.measured:>11,.4g}  {limit:>11} {bar.unit:<10} {bar.note}".rstrip())
    return "\n".join([*lines, *(f"      {remark}" for remark in remarks)])
