"""Urgent sequences guess more, the more so the fuller the machine; nobody is starved of more than guesses."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.router.controller.price import Price
from forerun.router.controller.weight import LEAST, MOST, weights
from forerun.router.request import Sequence
from tests.router.controller.streams import COSTS, World, sequence

PRIORITIES = st.lists(st.integers(-(1 << 16), 1 << 16), min_size=1, max_size=64)


@given(PRIORITIES)
def test_higher_priority_never_weighs_less_and_all_weights_are_bounded(priorities: list[int]) -> None:
    found = weights(priorities)
    assert len(found) in (0, len(priorities))
    ranked = [weight for _, weight in sorted(zip(priorities, found), key=lambda pair: pair[0])]
    assert ranked == sorted(ranked)
    assert all(LEAST <= weight <= MOST for weight in found)


@given(PRIORITIES, st.integers(-1000, 1000))
def test_only_differences_count(priorities: list[int], more: int) -> None:
    assert weights([priority + more for priority in priorities]) == weights(priorities)


@pytest.mark.parametrize("priority", [-3, 0, 5])
def test_who_is_alone_or_among_equals_weighs_one(priority: int) -> None:
    assert weights([priority] * 8) == weights([priority]) == weights([]) == []


def urgent(priority: int) -> Sequence:
    one = sequence()
    return dataclasses.replace(one, request=dataclasses.replace(one.request, priority=priority))


def test_under_load_the_urgent_one_is_asked_about_and_its_guesses_weigh_more() -> None:
    """Sixteen rows fill this machine; at survival 0.5 a guess costs more than it brings, except for the one that weighs four times."""
    controller, world = Price(COSTS, most=8), World(chance=0.5, frugal=True)
    streams = [urgent(0) for _ in range(31)] + [urgent(5)]
    asked = [0] * 32
    for _ in range(300):
        allowance = world.step(controller, streams)
        for i, guess in enumerate(allowance.guess if allowance else []):
            asked[i] += guess > 0
        if allowance:
            assert len(allowance.weights) == 32 and allowance.weights[31] == MOST > 1.0 > allowance.weights[0]
    assert asked[31] > 3 * max(asked[:31])


def test_without_priorities_there_is_nothing_to_send() -> None:
    controller, world = Price(COSTS, most=8), World()
    streams = [sequence(), sequence()]
    for _ in range(5):
        allowance = world.step(controller, streams)
        assert allowance is None or allowance.weights == []
