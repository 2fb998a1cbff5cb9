from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.router.controller.toll import FLOOR, tolls


@given(st.lists(st.floats(0.0, 0.1), max_size=40), st.floats(1.0, 1000.0))
def test_every_guess_costs_the_floor_at_least_and_what_cannot_pay_is_not_offered(climb: list[float], goodput: float) -> None:
    toll = tolls(climb, goodput, 0.0).toll
    assert all(cost >= FLOOR * (n + 1) * 0.999 for n, cost in enumerate(toll))
    assert len(toll) <= len(climb)
    if toll:
        assert toll[-1] - (toll[-2] if len(toll) > 1 else 0.0) < 1.0


@given(st.lists(st.floats(0.0, 0.01), min_size=1, max_size=40), st.floats(1.0, 200.0), st.data())
def test_no_node_below_the_least_price_is_worth_its_toll(climb: list[float], goodput: float, data: st.DataObject) -> None:
    """Whatever the other nodes are: one that brings less than any step of the stair costs makes every choice poorer."""
    charged = tolls(sorted(climb), goodput, 0.0)
    if charged.toll:
        place = data.draw(st.integers(0, len(charged.toll) - 1))
        rise = charged.toll[place] - (charged.toll[place - 1] if place else 0.0)
        assert charged.least <= rise + 1e-12


def test_the_price_is_what_a_node_costs_on_average() -> None:
    charged = tolls([0.001 * (n + 1) for n in range(8)], 100.0, 1e-6)
    assert charged.price(4) == pytest.approx(0.1)
    assert charged.price(0) == charged.price(1) and charged.price(99) == pytest.approx(0.1)
    assert charged.entry == pytest.approx(1e-4)


def test_a_full_machine_offers_nothing() -> None:
    """Sixty-four roots fill it, so a row costs as much as it can bring at most."""
    charged = tolls([0.001 * (n + 1) for n in range(64)], 1010.0, 0.0)
    assert charged.toll == [] and charged.price(3) == 1.0


def test_where_the_best_guesses_do_not_pay_there_is_no_need_to_ask() -> None:
    """The first guess costs five tokens, each further one nearly what it brings; a free one, or enough that cost half, would do."""
    assert not tolls([5.0 + 0.9 * n for n in range(40)], 1.0, 0.0).pays(0.95)
    assert tolls([5.0 + 0.5 * n for n in range(40)], 1.0, 0.0).pays(0.95)
    assert tolls([0.0], 1.0, 0.0).pays(0.95) and not tolls([], 1.0, 0.0).pays(0.95)
