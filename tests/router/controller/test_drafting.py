from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.router.controller.drafting import Drafting


def test_nothing_is_charged_for_what_was_never_seen() -> None:
    assert Drafting().seconds(3) == [0.0] * 4


@pytest.mark.parametrize(("each", "all"), [(3e-5, 0.0), (0.0, 2e-3)], ids=["looks up", "computes"])
def test_it_learns_what_drafting_costs(each: float, all: float) -> None:
    drafting, chance = Drafting(), random.Random(0)
    for _ in range(300):
        asked = chance.choice([1, 2, 4, 8, 16])
        outlier = 20 if chance.random() < 0.05 else 1
        drafting.observe(asked, (all + each * asked) * chance.uniform(0.8, 1.25) * outlier)
    seconds = drafting.seconds(16)
    for asked in (1, 2, 4, 8, 16):
        assert seconds[asked] == pytest.approx(all + each * asked, rel=0.4)


def test_what_is_not_known_is_in_proportion_to_the_nearest_that_is() -> None:
    drafting = Drafting()
    drafting.observe(2, 2e-5)
    assert drafting.seconds(20)[20] == pytest.approx(2e-4)
    drafting.observe(0, 1.0)
    drafting.observe(2, 0.0)
    assert drafting.seconds(1)[1] == pytest.approx(1e-5)


def test_reading_a_prompt_is_not_what_every_ask_takes() -> None:
    """Sequences begin, are read, and are asked about thirty times; now and then somebody else has the machine."""
    drafting, chance = Drafting(), random.Random(0)
    each, read = 1.5e-3, 1e-4
    for number in range(600):
        unread = 80 if number % 30 == 0 else 0
        outlier = 10 if chance.random() < 0.03 else 1
        drafting.observe(1, (each + read * unread) * chance.uniform(0.9, 1.1) * outlier, unread)
    assert drafting.seconds(1)[1] == pytest.approx(each, rel=0.2)
    assert drafting.read_seconds == pytest.approx(read, rel=0.4)


def test_the_first_ask_says_little_of_the_next_ones() -> None:
    drafting = Drafting()
    drafting.observe(1, 0.010, 80)
    assert drafting.seconds(1)[1] == pytest.approx(0.005) and drafting.read_seconds == pytest.approx(0.005 / 80)
    drafting.observe(1, 0.002)
    drafting.observe(1, 0.002)
    drafting.observe(1, 0.002)
    assert drafting.seconds(1)[1] == pytest.approx(0.002, rel=0.4)


def test_what_a_drafter_adds_by_choice_is_not_what_an_ask_costs() -> None:
    drafting = Drafting()
    for number in range(200):
        drafting.observe(4, 2e-4, chosen=0.010 if number % 2 else 0.0)
    assert drafting.seconds(4)[4] == pytest.approx(2e-4) and drafting.chosen(4) == pytest.approx(0.005, rel=0.2)
    assert drafting.chosen(0) == drafting.chosen(1) == 0.0


def test_what_happens_now_and_then_is_charged_by_how_often_it_does() -> None:
    drafting = Drafting()
    for number in range(400):
        drafting.observe(1, 2e-4, chosen=0.004 if number % 4 == 0 else 0.0)
    assert drafting.chosen(1) == pytest.approx(0.001, rel=0.3)
    for _ in range(100):
        drafting.observe(1, 2e-4)
    assert drafting.chosen(1) < 1e-5, "a source that is no longer asked costs nothing"


SECONDS = st.floats(0.0, 1e5, allow_subnormal=False)


@given(asked=st.integers(1, 40), seconds=SECONDS, unread=st.integers(0, 10**6), chosen=SECONDS, again=st.integers(1, 3))
def test_a_single_step_whatever_it_says_moves_no_price_far(asked: int, seconds: float, unread: int, chosen: float, again: int) -> None:
    """Stopped inside a draft, or a clock that stood still: what was learned stays where it was, within a bounded step."""
    drafting, chance = Drafting(), random.Random(again)
    for number in range(60):
        count = chance.choice([1, 2, 4, 8, 16, 32])
        late = 80 if number % 10 == 0 else 0
        choice = chance.choice([0.0, 3e-3]) * chance.uniform(0.9, 1.1)
        drafting.observe(count, (5e-4 + 1e-4 * count + 1e-5 * late) * chance.uniform(0.9, 1.1), late, choice, 0.01)
    before = [*drafting.seconds(32)[1:], drafting.read_seconds]
    often, usual = [drafting.chosen(count) for count in range(1, 33)], drafting.seconds(asked)[asked] + drafting.read_seconds * unread
    believed = drafting.observe(asked, seconds, unread, chosen, 0.01)
    after = [*drafting.seconds(32)[1:], drafting.read_seconds]
    assert after == pytest.approx(before, rel=0.3)
    assert [drafting.chosen(count) for count in range(1, 33)] == pytest.approx(often, rel=0.3, abs=0.05 * 0.004 * 1.3)
    assert believed <= 8 * (usual + 0.004)


def test_the_first_draft_of_all_may_be_the_absurd_one() -> None:
    """Nothing is known yet; but no drafter takes thirty steps and is worth it. The next one that says the same is believed."""
    drafting = Drafting()
    assert drafting.observe(1, 4.0, 80, plain=0.01) == 0.0
    assert drafting.seconds(1)[1] == drafting.read_seconds == 0.0
    slow = Drafting()
    for _ in range(2):
        slow.observe(1, 4.0, plain=0.01)
    assert slow.seconds(1)[1] > 0.2, "it is how things are, as far as they may be believed at all"


def test_a_drafter_that_has_become_slow_is_soon_known_as_such() -> None:
    drafting = Drafting()
    for _ in range(50):
        drafting.observe(1, 1e-4)
    for _ in range(20):
        drafting.observe(1, 3e-3)
    assert drafting.seconds(1)[1] == pytest.approx(3e-3, rel=0.3)
    for number in range(300):  # and so is one that is slow every other time
        drafting.observe(1, 0.1 if number % 2 else 3e-3)
    assert drafting.seconds(1)[1] > 6e-3
