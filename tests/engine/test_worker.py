"""The loop of a worker around a stepper that only remembers what it was told."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from forerun.engine.worker import Worker
from forerun.messages import Down, Inject, Profile, Ready, Start, StepPlan, StepResult, Stop, Up
from forerun.ring import Reader, Ring, Writer

PROFILE = Profile([(1, 0.5)])


class Resting:
    """Has something to do in three idle moments. In the last it goes on until somebody wants a step."""

    ready = Ready(1, 1, 16, 1, 8, "cpu", "f32", "none", 16, 16)

    def __init__(self) -> None:
        self.resting = True
        self.did: list[str] = []
        self.last = threading.Event()

    def step(self, plan: StepPlan) -> StepResult:
        self.did.append(f"step {plan.step}")
        return StepResult(plan.step)

    def inject(self, message: Inject) -> None:
        return None

    def rest(self, wanted: Callable[[], bool]) -> Profile | None:
        self.did.append("rest")
        if len(self.did) < 3:
            return None
        self.resting = False
        self.last.set()
        for _ in range(10000):
            if wanted():
                return PROFILE
            threading.Event().wait(0.001)
        raise AssertionError("nobody wanted anything")


class Other:
    """The front's end of the rings."""

    def __init__(self, stepper: Resting) -> None:
        self.rings = Ring.create(), Ring.create()
        self.writer, self.reader = Writer(self.rings[0]), Reader(self.rings[1])
        self.heard: list[Up] = []
        worker = Worker(Reader(self.rings[0]), Writer(self.rings[1]), lambda start, progress: stepper)
        self.thread = threading.Thread(target=worker.run)
        self.thread.start()

    def say(self, message: Down) -> None:
        assert self.writer.push(msgspec.msgpack.encode(message))

    def hear(self) -> Up:
        for _ in range(1000):
            self.heard += [msgspec.msgpack.decode(frame, type=Up) for frame in self.reader.drain()]
            if self.heard:
                return self.heard.pop(0)
            self.reader.wait(0.1)
        raise AssertionError("it said nothing")


@pytest.fixture
def stepper() -> Resting:
    return Resting()


@pytest.fixture
def front(stepper: Resting) -> Iterator[Other]:
    other = Other(stepper)
    other.say(Start("model"))
    yield other
    other.say(Stop())
    other.thread.join(20)
    assert not other.thread.is_alive()
    gc.unfreeze()  # what a worker freezes is the whole process
    for ring in other.rings:
        ring.close()


def test_idle_moments_are_used_and_given_up_when_a_plan_comes(front: Other, stepper: Resting) -> None:
    assert isinstance(front.hear(), Ready)
    assert stepper.last.wait(20)
    front.say(StepPlan(7))
    assert front.hear() == PROFILE, "what it found is said before the plan is answered"
    assert front.hear() == StepResult(7)
    assert stepper.did == ["rest", "rest", "rest", "step 7"]
