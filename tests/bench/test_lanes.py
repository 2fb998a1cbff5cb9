"""Lanes of a worker that computes nothing and takes what its rows say: what they make of it, and what they refuse."""

from __future__ import annotations

import itertools

import pytest

from forerun.bench.errors import BenchError
from forerun.bench.lanes import Lane, Verdict, Work, race
from forerun.messages import StepPlan, StepResult
from forerun.router.controller.simple import Fixed
from forerun.router.guesses import Controller, no_guesses
from forerun.router.policy import Policy
from tests.router.worker_model import WorkerModel, ready

BASE, ROW, FRONT = 0.010, 0.001, 0.0005
TEXTS = ["x" * 3] * 40
PROMPTS = [[1 + number % 4, 2, 3] for number in range(40)]


class Time:
    """A clock that goes only while a worker steps, and a little whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += FRONT / 2
        return self.now


class Timed(WorkerModel):
    """A step takes so long as its rows, `slow` times. `most`: guesses of a row that hold."""

    def __init__(self, time: Time, slow: float = 1.0, most: int = 4) -> None:
        super().__init__(ready(rows=8, pages=256, max_tokens=200), accept=lambda guess: min(guess, most))
        self._time, self._slow = time, slow

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        self._time.now += self._slow * (BASE + ROW * result.rows)
        return result


def raced(streams: int, controller: Controller, slow: float = 1.0, most: int = 4, rounds: int = 10**6) -> Verdict:
    time = Time()
    work = Work(PROMPTS, streams, tokens=20)
    policy = Policy(max_total_tokens=200)
    lanes = (
        Lane(Timed(time, slow, most), controller, policy, work, time),
        Lane(Timed(time), no_guesses, policy, work, time),
    )
    left = itertools.count(rounds, -1)
    return race("chat", lanes, TEXTS, streams, lambda: next(left) < 0)


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_two_lanes_that_do_the_same_are_equally_fast(streams: int) -> None:
    one = raced(streams, no_guesses)
    assert one.ratio == pytest.approx(1.0) and one.doubt == pytest.approx(0.0) and one.with_front == pytest.approx(1.0)
    assert one.front_ms[0] == pytest.approx(one.front_ms[1]) and one.guesses == 0.0 and not one.differing


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_guesses_that_hold_bring_what_steps_of_so_many_rows_leave_of_them(streams: int) -> None:
    """Five tokens a step of five rows each, beside one of one. Prompts and steps planned beyond the end of an answer take some of it."""
    one = raced(streams, Fixed(4))
    assert one.guesses > 3.0 and one.acceptance > 0.5 and not one.differing
    most = (BASE + streams * ROW) / (BASE + 5 * streams * ROW) * 5
    assert 0.5 * most < one.ratio < most


@pytest.mark.parametrize("slow", [0.8, 1.3])
def test_a_slower_worker_is_slower_by_that(slow: float) -> None:
    assert raced(4, no_guesses, slow).ratio == pytest.approx(1 / slow, rel=0.01)


def test_guesses_that_do_not_hold_are_a_loss() -> None:
    assert raced(4, Fixed(4), most=0).ratio < 0.6


def test_a_race_that_was_over_before_it_began_is_an_error() -> None:
    with pytest.raises(BenchError, match="more"):
        raced(4, no_guesses, rounds=0)
