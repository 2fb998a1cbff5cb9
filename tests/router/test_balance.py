"""Which replica takes a sequence."""

from __future__ import annotations

import dataclasses
from collections import Counter

from forerun.messages import SamplingParams
from forerun.router.balance import BEGINNING_TOKENS, DETOUR, REMEMBERED, Balance
from forerun.router.request import Request


@dataclasses.dataclass
class Place:
    alive: int = 0


def request(first: int, length: int = BEGINNING_TOKENS + 8, tenant: str = "") -> Request:
    tokens = [first] * length
    return Request("r", tokens, SamplingParams(1, length, 4), 0.0, tenant=tenant)


def test_the_emptiest_takes_what_is_new() -> None:
    places = [Place(3), Place(1), Place(2)]
    assert Balance().choose(places, request(1)) is places[1]


def test_a_known_beginning_goes_where_it_went_before_within_reason() -> None:
    balance, places = Balance(), [Place(), Place()]
    first = balance.choose(places, request(1))
    first.alive = DETOUR
    assert balance.choose(places, request(1)) is first
    assert balance.choose(places, request(2)) is not first
    assert balance.choose(places, request(1, tenant="other")) is not first
    first.alive = DETOUR + 1
    moved = balance.choose(places, request(1))
    assert moved is not first
    first.alive = moved.alive = 0
    assert balance.choose(places, request(1)) is moved


def test_a_replica_that_is_gone_is_not_chosen() -> None:
    balance, places = Balance(), [Place(), Place()]
    first = balance.choose(places, request(1))
    rest = [place for place in places if place is not first]
    assert balance.choose(rest, request(1)) is rest[0]


def test_load_is_spread_and_the_memory_is_bounded() -> None:
    balance, places = Balance(), [Place(), Place(), Place()]
    for n in range(REMEMBERED * 2):
        balance.choose(places, request(n)).alive += 1
    assert max(place.alive for place in places) - min(place.alive for place in places) <= 1
    assert len(balance._seen) == REMEMBERED
    short = Counter(id(balance.choose(places, request(7, length=4))) for _ in range(3))
    assert len(short) == 1
