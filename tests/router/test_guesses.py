"""Guesses in a plan: any budget is safe."""

from __future__ import annotations

import pytest

from forerun.router.guesses import Allowance, Budget, no_guesses
from forerun.router.policy import Policy
from forerun.router.request import Sequence
from tests.router.driver import Driver, prompt
from tests.router.worker_model import ready


class Generous:
    def __init__(self, guess: int) -> None:
        self.guess = guess
        self.asked: list[int] = []

    def __call__(self, sequences: list[Sequence], prompts: int = 0) -> Allowance:
        self.asked.append(len(sequences))
        return Allowance([self.guess] * len(sequences), self.guess * len(sequences), 0.25)


def guessing(guess: int, pages: int = 64, **more: object) -> Driver:
    return Driver(ready(rows=4, pages=pages, vocab=97, **more), budget=Generous(guess), accept=lambda most: most)


def test_guesses_bring_several_tokens_a_step_and_change_none() -> None:
    driver = guessing(3)
    case = driver.steady(prompt(6), 17)
    driver.plan()
    plan = driver.plan()
    assert plan is not None
    assert (plan.feed[0].known, plan.feed[0].guess, plan.budget, plan.price) == (1, 3, 3, 0.25)
    driver.drain()
    driver.check()
    assert len(case.stream.got) == 17
    assert len(driver.tallies) < 9
    assert sum(tally.accepted for tally in driver.tallies) > 8


def test_guesses_stop_short_of_the_last_token_and_at_the_request_s_limit() -> None:
    driver = guessing(5)
    driver.steady(prompt(6), 3)
    driver.plan()
    plan = driver.plan()
    assert plan is not None
    assert plan.feed[0].guess == 1
    driver.drain()
    for limit, expected in ((0, 0), (2, 2), (9, 5)):
        case = driver.steady(prompt(6, 7), 30, speculate=limit)
        driver.plan()
        plan = driver.plan()
        assert plan is not None
        assert plan.feed[0].guess == expected
        driver.scheduler.cancel(case.sequence)
        driver.drain()


def test_guesses_drive_nobody_out() -> None:
    driver = guessing(8, pages=8)
    cases = [driver.steady(prompt(8, 50 * i), 8) for i in range(2)]
    driver.drain()
    driver.check()
    assert driver.preemptions == 0
    assert all(len(case.stream.got) == 8 for case in cases)


def chunks_beside_guesses(budget: Budget) -> tuple[list[int], list[int]]:
    """Prompt tokens and guesses of each step in which a queue of prompts is read beside eight streams. A row takes a millisecond."""
    offer = ready(rows=16, pages=400, page_tokens=16, vocab=97, max_step_tokens=1024, step_seconds=(0.002, 1.025))
    driver = Driver(offer, Policy(waiting_served_ratio=0.0), budget)
    driver.worker.row_us = 1000
    for i in range(8):
        driver.steady(prompt(4, i), 200)
    for _ in range(40):
        driver.turn()
    before = len(driver.tallies)
    for i in range(6):
        driver.steady(prompt(160, 20 + i), 2)
    guesses: list[int] = []
    while sum(tally.prefill_tokens for tally in driver.tallies[before:]) < 6 * 160:
        while (plan := driver.plan()) is not None:
            guesses.append(plan.budget)
        driver.land()
    return [tally.prefill_tokens for tally in driver.tallies[before:] if tally.prefill_tokens], guesses


@pytest.mark.parametrize("guess", [1, 4, 8])
def test_prompts_are_read_as_fast_as_without_guesses(guess: int) -> None:
    """The pause that prompts may cause is theirs first. A step that they do not fill has room for guesses; to the others they add an
    eighth."""
    without, _ = chunks_beside_guesses(no_guesses)
    beside, guesses = chunks_beside_guesses(Generous(guess))
    assert beside == pytest.approx(without, abs=1)
    full = [budget for budget, tokens in zip(guesses, beside) if tokens > 80]
    assert len(full) > 8
    assert all(0 < budget <= 100 // 8 for budget in full)
    assert guesses[-1] >= 8 * guess


def test_whoever_grants_guesses_hears_how_many_prompt_tokens_are_in_the_step() -> None:
    heard: list[int] = []

    class Curious(Generous):
        def __call__(self, sequences: list[Sequence], prompts: int = 0) -> Allowance:
            heard.append(prompts)
            return super().__call__(sequences, prompts)

    read, _ = chunks_beside_guesses(Curious(1))
    assert len(read) > 8 and [prompts for prompts in heard if prompts] == read
