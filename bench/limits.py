"""What a machine can do at the most, and how much of it a bar asks for.

Bars that are ratios or milliseconds were set on one machine; how near to its limits they are depends on how fast it reads beside how fast
it multiplies. So a figure is also given as a multiple of the limit of the machine that it was measured on, beside what the bar comes to on
the machine that it was set on. Counted alike on both sides: weights are read once, products (the output head's with them) are multiplied,
in bf16 or what is as fast; attention and everything else is left out.
"""

from __future__ import annotations

import dataclasses

ONE_ROW = 1.15
"""A step of one row is allowed so many times its memory floor: what ratios to one row stand on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Of a step: bytes of weights, multiplications of all its products."""

    bytes: int
    multiplications: int


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """`bandwidth`: bytes a second, far more than caches hold; `rate`: multiplications a second."""

    bandwidth: float
    rate: float

    def seconds(self, load: Load) -> float:
        """What it takes at the least: the longer one of reading and multiplying."""
        return max(load.bytes / self.bandwidth, load.multiplications / self.rate)


SET_ON = Limits(44e9, 889e9 / 2)
"""Two cores of AMD Zen 5, as measured when the bars were set: 270 MiB read, and products of 2048³ in bf16 by torch, on two threads."""


def multiples(load: Load, seconds: float, here: Limits, allowed: float) -> str:
    """For the note of a bar. `seconds`: measured here; `allowed`: what the bar allows on the machine that it was set on."""
    return f"{seconds / here.seconds(load):.2f} × the machine's limit, where the bar is {allowed / SET_ON.seconds(load):.2f} ×"


def allowed_rows(load: Load, ratio: float) -> float:
    """Seconds that a bar of `ratio` to one row allowed there."""
    return ratio * ONE_ROW * load.bytes / SET_ON.bandwidth
