"""Corrections follow a machine that changes, in all sizes and in some, and hardly hear outliers."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.router.controller.filter import KNOTS, Filter


def watch(filter: Filter, chance: random.Random, knots: list[int], value: float, rounds: int, outliers: float = 0.0) -> None:
    for _ in range(rounds):
        wild = 3.0 if chance.random() < outliers else 0.0
        knot = chance.choice(knots)
        filter.observe(knot, 0.0, value + chance.gauss(0.0, 0.03) + wild)


@given(st.floats(-1.5, 1.5), st.integers(0, 1000))
def test_it_finds_the_level_whatever_the_outliers(level: float, seed: int) -> None:
    filter = Filter()
    watch(filter, random.Random(seed), [0, 2, 4], level, 200, outliers=0.1)
    for knot in (0, 2, 4):
        assert filter.at(knot, 0.0) == pytest.approx(level, abs=0.1)


def test_one_outlier_moves_it_by_little() -> None:
    filter = Filter()
    watch(filter, random.Random(1), [0], 0.0, 100)
    before = filter.at(0, 0.0)
    filter.observe(0, 0.0, 4.0)
    assert abs(filter.at(0, 0.0) - before) < 0.05


def test_a_change_of_speed_is_followed_within_ten_rounds_also_where_nothing_was_seen() -> None:
    filter, chance = Filter(), random.Random(2)
    watch(filter, chance, [0, 3], 0.0, 300)
    watch(filter, chance, [3], math.log(2.0), 10)
    assert filter.at(3, 0.0) == pytest.approx(math.log(2.0), abs=0.1)
    assert filter.at(0, 0.0) == pytest.approx(math.log(2.0), abs=0.15)


def test_two_looks_at_a_size_not_seen_for_long_say_most_of_what_they_saw() -> None:
    """Only large steps became slower; a common drift is what it looked like until a small one was seen again."""
    filter, chance = Filter(), random.Random(3)
    watch(filter, chance, [0, 3], 0.0, 300)
    watch(filter, chance, [3], 0.3, 400)
    for _ in range(2):
        filter.observe(0, 0.0, 0.0)
    assert filter.at(0, 0.0) < 0.12
    assert filter.at(3, 0.0) == pytest.approx(0.3, abs=0.15)


def test_doubt_grows_with_what_was_not_seen_and_shrinks_with_what_was() -> None:
    filter, chance = Filter(), random.Random(4)
    first = filter.doubt(0, 3)
    watch(filter, chance, [0, 3], 0.0, 100)
    second = filter.doubt(0, 3)
    watch(filter, chance, [3], 0.0, 1000)
    assert second < first / 4 and filter.doubt(0, 3) > 2 * second


@given(st.lists(st.tuples(st.integers(0, KNOTS - 1), st.floats(0.0, 1.0), st.floats(-20.0, 20.0)), max_size=80))
def test_it_stays_finite(seen: list[tuple[int, float, float]]) -> None:
    filter = Filter()
    for knot, share, value in seen:
        filter.observe(knot, share if knot < KNOTS - 1 else 0.0, value)
    assert all(abs(value) < 20 for value in filter.value)
    assert all(filter.doubt(a, b) >= 0.0 for a in range(KNOTS) for b in range(KNOTS))
