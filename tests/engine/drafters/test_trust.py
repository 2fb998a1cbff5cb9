"""Confidences become honest for each row, whatever the drafter claims, and soon after the text changed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.drafters.draft import Draft
from forerun.engine.drafters.trust import Trust


class Text:
    """A row whose drafts are chains of four that hold with some chance each. A guess that holds carries token 1."""

    def __init__(self, trust: Trust, number: int, seed: int = 0) -> None:
        self.trust, self.number, self.tokens = trust, number, [1]
        self._dice = random.Random(seed)

    def step(self, claim: float, truth: float) -> list[float]:
        """The survival of the next draft; then what became of it."""
        right = [self._dice.random() < truth for _ in range(4)]
        survival = self.trust.offer(self.number, Draft.chain([int(yes) for yes in right], [claim] * 4), len(self.tokens))
        accepted = right.index(False) if False in right else 4
        self.tokens += [1] * (1 + accepted)
        self.trust.settle(self.number, self.tokens)
        return survival

    def first(self, claim: float, truth: float, steps: int) -> float:
        """The chance of a first guess after so many steps, on average over the last ten."""
        seen = [self.step(claim, truth)[0] for _ in range(steps)]
        return sum(seen[-10:]) / 10


@pytest.mark.parametrize("claim", [0.2, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("truth", [0.1, 0.5, 0.9])
def test_it_finds_the_truth_behind_any_claim(claim: float, truth: float) -> None:
    found = sum(Text(Trust(), 0, seed).first(claim, truth, 120) for seed in range(8)) / 8
    assert found == pytest.approx(truth, abs=0.12)


def test_rows_are_told_apart_and_a_new_one_starts_from_what_rows_are_like() -> None:
    trust = Trust()
    good, bad = Text(trust, 0, 1), Text(trust, 1, 2)
    for _ in range(100):
        good.step(0.6, 0.95)
        bad.step(0.6, 0.1)
    assert good.step(0.6, 0.95)[0] > 0.8 and bad.step(0.6, 0.1)[0] < 0.3
    assert bad.step(0.6, 0.1)[0] < Text(trust, 2).step(0.6, 0.5)[0] < good.step(0.6, 0.95)[0]


@pytest.mark.parametrize(("before", "after"), [(0.95, 0.02), (0.02, 0.95)])
def test_another_text_is_noticed_within_ten_steps(before: float, after: float) -> None:
    text = Text(Trust(), 0)
    text.first(0.9, before, 200)
    for _ in range(10):
        text.step(0.9, after)
    assert (text.step(0.9, after)[0] > 0.5) == (after > 0.5)


def test_it_also_learns_from_what_was_not_verified() -> None:
    """Nothing of the drafts is ever kept; the tokens come all the same, and say that they were right."""
    trust, tokens = Trust(), [1]
    for _ in range(20):
        trust.offer(0, Draft.chain([1, 1]), len(tokens))
        tokens += [1]
        trust.settle(0, tokens)
    assert trust.offer(0, Draft.chain([1, 1]), len(tokens))[0] > 0.9


def test_a_row_that_is_gone_is_forgotten() -> None:
    trust = Trust()
    text = Text(trust, 0)
    text.first(0.9, 0.0, 50)
    trust.offer(0, Draft.chain([5]), 7)
    trust.forget(0)
    trust.settle(0, [9] * 8)
    draft = Draft.chain([1], [0.9])
    assert trust.offer(0, draft, 1) == trust.offer(1, draft, 1)


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    count = draw(st.integers(0, 6))
    parent = [draw(st.integers(-1, i - 1)) for i in range(count)]
    token = [draw(st.integers(0, 2)) for _ in range(count)]
    return Draft(token, parent, [draw(st.floats(0.0, 1.0)) for _ in range(count)], [False] * count)


@given(st.lists(st.tuples(trees(), st.lists(st.integers(0, 2), max_size=5)), max_size=30))
def test_survival_is_a_probability_and_never_grows_along_a_path(steps: list[tuple[Draft, list[int]]]) -> None:
    trust, tokens = Trust(), [0]
    for draft, said in steps:
        survival = trust.offer(3, draft, len(tokens))
        assert all(0.0 <= value <= 1.0 for value in survival)
        assert all(parent < 0 or value <= survival[parent] for value, parent in zip(survival, draft.parent))
        tokens += said
        trust.settle(3, tokens)
