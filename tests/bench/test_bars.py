"""Bars: the verdict, the distance, the table."""

from __future__ import annotations

import pytest

from forerun.bench.bars import Bar, present


@pytest.mark.parametrize(
    ("bar", "passed", "cost"),
    [
        (Bar("a", 0.95, "≥", 0.9), True, 0.9 / 0.95),
        (Bar("a", 0.45, "≥", 0.9), False, 2),
        (Bar("a", 30, "≤", 15), False, 2),
        (Bar("a", 15, "≤", 15), True, 1),
        (Bar("a", 0, "≥", 2000), False, float("inf")),
    ],
)
def test_verdict_and_distance(bar: Bar, passed: bool, cost: float) -> None:
    assert bar.passed is passed
    assert bar.cost == pytest.approx(cost)
    assert (bar.cost <= 1) == passed


def test_the_table_says_all_of_it() -> None:
    text = present([Bar("speed", 0.95, "≥", 0.9, "", "95 of 100"), Bar("cost", 30, "≤", 15, "µs")], ["by the way"])
    speed, cost, remark = text.splitlines()[1:]
    assert speed.split() == ["pass", "speed", "0.95", "≥", "0.9", "95", "of", "100"]
    assert cost.split() == ["MISS", "cost", "30", "≤", "15", "µs"]
    assert remark.strip() == "by the way"
