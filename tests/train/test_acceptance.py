"""What hits mean: rates of a chain, and tokens of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.train.acceptance import DEPTH, by_position, tokens_a_step


def chain(right: list[bool]) -> np.ndarray:
    """Hits of a draft that is right at some places, whatever was guessed before."""
    padded = np.array([*right, *[False] * DEPTH])
    return np.stack([padded[d : d + len(right)] for d in range(DEPTH)], -1)


@pytest.mark.parametrize("guesses", [1, 2, 4, 8])
def test_a_perfect_draft_brings_a_token_more_than_its_guesses(guesses: int) -> None:
    places = 1 + 5 * (guesses + 1)
    assert tokens_a_step([chain([True] * places)], guesses) == guesses + 1


def test_a_wrong_draft_brings_one_token_a_step() -> None:
    assert tokens_a_step([chain([False] * 20)], 8) == 1.0
    assert by_position([chain([False] * 20)]) == [0.0]


def test_rates_are_those_of_guesses_whose_predecessors_held() -> None:
    rates = by_position([chain([False, True, False] * 40)])
    assert rates[0] == pytest.approx(1 / 3, abs=0.01)
    assert rates[1] == 0.0 and len(rates) == 2


@given(st.lists(st.booleans(), min_size=2, max_size=60), st.sampled_from([1, 2, 4, 8]))
def test_walking_counts_as_verification_would(right: list[bool], guesses: int) -> None:
    at, steps = 1, 0
    while at < len(right):
        held = 0
        while held < guesses and at + held + 1 < len(right) and right[at + held]:
            held += 1
        at, steps = at + held + 1, steps + 1
    assert tokens_a_step([chain(right)], guesses) == pytest.approx((at - 1) / steps)


def test_a_text_of_one_token_has_no_steps() -> None:
    assert tokens_a_step([chain([True])], 4) == 0.0
