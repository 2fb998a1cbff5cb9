"""The load generator against a scripted server: every API, both loops, every way to fail."""

from __future__ import annotations

import itertools
import math

import pytest

from forerun.bench.apis import APIS, Ask
from forerun.bench.http import Origin
from forerun.bench.load import Amount, Load, Target
from forerun.bench.records import Record, Shape
from tests.bench.fake import Fake, serving

STREAMED = [name for name, api in APIS.items() if api.streamed]


def load(fake: Fake, api: str, ask: Ask | None = None, timeout: float = 10) -> Load:
    prompts = (f"prompt {number}" for number in itertools.count())
    return Load(Target(Origin.parse(fake.url), APIS[api], {"Authorization": "Bearer k"}, timeout), ask or Ask(8), prompts)


async def run(fake: Fake, api: str, requests: int = 1, streams: int = 1, **more: float) -> list[Record]:
    async with serving(fake):
        return await load(fake, api, **more).run(Shape(streams=streams), Amount(requests=requests))


@pytest.mark.parametrize("api", STREAMED)
async def test_streams_are_counted_token_by_token(api: str) -> None:
    (record,) = await run(Fake(tokens=5, gap=0.01), api)
    assert record.error == ""
    assert len(record.arrivals) == 5
    assert all(gap > 0.005 for gap in record.gaps)
    assert record.due <= record.sent < record.arrivals[0] <= record.ended


async def test_a_server_that_counts_itself_is_believed() -> None:
    """A chunk may carry several tokens, or half a character: usage knows better than the number of chunks."""
    (record,) = await run(Fake(tokens=5), "openai")
    assert (len(record.arrivals), record.tokens) == (5, 6)


async def test_whole_answers() -> None:
    (record,) = await run(Fake(tokens=7), "tgi-whole")
    assert (record.error, record.tokens, record.arrivals) == ("", 7, [])


@pytest.mark.parametrize("api", STREAMED)
async def test_an_error_event_is_an_error(api: str) -> None:
    (record,) = await run(Fake(fail_at=3), api)
    assert "it broke" in record.error


@pytest.mark.parametrize("api", STREAMED)
async def test_a_lost_connection_is_an_error(api: str) -> None:
    (record,) = await run(Fake(cut=3), api)
    assert record.error.startswith("connection: ")
    assert record.ended > record.sent


@pytest.mark.parametrize("api", list(APIS))
async def test_refusals_are_counted_with_their_status_and_words(api: str) -> None:
    records = await run(Fake(refuse=2), api, requests=4)
    errors = [record.error for record in records]
    assert [bool(error) for error in errors] == [False, True, False, True]
    assert errors[1].startswith("HTTP 429") and "Model is overloaded" in errors[1]


async def test_a_stream_that_stops_early_is_an_error() -> None:
    async with serving(Fake(tokens=0)) as fake:
        (record,) = await load(fake, "tgi").run(Shape(streams=1), Amount(requests=1))
    assert record.error == "the stream ended without its last event"


async def test_a_request_that_takes_too_long_is_given_up() -> None:
    records = await run(Fake(gap=0.2), "tgi", requests=2, timeout=0.1)
    assert [record.error for record in records] == ["timeout", "timeout"]


async def test_nobody_listens() -> None:
    fake = Fake()
    async with serving(fake):
        pass
    (record,) = await load(fake, "tgi").run(Shape(streams=1), Amount(requests=1))
    assert record.error.startswith("connection: ")


async def test_a_closed_loop_keeps_its_streams_busy_and_no_more() -> None:
    fake = Fake(gap=0.01)
    records = await run(fake, "tgi", requests=12, streams=4)
    assert len(records) == len(fake.requests) == 12
    assert fake.most_running == 4
    assert len({request["inputs"] for request in fake.requests}) == 12


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    fake = Fake(gap=0.05)
    async with serving(fake):
        records = await load(fake, "tgi").run(Shape(rate=200), Amount(requests=20), seed=3)
    assert fake.most_running > 10
    dues = [record.due for record in records]
    assert dues == sorted(dues)
    assert all(record.sent >= record.due - 0.001 for record in records)


async def test_a_load_of_seconds_ends() -> None:
    async with serving(Fake(gap=0.005)) as fake:
        for shape in (Shape(streams=2), Shape(rate=100)):
            records = await load(fake, "tgi").run(shape, Amount(seconds=0.2))
            assert len(records) > 2
            assert max(record.due for record in records) - records[0].due <= 0.2


def test_an_endless_load_is_refused() -> None:
    with pytest.raises(ValueError, match="how much"):
        Amount()


@pytest.mark.parametrize("api", list(APIS))
async def test_what_is_asked_for_arrives(api: str) -> None:
    fake = Fake()
    await run(fake, api, ask=Ask(8, temperature=0.7, seed=5, extra={"speculate": 0}))
    body = fake.requests[0]
    inner = body.get("parameters", body)
    assert inner["temperature"] == 0.7
    assert (inner["seed"], inner["speculate"]) == (5, 0)
    assert 8 in (inner.get("max_new_tokens"), inner.get("max_tokens"), inner.get("n_predict"))
    assert fake.headers[0]["Authorization"] == "Bearer k"


async def test_greedy_is_asked_for_in_each_servers_way() -> None:
    fake = Fake()
    for api in APIS:
        await run(fake, api)
    for body in fake.requests:
        inner = body.get("parameters", body)
        assert inner.get("do_sample") is False or inner.get("temperature") == 0


def test_tgi_cannot_ignore_the_end_of_text() -> None:
    with pytest.raises(ValueError, match="--ignore-eos"):
        APIS["tgi"].body("x", Ask(1, ignore_eos=True))


async def test_a_loop_that_is_cut_ends_with_the_first_stream_that_finds_no_work() -> None:
    """Three streams share four requests: when one of the first three has ended and taken the fourth, the next to end finds none."""
    async with serving(Fake(tokens=5, gap=0.02)) as fake:
        records = await load(fake, "tgi").run(Shape(streams=3), Amount(requests=4, cut=True))
    assert len(records) == 4
    assert [record.error for record in records] == [""] * 4
    assert records[3].cut and not all(record.cut for record in records)
    assert records[3].tokens < 5
    assert fake.running == 0


async def test_first_answers_of_all_lengths_leave_streams_at_all_places_of_theirs() -> None:
    async with serving(Fake(tokens=3)) as fake:
        await load(fake, "tgi").run(Shape(streams=4), Amount(requests=8, staggered=True))
    most = [body["parameters"]["max_new_tokens"] for body in fake.requests]
    whole = max(most)
    assert sorted(most[:4]) == [math.ceil(whole * share / 4) for share in (1, 2, 3, 4)] and most[4:] == [whole] * 4


async def test_tokens_are_remembered_where_the_server_names_them() -> None:
    (record,) = await run(Fake(tokens=3), "tgi")
    assert record.ids == [1, 2, 3]
