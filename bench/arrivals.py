"""When requests of an open-loop load are sent. Pure: a seed gives the same times on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator


def arrivals(rate: float, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """Endless ascending times in seconds from 0, `rate` a second on average.

    The gaps are Gamma distributed with shape `burstiness` and mean 1/rate: 1 is a Poisson process, below 1 comes in bursts (the
    coefficient of variation is 1/√shape), above 1 is more regular. Raises ValueError when either is not positive."""
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate and burstiness must be positive, not {rate} and {burstiness}")
    dice = random.Random(seed)
    scale = 1 / (rate * burstiness)
    now = 0.0
    while True:
        now += dice.gammavariate(burstiness, scale)
        yield now
