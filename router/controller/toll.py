"""What guesses have to bring: the tolls of a step.

A step is worth its guesses when their survival, together, exceeds the tokens that could have been had elsewhere in the time they add:

    toll[n] = G · (T(rows + n + 1) − T(rows))          G: tokens a second that this replica makes

The worker, which has the drafts, keeps the n that maximize Σ survival − toll (`engine/drafters/choose.py`). On a long run no rule earns
more tokens a second than this one at the G it leads to (renewal theory; G follows by itself, since it is measured). The slope of the toll
is the price λ of a node: nothing where rows are free, one when roots alone fill the machine, and then nobody guesses."""

from __future__ import annotations

import dataclasses
from operator import sub

FLOOR = 0.008
"""Tokens that every node costs at least: handling it is never quite free, and a guess this unlikely helps nobody."""
MOST = 256
"""nodes of a step"""
_FLOORS = [FLOOR * (n + 1) for n in range(MOST)]


@dataclasses.dataclass(frozen=True, slots=True)
class Tolls:
    """`toll[n]`: tokens that n + 1 guesses must bring; no step carries more guesses than it has entries. `entry`: what a node costs on top
    for each position that it attends to."""

    toll: list[float]
    entry: float

    @property
    def least(self) -> float:
        """The least that any node costs, whichever it is of the step's: survival below which none is kept."""
        toll = self.toll
        return min(toll[0], min(map(sub, toll[1:], toll), default=1.0)) if toll else 1.0

    def pays(self, survival: float) -> bool:
        """Whether there is a number of guesses that would be worth their toll if each survived so often."""
        return any(survival * count > toll for count, toll in enumerate(self.toll, 1))

    def price(self, nodes: float) -> float:
        """Tokens a node costs when a step has about so many, context left aside."""
        if not self.toll:
            return 1.0
        n = max(1, min(len(self.toll), round(nodes)))
        return self.toll[n - 1] / n


def tolls(climb: list[float], goodput: float, entry_seconds: float, worth: float = 1.0) -> Tolls:
    """`climb[n]`: seconds that n + 1 guesses add to the step. `goodput`: tokens a second. `entry_seconds`: a position scored by one row.
    `worth`: of a guess that holds, at the most."""
    toll = [max(seconds * goodput, least) for seconds, least in zip(climb, _FLOORS)]
    # A guess brings one token: where the last ones cost more than that is worth, they are never kept.
    while toll and toll[-1] - (toll[-2] if len(toll) > 1 else 0.0) >= worth:
        toll.pop()
    return Tolls(toll, entry_seconds * goodput)
