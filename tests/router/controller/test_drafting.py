from __future__ import annotations

import random

import pytest

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
