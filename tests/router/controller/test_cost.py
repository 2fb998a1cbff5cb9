from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.router.controller.cost import Costs, CostTable

STEPS = [(1, 0.006), (2, 0.0061), (4, 0.0065), (8, 0.0075), (16, 0.011), (32, 0.018)]


def table(most: int = 256) -> CostTable:
    return CostTable(Costs(STEPS, segment_seconds=1e-4, contexts=[(256, 1e-6, 5e-7)]), most)


def test_measured_counts_are_looked_up_exactly_and_others_lie_between() -> None:
    costs = table()
    for rows, seconds in STEPS:
        assert costs.seconds(rows) == pytest.approx(seconds)
    assert 0.0065 < costs.seconds(6) < 0.0075
    assert costs.seconds(64) == pytest.approx(0.036)
    assert costs.seconds(1000) == pytest.approx(0.018 * 1000 / 32)
    assert costs.seconds(4, segments=3, read=1000, scored=2000) == pytest.approx(0.0065 + 2e-4 + 1e-3 + 1e-3)


def test_what_a_position_adds_lies_between_the_contexts_that_were_measured() -> None:
    costs = Costs(STEPS, contexts=[(256, 4e-6, 2e-6), (1024, 1e-6, 1e-6)])
    assert costs.at(10) == (4e-6, 2e-6) and costs.at(9999) == (1e-6, 1e-6)
    assert costs.at(640) == pytest.approx((2.5e-6, 1.5e-6))
    assert Costs(STEPS).at(100) == (0.0, 0.0)
    many = CostTable(costs, 64)
    assert many.seconds(4, 4, 4 * 256, 4 * 256) - many.seconds(4, 4) == pytest.approx(4 * 256 * 6e-6)
    assert many.entry_seconds(4, 4, 1024) == pytest.approx(1e-6)


@pytest.mark.parametrize("steps", [[], [(2, 0.1)], [(1, 0.0), (2, 0.1)]])
def test_a_profile_must_start_with_one_row_that_takes_time(steps: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="profile the worker"):
        CostTable(Costs(steps), 8)


@given(factor=st.floats(0.3, 4.0), seed=st.integers(0, 1000))
def test_it_follows_a_machine_that_changed_speed_and_ignores_outliers(factor: float, seed: int) -> None:
    chance = random.Random(seed)
    costs = table()
    for _ in range(200):
        rows = chance.choice([1, 4, 16])
        measured = costs.profiled(rows, 1, 500, 500) * factor * chance.uniform(0.97, 1.03)
        costs.correct(measured * (50 if chance.random() < 0.1 else 1), rows, 1, 500, 500)
    for rows in (1, 4, 8, 16):
        assert costs.seconds(rows) == pytest.approx(costs.profiled(rows) * factor, rel=0.12)


def test_a_climb_starts_where_the_step_stands() -> None:
    costs = table()
    plain = costs.seconds(2, 2, 1000, 1000)
    climb = costs.climb(2, 2, 40, plain)
    assert len(climb) == 40
    for more in (2, 6, 14, 30):
        assert climb[more - 1] == pytest.approx(costs.seconds(2 + more, 2, 1000, 1000) - plain)


def test_sizes_that_were_not_seen_are_taken_to_be_as_cheap_as_they_may_be() -> None:
    costs = table()
    for _ in range(300):
        costs.correct(costs.profiled(1), 1)
    before = costs.climb(1, 1, 15, costs.seconds(1), hopeful=True)[14]
    for _ in range(100):
        costs.correct(costs.profiled(16), 16, guessing=True)
        costs.correct(costs.profiled(1), 1)
    after = costs.climb(1, 1, 15, costs.seconds(1), hopeful=True)[14]
    assert before < after == pytest.approx(0.005, rel=0.1)


def test_what_guesses_cost_a_few_sequences_beyond_the_profile_is_not_charged_to_many() -> None:
    """A sixth of a step of one or two; thirty-two would need five accepted guesses to pay for that before the first one counts."""
    costs = table()
    for _ in range(60):
        costs.correct(costs.profiled(4) * 1.16, 4, 2, guessing=True)
        costs.correct(costs.profiled(2), 2, 2)
    assert costs.climb(2, 2, 1, costs.seconds(2, 2))[0] > 0.1 * costs.seconds(2, 2)
    plain = costs.seconds(32, 32)
    assert costs.climb(32, 32, 1, plain)[0] < 0.05 * plain
    for _ in range(60):
        costs.correct(costs.profiled(40, 32) * 1.16, 40, 32, guessing=True)
        costs.correct(costs.profiled(32, 32), 32, 32)
    assert costs.climb(32, 32, 8, plain)[7] == pytest.approx(1.16 * costs.profiled(40, 32) - plain, rel=0.2)
    assert costs.climb(2, 2, 1, costs.seconds(2, 2))[0] > 0.1 * costs.seconds(2, 2), "and is not forgotten meanwhile"
