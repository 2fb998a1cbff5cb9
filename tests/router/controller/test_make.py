from __future__ import annotations

import msgspec
import pytest

from forerun.config import Speculation
from forerun.router.controller.make import costs_of, make
from forerun.router.guesses import no_guesses
from tests.router.controller.streams import COSTS, sequence
from tests.router.worker_model import ready

READY = msgspec.structs.replace(ready(max_nodes=8), costs=COSTS.steps, contexts=[(256, 1e-6, 2e-6)], segment_seconds=3e-6)


def ignore(least: int, state: str) -> None:
    return None


@pytest.mark.parametrize(
    ("asked", "kind", "first"),
    [
        (Speculation(), "price", None),
        (Speculation(speculation_controller="aimd"), "aimd", 2),
        (Speculation(speculation_controller="fixed"), "fixed", 4),
        (Speculation(speculation_controller="fixed", speculate=2), "fixed", 2),
        (Speculation(speculation_controller="fixed", speculate=99), "fixed", 8),
        (Speculation(speculate=0), "none", None),
    ],
)
def test_the_option_names_the_controller(asked: Speculation, kind: str, first: int | None) -> None:
    controller = make(asked, READY, ignore)
    assert controller.snapshot().controller == kind
    if first is not None:
        allowance = controller([sequence()])
        assert allowance is not None and allowance.guess == [first]


def test_a_worker_that_cannot_guess_gets_no_controller() -> None:
    assert make(Speculation(), msgspec.structs.replace(READY, max_nodes=0), ignore) is no_guesses


def test_costs_come_from_the_profile_or_from_the_two_steps_that_every_worker_measures() -> None:
    costs = costs_of(READY)
    assert (costs.steps, costs.contexts, costs.segment_seconds) == (COSTS.steps, [(256, 1e-6, 2e-6)], 3e-6)
    bare = msgspec.structs.replace(ready(max_nodes=8), step_seconds=(0.01, 0.2))
    assert costs_of(bare).steps == [(1, 0.01), (64, 0.2)]


def test_no_step_may_have_more_guesses_than_the_worker_has_room_for() -> None:
    controller = make(Speculation(), msgspec.structs.replace(READY, max_step_nodes=5), ignore)
    for _ in range(5):
        allowance = controller([sequence() for _ in range(4)])
        assert allowance is not None and allowance.total == len(allowance.toll) <= 5


def test_a_worker_that_says_nothing_of_its_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="profile the worker"):
        make(Speculation(), ready(max_nodes=8), ignore)
