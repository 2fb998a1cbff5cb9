"""What a source may cost that earns nothing, and when it is asked although nobody knows yet what it does."""

from __future__ import annotations

from forerun.engine.drafters.asking import Asking
from forerun.engine.drafters.earned import EXPLORE, SAVED, Earned, Load

GOODPUT = 500.0


def useless(asking: Asking) -> Earned:
    """A source none of whose guesses held."""
    earned = Earned(asking)
    for _ in range(100):
        earned.saw(99, 0)
    return earned


def load(rows: int = 1, unread: int = 0) -> Load:
    """Of rows for which nobody else has guesses."""
    return Load(range(rows), [[]] * rows, [unread] * rows, GOODPUT, ())


def tried(earned: Earned, asking: Asking, rounds: int, seconds: float) -> int:
    """How often it is tried in so many rounds, each try taking so long."""
    tries = 0
    for _ in range(rounds):
        if earned.round(load(), earned.offer(load())[1]):
            tries += 1
            earned.took(GOODPUT, min(seconds, asking.seconds(1)))
            asking.observe(1, 0, seconds)
            earned.saw(0, 0)
    return tries


def test_one_absurd_measurement_does_not_close_a_source() -> None:
    """The process was stopped for a second in the first ask. The others take three milliseconds."""
    asking = Asking()
    earned = useless(asking)
    asking.observe(1, 0, 1.0)
    assert tried(earned, asking, 3000, 0.003) > 5


def test_tries_cost_no_more_than_they_may() -> None:
    """A source that takes a hundred milliseconds, fifty tokens, each time."""
    asking = Asking()
    earned = useless(asking)
    asking.observe(1, 0, 0.1)
    rounds = 20_000
    assert 0 < tried(earned, asking, rounds, 0.1) * 0.1 * GOODPUT <= EXPLORE * rounds + SAVED + 50


def test_a_try_lasts_until_there_is_a_draft() -> None:
    """The source reads a long prompt for it, in parts: one that is left in the middle was in vain."""
    asking = Asking()
    asking.observe(1, 0, 1e-4)
    earned = useless(asking)
    rounds = [earned.round(load(unread=2000), []) for _ in range(12)]
    begun = rounds.index([0])
    assert rounds == [[]] * begun + [[0]] * (12 - begun) and begun > 0
    earned.saw(0, 0)
    assert earned.round(load(), []) == []


def test_one_row_is_tried_at_a_time_until_it_is_known_what_asking_takes() -> None:
    asking = Asking()
    earned = useless(asking)
    rounds = [earned.round(load(8), []) for _ in range(12)]
    assert {len(places) for places in rounds} == {0, 1}
    asking.observe(1, 0, 1e-6)
    earned.saw(0, 0)
    assert len(earned.round(load(8), [])) == 7


def test_what_verifying_takes_is_not_made_up() -> None:
    """Before its first draft nobody knows how a source spreads what it brings over its guesses."""
    toll = [0.1 * n for n in range(1, 9)]
    assert Earned(Asking()).offer(Load([0], [[0.5]], [0], GOODPUT, toll)) == (0.5, [0])
