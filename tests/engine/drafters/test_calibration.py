"""Confidences follow what happens, and every guess whose parent was true is evidence."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.drafters.calibration import Calibration


def taught(*outcomes: int, prior: float = 0.5, **settings: int) -> float:
    calibration = Calibration([prior], **settings)
    for held in outcomes:
        calibration.propose(0, [7], [-1], [0])
        calibration.settle(0, [7 if held else 8])
    return calibration.rate[0]


def test_the_prior_is_worth_its_strength() -> None:
    assert taught() == 0.5
    assert taught(*[1] * 8, strength=8) == pytest.approx(12 / 16)
    assert taught(*[0] * 24, strength=8) == pytest.approx(4 / 32)


@pytest.mark.parametrize("share", [0.03, 0.4, 0.9])
def test_it_finds_the_rate(share: float) -> None:
    dice = random.Random(1)
    assert taught(*(dice.random() < share for _ in range(5000)), memory=1000) == pytest.approx(share, abs=0.04)


def test_it_forgets() -> None:
    """A regime of any length is forgotten within a few times `memory`."""
    assert taught(*[1] * 100_000, *[0] * 300, memory=100) < 0.06


@given(st.lists(st.booleans(), max_size=50), st.floats(0.01, 0.99))
def test_a_rate_is_a_probability(outcomes: list[bool], prior: float) -> None:
    assert 0 < taught(*outcomes, prior=prior, memory=20) < 1


TREE = ([7, 8, 9, 7, 5], [-1, -1, 0, 1, 2], [0, 1, 2, 3, 4])
"""7 ─ 9 ─ 5 and 8 ─ 7; each node is a cell of its own"""


@pytest.mark.parametrize(
    "truth, outcomes",
    [
        ([7, 9, 5, 1], [1, 0, 1, None, 1]),
        ([7, 9], [1, 0, 1, None, None]),
        ([7, 1, 1], [1, 0, 0, None, None]),
        ([8, 7], [0, 1, None, 1, None]),
        ([6, 9, 5], [0, 0, None, None, None]),
        ([], [None] * 5),
    ],
)
def test_what_is_scored(truth: list[int], outcomes: list[int | None]) -> None:
    calibration = Calibration([0.5] * 5)
    calibration.propose(3, *TREE)
    calibration.settle(3, truth)
    assert [None if rate == 0.5 else int(rate > 0.5) for rate in calibration.rate] == outcomes
    before = list(calibration.rate)
    calibration.settle(3, truth)
    assert calibration.rate == before, "a draft is scored once"


def test_a_row_that_left_teaches_nothing() -> None:
    calibration = Calibration([0.5] * 5)
    calibration.propose(3, *TREE)
    calibration.forget(3)
    calibration.settle(3, [7, 9])
    calibration.forget(99)
    assert calibration.rate == [0.5] * 5
