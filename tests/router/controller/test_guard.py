from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.router.controller.guard import Breaker


def run(breaker: Breaker, rounds: int, gain: float, dear: float = 1.3) -> tuple[float, float]:
    """(tokens, seconds) of rounds in which guesses make a step `dear` times as long and bring `gain` times the goodput."""
    tokens = seconds = 0.0
    for _ in range(rounds):
        if breaker.allows():
            breaker.observe(1000 * gain * dear, dear, 1000, 1.0)
            tokens, seconds = tokens + gain * dear, seconds + dear
        else:
            tokens, seconds = tokens + 1.0, seconds + 1.0
    return tokens, seconds


def test_it_stays_closed_while_guesses_pay() -> None:
    breaker = Breaker()
    run(breaker, 1000, gain=1.2)
    assert breaker.state == "closed" and breaker.openings == 0


@given(gain=st.floats(0.5, 0.97), dear=st.floats(1.0, 1.6))
def test_a_drafter_that_always_loses_costs_almost_nothing_in_the_long_run(gain: float, dear: float) -> None:
    tokens, seconds = run(Breaker(), 30_000, gain, dear)
    assert tokens / seconds >= 0.99


def test_it_comes_back_when_guesses_pay_again() -> None:
    breaker = Breaker()
    run(breaker, 64, gain=0.7)
    assert breaker.state == "open"
    run(breaker, 80, gain=1.5)
    assert breaker.state == "closed"


def test_waiting_doubles_and_is_bounded() -> None:
    breaker = Breaker()
    run(breaker, 200_000, gain=0.5)
    assert 20 <= breaker.openings <= 60
