"""Which controller a replica gets: what `--speculation-controller` means."""

from __future__ import annotations

from collections.abc import Callable

from forerun.config import Speculation
from forerun.messages import Profile, Ready
from forerun.router.controller.cost import Costs
from forerun.router.controller.price import Price
from forerun.router.controller.simple import Aimd, Fixed
from forerun.router.controller.toll import MOST
from forerun.router.guesses import Controller, no_guesses

FIXED_GUESSES = 4
"""guesses of a sequence under `fixed` when --speculate does not say"""


def make(asked: Speculation, ready: Ready, changed: Callable[[int, str], None]) -> Controller:
    """`changed`: told of the guard's doings, see `Price`. ValueError for a worker that does not say what a step takes."""
    cutoff = asked.speculation_max_batch_size
    most = ready.max_nodes if asked.speculate is None else min(asked.speculate, ready.max_nodes)
    if most <= 0:
        return no_guesses
    if asked.speculation_controller == "fixed":
        return Fixed(most if asked.speculate is not None else min(FIXED_GUESSES, most), cutoff)
    if asked.speculation_controller == "aimd":
        return Aimd(most, cutoff)
    return Price(costs_of(ready), most, cutoff, changed, ready.max_step_nodes or MOST, ready.rough)


def costs_of(ready: Ready) -> Costs:
    """A worker that did not profile its steps is described by the two that every worker measures: one row, and the largest."""
    one, largest = ready.step_seconds
    steps = ready.costs or ([(1, one), (ready.max_step_tokens, largest)] if 0 < one < largest and ready.max_step_tokens > 1 else [])
    return Costs(steps, ready.segment_seconds, ready.contexts)


def profile_of(ready: Ready) -> Profile:
    """What a worker says of its steps when it starts."""
    return Profile(ready.costs, ready.segment_seconds, ready.contexts, ready.rough)
