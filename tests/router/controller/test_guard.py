from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.router.controller.guard import Breaker


def run(breaker: Breaker, rounds: int, gain: float, dear: float = 1.3, chance: random.Random | None = None) -> tuple[float, float]:
    """(tokens, seconds) of rounds in which guesses make a step `dear` times as long and bring `gain` times the goodput; with dice, all of
    what they bring comes in every other round."""
    tokens = seconds = 0.0
    for _ in range(rounds):
        if breaker.allows():
            extra = gain * dear - 1.0
            brought = 1.0 + (extra if chance is None else 2 * extra * (chance.random() < 0.5))
            breaker.observe(round(1000 * brought), dear, 1000, 1.0)
            tokens, seconds = tokens + brought, seconds + dear
        else:
            tokens, seconds = tokens + 1.0, seconds + 1.0
    return tokens, seconds


@given(st.floats(1.15, 3.0), st.floats(1.0, 2.0), st.integers(0, 99))
def test_it_stays_closed_while_guesses_pay_also_when_they_pay_in_bursts(gain: float, dear: float, seed: int) -> None:
    breaker = Breaker()
    run(breaker, 1000, gain, dear, random.Random(seed))
    assert breaker.openings <= 2


@given(st.floats(0.5, 0.98), st.floats(1.1, 1.6))
def test_a_drafter_that_always_loses_costs_almost_nothing_in_the_long_run(gain: float, dear: float) -> None:
    tokens, seconds = run(Breaker(), 30_000, gain, max(dear, 1 / gain))
    assert tokens / seconds >= 0.988


def test_it_comes_back_when_guesses_pay_again() -> None:
    breaker = Breaker()
    run(breaker, 64, gain=0.7)
    assert breaker.state == "open"
    run(breaker, 90, gain=1.5)
    assert breaker.state == "closed"


def test_waiting_doubles_and_is_bounded() -> None:
    breaker = Breaker()
    run(breaker, 200_000, gain=0.5)
    assert 20 <= breaker.openings <= 60


def test_it_says_when_it_opens_and_closes() -> None:
    breaker = Breaker()
    told = [breaker.observe(1, 1.5, 1, 1.0) for _ in range(40)]
    assert told.count(True) == 1 and breaker.state == "open"
    while not breaker.allows():
        assert not breaker.observe(1, 9.0, 1, 1.0), "rounds of before it opened come back later"
    assert [breaker.observe(2, 1.0, 1, 1.0) for _ in range(16)] == [False] * 15 + [True]
    assert breaker.state == "closed"


@pytest.mark.parametrize(("seconds", "plain_tokens", "plain_seconds"), [(0.0, 1, 1.0), (1.0, 0, 1.0), (1.0, 1, 0.0)])
def test_what_took_no_time_says_nothing(seconds: float, plain_tokens: int, plain_seconds: float) -> None:
    breaker = Breaker()
    assert not any(breaker.observe(0, seconds, plain_tokens, plain_seconds) for _ in range(100))
