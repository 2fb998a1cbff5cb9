"""Sequences that kill workers end alone; the server and everybody else's streams go on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.messages import Start
from forerun.router.link import Link
from forerun.router.replica import Replica
from forerun.router.request import Sequence
from forerun.router.service import Phase, Router
from forerun.router.suspects import Suspects
from tests.router.fakes import Collector, Counting, configuration, expected, request
from tests.router.poisoned import BROKEN, POISON


def sequences(count: int) -> list[Sequence]:
    asked = request([1, 2])
    return [Sequence(asked, asked.params, Collector(), [1, 2]) for _ in range(count)]


def test_two_deaths_in_the_same_place_name_the_only_one() -> None:
    suspects, (one, other, third) = Suspects(), sequences(3)
    assert suspects.died([one, other]) is None and not suspects.several
    other.tokens.append(3)
    assert suspects.died([third, one, other]) is one


def test_several_are_not_named_and_the_next_death_leaves_one() -> None:
    suspects, (one, other) = Suspects(), sequences(2)
    assert suspects.died([one, other]) is None
    assert suspects.died([one, other]) is None and suspects.several
    assert suspects.died([other]) is other


def test_a_death_that_is_explained_says_nothing_about_others() -> None:
    suspects, (poison, innocent, second) = Suspects(), sequences(3)
    suspects.died([poison, innocent, second])
    assert suspects.died([poison, innocent, second]) is None
    innocent.tokens.append(3)
    assert suspects.died([innocent, poison]) is poison
    assert suspects.died([innocent, second]) is second


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4), max_size=8))
def test_nobody_is_named_who_got_a_token_or_was_not_there(deaths: list[list[tuple[int, bool]]]) -> None:
    """(number, got a token since the last death) of everybody whom the dead worker was busy with."""
    suspects, known = Suspects(), sequences(4)
    before: set[int] = set()
    """numbers of those who were there at the last death that was not explained and got no token since"""
    for death in deaths:
        busy = dict(death)
        for number, token in busy.items():
            known[number].tokens += [0] * token
            before -= {number} if token else set()
        named = suspects.died([known[number] for number in busy])
        same = before & set(busy)
        if len(same) == 1:
            assert named is known[min(same)]
            before -= same
        else:
            assert named is None and suspects.several == bool(same)
            before = set(busy)


class PoisonedRouter(Router):
    def _spawn(self, start: Start, replica: Replica) -> Link:
        return Link(start, replica, 30.0, command=(sys.executable, "-m", "tests.router.poisoned"))


@contextlib.asynccontextmanager
async def running(model: str = "none", batch: int | None = None) -> AsyncIterator[tuple[Router, Counting]]:
    observer = Counting()
    router = PoisonedRouter(configuration(batch=batch), Start(model, echo=True), observer)
    router.open()
    await asyncio.wait_for(router.became_ready.wait(), 20)
    try:
        yield router, observer
    finally:
        await router.close()


def blamed(stream: Collector) -> bool:
    failure = stream.failure
    return failure is not None and (failure.kind, failure.status) == ("generation", 424) and "two workers in a row" in failure.message


@pytest.mark.parametrize("tokens", [0, 3])
async def test_alone_it_ends_at_the_second_death(tokens: int) -> None:
    async with running() as (router, observer):
        stream = Collector()
        router.submit(request([POISON, tokens], 10), stream)
        await stream.wait(40)
        assert blamed(stream) and len(stream.got) == tokens and len(observer.deaths) == 2
        what, other = request([1, 2]), Collector()
        router.submit(what, other)
        await other.wait(40)
        assert other.got == expected(what)


@pytest.mark.parametrize("tokens", [0, 3])
async def test_among_others_it_is_found_again_and_again_and_nobody_else_is_harmed(tokens: int) -> None:
    async with running() as (router, observer):
        work = [(request([n, 7, 8], 1500), Collector()) for n in range(1, 9)]
        for what, stream in work:
            router.submit(what, stream)
        for _ in range(3):  # within a minute, and three deaths would be the end
            poison = Collector()
            router.submit(request([POISON, tokens], 10), poison)
            await poison.wait(60)
            assert blamed(poison) and len(poison.got) == tokens
        assert router.phase is not Phase.FAILED and len(observer.deaths) >= 6
        for what, stream in work:
            await stream.wait(60)
            assert stream.got == expected(what)


async def test_two_at_once_are_both_found() -> None:
    async with running() as (router, _):
        poisons = [Collector() for _ in range(2)]
        what, stream = request([1, 2], 3000), Collector()
        router.submit(what, stream)
        for poison in poisons:
            router.submit(request([POISON, 0], 10), poison)
        for poison in poisons:
            await poison.wait(60)
            assert blamed(poison)
        await stream.wait(60)
        assert stream.got == expected(what)


async def test_a_worker_that_never_answers_is_still_given_up_soon() -> None:
    async with running(BROKEN) as (router, observer):
        for n in range(1, 20):
            router.submit(request([n], 10), Collector())
        await asyncio.wait_for(router.failed.wait(), 60)
        assert len(observer.deaths) == 3
