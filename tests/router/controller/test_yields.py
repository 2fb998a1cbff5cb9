from __future__ import annotations

import pytest

from forerun.router.controller.yields import Curiosity, Honesty, Mean, Yield


def test_a_new_sequence_is_what_others_were_until_it_shows_itself() -> None:
    all = Mean()
    for _ in range(100):
        all.observe(8, 4.0, 0.002)
    one = Yield(all)
    assert one.worth(goodput=500.0) == pytest.approx(4 - 1)
    for _ in range(30):
        one.mean.observe(8, 0.0, 0.002)
    assert one.worth(500.0) < -0.5


def test_it_follows_a_change_within_a_few_asks() -> None:
    one = Yield(Mean())
    for _ in range(100):
        one.mean.observe(3, 0.0, 0.001)
    for _ in range(2):
        one.mean.observe(8, 8.0, 0.001)
    assert one.worth(200.0) > 0.3


@pytest.mark.parametrize(("tokens", "cost"), [(1, 0.01), (1, 5.0), (16, 0.1), (64, 3.0)])
def test_looking_again_costs_a_bounded_share(tokens: int, cost: float) -> None:
    curiosity = Curiosity()
    spent, rounds = 0.0, 4000
    for _ in range(rounds):
        curiosity.earn(tokens)
        spent += cost * curiosity.affords(cost)
    assert 0.8 * 0.003 * tokens * rounds - cost <= spent <= 0.003 * tokens * rounds + 1.0 + cost


def test_a_worker_that_expects_too_much_is_believed_less() -> None:
    honesty = Honesty()
    assert honesty.factor == 1.0
    for _ in range(2000):
        honesty.observe(1, 2.0)
    assert honesty.factor == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("claimed", [0.1, 0.6, 3.0])
def test_what_is_expected_of_a_look_in_vain_is_paid_for(claimed: float) -> None:
    """A drafter whose guesses never hold may promise what it likes: the looks it gets cost their share."""
    curiosity, looks, rounds = Curiosity(), 0, 4000
    for _ in range(rounds):
        curiosity.earn(1)
        if curiosity.affords(-claimed):
            looks += 1
            curiosity.settle(-claimed)
    assert looks * claimed <= 0.003 * rounds + 1.0 + claimed
    honest = Curiosity()
    for _ in range(100):
        assert honest.affords(-claimed)
        honest.settle(0.0)
