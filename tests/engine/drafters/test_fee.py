"""What asking takes, told apart from what reading takes."""

from __future__ import annotations

import random

import pytest

from forerun.engine.drafters.fee import Fee


def test_nothing_is_known_at_first() -> None:
    assert Fee().asking(4) == Fee().reading(100) == 0.0


def test_of_the_first_ask_nobody_knows_what_took_how_long() -> None:
    fee = Fee()
    fee.observe(1, 0.010, unread=50)
    assert fee.asking(1) == pytest.approx(0.005) and fee.reading(50) == pytest.approx(0.005)


@pytest.mark.parametrize(("asking", "reading"), [(2e-3, 1e-4), (1e-4, 1e-3), (2e-3, 0.0)])
def test_asking_and_reading_are_learned_apart(asking: float, reading: float) -> None:
    fee, chance = Fee(), random.Random(0)
    for number in range(400):
        unread = chance.randrange(20, 300) if number % 10 == 0 else 0
        fee.observe(1, asking + reading * unread, unread)
    assert fee.asking(1) == pytest.approx(asking, rel=0.05)
    assert fee.reading(100) == pytest.approx(100 * reading, rel=0.1, abs=1e-6)
    assert fee.asking(0) == 0.0
