"""The one seam through which guesses enter a plan: who may have how many of them in the next step.

The scheduler asks once a step, for the rows that are about to decode, and lowers the answer where a rule says so (the request's own
limit, the end of the answer, pages). The controller of a later version is such a budget; without one nobody guesses.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from forerun.router.request import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Allowance:
    """`guess[i]`: most guessed nodes of sequence i. `total`: nodes of the step in all. `price`: survival below which a node is
    not worth its cost."""

    guess: list[int]
    total: int
    price: float = 0.0


class Budget(Protocol):
    def __call__(self, sequences: list[Sequence]) -> Allowance | None:
        """None: no guesses in this step, which then costs exactly a plain one."""
        ...


def no_guesses(sequences: list[Sequence]) -> Allowance | None:
    """`--speculator none`."""
    return None
