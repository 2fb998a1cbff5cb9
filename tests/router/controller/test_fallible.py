"""Whatever a controller raises, wherever: plans are made, streams hear their tokens, and guesses go on with another one, for a while."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import pytest

from forerun.messages import Profile, Ready, SamplingParams, Start
from forerun.router.controller.fallible import FORGOTTEN, MOST_FAILURES, Fallible
from forerun.router.guesses import Allowance, Controller, Round, Snapshot, no_guesses
from forerun.router.link import Link
from forerun.router.policy import Policy
from forerun.router.replica import Replica
from forerun.router.request import Request, Run, Sequence
from tests.router.fakes import Collector, Counting
from tests.router.test_replica import Silent
from tests.router.worker_model import ready

ROUND = Round(1, 1, 0, 0, 5, 1, 0.01, 0.0)
PROFILE = Profile([(1, 0.01)])


class Broken:
    """A controller that raises when this verb is called; otherwise it grants a guess to everybody."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.profiles: list[Profile] = []

    def _go(self, verb: str) -> None:
        if verb == self.verb:
            raise ZeroDivisionError("a step of no seconds")

    def __call__(self, sequences: list[Sequence], prompts: int = 0) -> Allowance | None:
        self._go("call")
        return Allowance([1] * len(sequences), len(sequences))

    def landed(self, sequence: Sequence, nodes: int, accepted: int, expected: float) -> None:
        self._go("landed")

    def stepped(self, round: Round) -> None:
        self._go("stepped")

    def forget(self, sequence: Sequence) -> None:
        self._go("forget")

    def profiled(self, profile: Profile) -> None:
        self._go("profiled")
        self.profiles.append(profile)

    def snapshot(self) -> Snapshot:
        self._go("snapshot")
        return Snapshot("broken")


def sequence() -> tuple[Sequence, Collector]:
    stream, params = Collector(), SamplingParams(seed=0, prompt_tokens=3, max_new_tokens=5)
    return Sequence(Request("one", [1, 2, 3], params, 0.0), params, stream, [1, 2, 3]), stream


VERBS: dict[str, Callable[[Controller], object]] = {
    "call": lambda controller: controller([sequence()[0]]),
    "landed": lambda controller: controller.landed(sequence()[0], 2, 1, math.nan),
    "stepped": lambda controller: controller.stepped(ROUND),
    "forget": lambda controller: controller.forget(sequence()[0]),
    "profiled": lambda controller: controller.profiled(PROFILE),
    "snapshot": lambda controller: controller.snapshot(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_another_one_takes_over_and_after_enough_faults_none(verb: str) -> None:
    made: list[Broken] = []

    def make() -> Controller:
        made.append(Broken(verb))
        return made[-1]

    controller = Fallible(make)
    for other, do in VERBS.items():
        if other != verb:
            do(controller)
    assert len(made) == 1
    for faults in range(1, MOST_FAILURES + 2):
        do = VERBS[verb]
        assert do(controller) in (None, no_guesses.snapshot())
        assert len(made) == min(faults + 1, MOST_FAILURES)
    assert controller([sequence()[0]]) is None
    if verb != "profiled":
        assert all(one.profiles == [PROFILE] for one in made), "what the worker measured is known to each of them"


def test_faults_of_long_ago_do_not_count() -> None:
    controller = Fallible(lambda: Broken("forget"))
    for _ in range(MOST_FAILURES):
        VERBS["forget"](controller)
        for _ in range(FORGOTTEN + 1):
            controller.stepped(ROUND)
    assert controller([sequence()[0]]) is not None


def test_one_that_cannot_be_made_at_first_is_said_and_later_is_done_without() -> None:
    def never() -> Controller:
        raise ValueError("no costs")

    with pytest.raises(ValueError, match="no costs"):
        Fallible(never)
    made = [Broken("call")]
    controller = Fallible(made.pop)
    assert controller([]) is None and controller.snapshot() == no_guesses.snapshot()


class Sole:
    def terms(self, ready: Ready) -> Policy:
        return Policy()

    def controller(self, ready: Ready) -> Controller:
        return Broken("landed")

    def changed(self) -> None:
        return None


async def test_a_stream_hears_what_came_of_a_step_that_the_controller_failed_at() -> None:
    replica = Replica(Start("model"), lambda start, listener: cast("Link", Silent()), Sole(), Counting())
    replica.ready(ready())
    one, stream = sequence()
    for token in range(2 * MOST_FAILURES):
        replica.tokens(one, Run([token], [], [], [], asked=1))
    assert stream.got == list(range(2 * MOST_FAILURES)) and replica.look().controller == no_guesses.snapshot()
    await replica.close()
