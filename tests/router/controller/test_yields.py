from __future__ import annotations

import pytest

from forerun.router.controller.yields import Mean, Yield


def test_a_new_sequence_is_what_others_were_until_it_shows_itself() -> None:
    all = Mean()
    for _ in range(100):
        all.observe(8, 4)
    one = Yield(all)
    assert one.worth(0.1) == pytest.approx(4 - 0.8)
    for _ in range(20):
        one.mean.observe(8, 0)
    assert one.worth(0.1) < -0.3


def test_it_follows_a_change_within_a_few_asks() -> None:
    one = Yield(Mean())
    for _ in range(100):
        one.mean.observe(3, 0)
    for _ in range(2):
        one.mean.observe(8, 8)
    assert one.worth(0.2) > 0.3


def test_looking_again_costs_a_bounded_share() -> None:
    one = Yield(Mean())
    for loss in (0.001, 0.02, 0.3, 5.0):
        one.pause(100, loss)
        assert loss / (one.due - 100) <= 0.003 or one.due - 100 == 512
    one.pause(7, 0.0)
    assert one.due == 8
