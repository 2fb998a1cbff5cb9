"""Times of forwards: near what is usual, by size, whatever single ones do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.drafters.pace import Pace


def test_nothing_is_known_at_first() -> None:
    assert Pace().seconds(4) == 0.0


def test_each_size_has_its_own_and_others_take_the_nearest() -> None:
    pace = Pace()
    for _ in range(30):
        pace.observe(1, 0.001)
        pace.observe(16, 0.004)
    assert pace.seconds(1) == pytest.approx(0.001) and pace.seconds(16) == pace.seconds(9) == pytest.approx(0.004)
    assert pace.seconds(2) == pace.seconds(1) and pace.seconds(1000) == pace.seconds(16)


def test_a_hiccup_counts_for_little_and_a_change_is_followed() -> None:
    pace = Pace()
    for _ in range(50):
        pace.observe(1, 0.001)
    pace.observe(1, 1.0)
    assert pace.seconds(1) < 0.0012
    for _ in range(60):
        pace.observe(1, 0.003)
    assert pace.seconds(1) == pytest.approx(0.003, rel=0.1)


@given(st.integers(0, 2), st.floats(1e-4, 0.1), st.floats(2.0, 1e4))
def test_a_hiccup_among_the_first_counts_for_little_too(place: int, usual: float, times: float) -> None:
    """Above all a first forward is often one that the process was stopped in, or that touches memory for the first time."""
    pace = Pace()
    for number in range(3):
        pace.observe(4, usual * (times if number == place else 1.0))
    assert pace.seconds(4) == pytest.approx(usual)


def test_nonsense_is_ignored() -> None:
    pace = Pace()
    pace.observe(0, 1.0)
    pace.observe(1, 0.0)
    assert pace.seconds(1) == 0.0
