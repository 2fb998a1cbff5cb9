"""Streams: bytes on the wire, errors before and after the first of them, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.messages import SamplingParams
from forerun.router.request import Failure, Run
from forerun.server import events
from forerun.server.answer import Form
from forerun.server.metrics import Metrics
from forerun.server.pace import Pace
from forerun.server.transcript import Transcript
from forerun.server.voice import NativeVoice
from tests.server.front import LIMITS, byte_level, parse, runs, serve, stuck, until
from tests.server.test_native import PROMPT, expected, ids

ROUTES = [("/generate_stream", {}), ("/", {"stream": True}), ("/invocations", {"stream": True})]


def text_of(said: list[Any]) -> str:
    return "".join(event["token"]["text"] for event in said if not event["token"]["special"])


async def test_golden_bytes() -> None:
    eos = byte_level().eos_ids[0]
    hello, the = ids("hello")[0], ids(" the")[0]
    async with serve(script=runs([hello, the], [eos])) as front:
        body = {"inputs": "x", "parameters": {"details": True, "return_full_text": True}}
        response, raw = await front.raw("/generate_stream", body)
        assert raw.decode() == (
            f'data: {{"index":1,"token":{{"id":{hello},"text":"hello","logprob":-0.5,"special":false}},'
            '"generated_text":null,"details":null}\n\n'
            f'data: {{"index":2,"token":{{"id":{the},"text":" the","logprob":-0.5,"special":false}},'
            '"generated_text":null,"details":null}\n\n'
            f'data: {{"index":3,"token":{{"id":{eos},"text":"</s>","logprob":-0.5,"special":true}},'
            '"generated_text":"xhello the","details":{"finish_reason":"eos_token","generated_tokens":3,"seed":null,"input_length":1,'
            '"speculation":{"drafted":3,"accepted":1,"steps":2}}}\n\n'
        )
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["transfer-encoding"] == "chunked"
        assert response.headers["x-compute-characters"] == "1"


@pytest.mark.parametrize(("path", "more"), ROUTES)
async def test_stream_says_what_the_whole_answer_says(path: str, more: dict[str, Any]) -> None:
    async with serve() as front:
        parameters = {"max_new_tokens": 30, "return_full_text": False}
        said = await front.events(path, {"inputs": PROMPT, "parameters": parameters, **more})
        assert [event["index"] for event in said] == list(range(1, 31))
        assert [event["generated_text"] for event in said] == [None] * 29 + [expected(PROMPT, 30)]
        assert all(event["details"] is None for event in said)
        assert text_of(said) == expected(PROMPT, 30)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_pieces_are_the_text_for_any_tokens_steps_and_stops(data: st.DataObject) -> None:
    """Broken characters, special tokens, several tokens a step, a stop anywhere: stream and whole answer agree, piece by piece."""
    tokenizer = byte_level()
    said = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=25))
    steps = data.draw(st.lists(st.integers(1, 4), min_size=len(said), max_size=len(said)))
    cut: list[list[int]] = []
    rest = said
    for step in steps:
        cut, rest = [*cut, rest[:step]], rest[step:]
    text = tokenizer.decode(said)
    start = data.draw(st.integers(0, len(text)))
    stop = [text[start : start + 3]] if text[start : start + 3] and data.draw(st.booleans()) else []

    async def check() -> None:
        async with serve(script=runs(*(step for step in cut if step))) as front:
            parameters = {"max_new_tokens": len(said), "stop": stop, "details": True}
            body = {"inputs": "x", "parameters": parameters}
            streamed = await front.events("/generate_stream", body)
            _, whole = await front.post("/generate", body)
            assert text_of(streamed) == whole["generated_text"] == streamed[-1]["generated_text"]
            assert [event["token"] for event in streamed] == whole["details"]["tokens"]
            assert streamed[-1]["details"]["finish_reason"] == whole["details"]["finish_reason"]
            assert text.startswith(whole["generated_text"])
            if stop and stop[0] in text and whole["details"]["finish_reason"] == "stop_sequence":
                assert whole["generated_text"].endswith(stop[0]) or "<" in stop[0]

    asyncio.run(check())


@pytest.mark.parametrize(("path", "more"), ROUTES)
async def test_refusals_have_their_own_status(path: str, more: dict[str, Any]) -> None:
    async with serve() as front:
        for parameters, words in [
            ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported when streaming tokens"),
            ({"best_of": 0}, "`best_of` != 1 is not supported when streaming tokens"),
            ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
            ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
            ({"max_new_tokens": 1000}, "must be <= 256"),
        ]:
            status, error = await front.post(path, {"inputs": "x", "parameters": parameters, **more})
            assert (status, error["error_type"]) == (422, "validation")
            assert words in error["error"]
        front.router.inside = 8
        async with front.session.post(front.url + path, json={"inputs": "x", **more}) as response:
            assert response.status == 429
            assert response.headers["retry-after"] == "1"
            assert await response.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        front.router.inside = 0


@pytest.mark.parametrize(("path", "more"), ROUTES)
async def test_failure_before_the_first_token_is_a_status(path: str, more: dict[str, Any]) -> None:
    failure = Failure("Request failed during generation: no", "generation", 424)
    async with serve(script=runs(failure=failure)) as front:
        assert await front.post(path, {"inputs": "x", **more}) == (424, {"error": failure.message, "error_type": "generation"})
        await front.settled()


@pytest.mark.parametrize(("path", "more"), ROUTES)
async def test_failure_behind_it_is_the_last_event(path: str, more: dict[str, Any]) -> None:
    failure = Failure("Request failed during generation: no", "generation", 424)
    async with serve(script=runs([1], [2], failure=failure)) as front:
        *said, last = await front.events(path, {"inputs": "x", **more})
        assert len(said) == 2
        assert last == {"error": failure.message, "error_type": "generation"}
        assert 'tgi_request_failure{err="generation"} 1' in front.services.metrics.text()
        await front.settled()


async def test_an_end_nobody_announced_is_an_incomplete_stream() -> None:
    async with serve() as front:

        def script(sequence: Any) -> Any:
            yield from runs([1])(sequence)
            sequence.stream.end("length")

        front.router.script = script
        *_, last = await front.events("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 9}})
        assert last == {"error": "Incomplete generation stream", "error_type": "incomplete_generation_stream"}
        status, error = await front.post("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 9}})
        assert (status, error["error_type"]) == (500, "incomplete_generation")


class Wire:
    """A transport that keeps what is written to it."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.writes: list[bytes] = []
        self.fault = fault

    def write(self, data: bytes) -> None:
        if self.fault:
            raise self.fault
        self.writes.append(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


def opened(wire: Wire, outbox: events.Outbox, chunked: bool) -> tuple[events.EventStream, events.Channel]:
    tokenizer = byte_level()
    params = SamplingParams(1, 1, 1000)
    transcript = Transcript(tokenizer, tokenizer.detokenizer([1]), None, params)
    voice = NativeVoice(Form("", False, False, 1), params)
    channel = events.Channel(voice, outbox, chunked=chunked)
    channel.open(wire)  # type: ignore[arg-type]
    wire.writes.clear()
    return events.EventStream(transcript, Pace(Metrics().requests, 0.0), voice, channel), channel


@pytest.mark.parametrize("chunked", [True, False])
async def test_what_several_steps_bring_in_one_turn_leaves_in_one_write(chunked: bool) -> None:
    outbox, wires = events.Outbox(), [Wire(), Wire()]
    streams = [opened(wire, outbox, chunked) for wire in wires]
    for turn in range(3):
        for step in range(turn + 1):
            for stream, _ in streams:
                stream.tokens(Run([65 + step], [-0.5], [], []))
        assert all(len(wire.writes) == turn for wire in wires)
        await asyncio.sleep(0)
        assert all(len(wire.writes) == turn + 1 for wire in wires)
    streams[0][0].tokens(Run([65], [-0.5], [], []))
    streams[0][1].close()
    assert [len(wire.writes) for wire in wires] == [4, 3]
    for wire, count in zip(wires, (7, 6), strict=True):
        body = b"".join(unchunked(data) if chunked else data for data in wire.writes)
        assert [event["index"] for event in parse(body)] == list(range(1, count + 1))
    streams[1][1].close()


def unchunked(data: bytes) -> bytes:
    """The content of what is exactly one chunk."""
    size, _, rest = data.partition(b"\r\n")
    assert rest.endswith(b"\r\n") and len(rest) == int(size, 16) + 2
    return rest[:-2]


async def test_a_stream_that_cannot_be_written_to_does_not_keep_the_others_waiting() -> None:
    outbox, broken, sound = events.Outbox(), Wire(), Wire()
    streams = [opened(wire, outbox, True) for wire in (broken, sound)]
    broken.fault = RuntimeError("the handler is closed")
    for turn in range(2):
        for stream, _ in streams:
            stream.tokens(Run([65], [-0.5], [], []))
        await asyncio.sleep(0)
        assert len(sound.writes) == turn + 1
    for _, channel in streams:
        channel.close()


async def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr("forerun.server.speak.KEEP_ALIVE_SECONDS", 0.05)
    async with serve(script=runs([1], [2]), step_seconds=0.3) as front:
        _, raw = await front.raw("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 2}})
        before, between, behind = raw.split(b"data: ")
        assert before.count(b":\n\n") >= 3 and before.strip(b":\n") == b""
        assert between.count(b"\n\n:\n\n") >= 1
        assert b":\n\n" not in behind.replace(b'":', b"")
        assert len(parse(raw)) == 2


async def test_failure_behind_a_comment_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.server.speak.KEEP_ALIVE_SECONDS", 0.02)
    async with serve(script=runs(failure=Failure("late", "overloaded", 429)), step_seconds=0.1) as front:
        script = front.router.script
        front.router.script = lambda sequence: (said for part in (runs([])(sequence), script(sequence)) for said in part)
        assert await front.events("/generate_stream", {"inputs": "x"}) == [{"error": "late", "error_type": "overloaded"}]


async def drop(front: Any, path: str, body: dict[str, Any], after: int) -> None:
    """Post over a bare socket, read `after` events, and leave."""
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    for _ in range(after):
        await reader.readuntil(b"data: ")
    if not after:
        await until(lambda: front.router.running > 0)
    writer.transport.abort()


@pytest.mark.parametrize(
    ("path", "body", "after"),
    [
        ("/generate_stream", {"inputs": "x"}, 3),
        ("/generate_stream", {"inputs": "x"}, 0),
        ("/", {"inputs": "x", "stream": True}, 1),
        ("/generate", {"inputs": "x"}, 0),
        ("/generate", {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}}, 0),
        ("/", {"inputs": "x"}, 0),
    ],
)
async def test_a_client_that_leaves_frees_its_place(path: str, body: dict[str, Any], after: int) -> None:
    async with serve(step_seconds=0.01) as front:
        for _ in range(10):
            await drop(front, path, body, after)
            await front.settled()
        assert {id(sequence) for sequence in front.router.cancelled} == {id(sequence) for sequence in front.router.submitted}
        assert 'tgi_request_failure{err="dropped"} 10' in front.services.metrics.text()
        status, _ = await front.post("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1}})
        assert status == 200


async def test_a_client_that_leaves_while_nothing_comes() -> None:
    async with serve(script=stuck, step_seconds=0.01) as front:
        await drop(front, "/generate_stream", {"inputs": "x"}, 0)
        await front.settled()


async def test_half_the_clients_leaving_does_not_disturb_the_others() -> None:
    async with serve(step_seconds=0.002) as front:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 20}}
        dropped = [drop(front, "/generate_stream", body, after) for after in (1, 2, 5)]
        said, *_ = await asyncio.gather(front.events("/generate_stream", body), *dropped)
        assert said[-1]["generated_text"] == expected(PROMPT, 20)
        await front.settled()


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "BACKLOG_BYTES", 100_000)
    async with serve(script=runs(*[[1] * 200] * 10_000)) as front:
        front.router.limits = dataclasses.replace(LIMITS, max_total_tokens=10_000_000)
        host, port = front.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1000)
        writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()
        raw = json.dumps({"inputs": "x"}).encode()
        writer.write(
            f"POST /generate_stream HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        await until(lambda: bool(front.router.cancelled))
        await front.settled()
        writer.transport.abort()


async def test_http_1_0_gets_the_events_without_chunks() -> None:
    async with serve(script=runs([1], [2])) as front:
        host, port = front.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        raw = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 2}}).encode()
        writer.write(
            f"POST /generate_stream HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        )
        answer = await reader.read()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"200 OK" in head and b"chunked" not in head.lower()
        assert len(parse(body)) == 2
        writer.close()


GUESSED = [(1, False), (2, True), (2, True), (2, False), (3, True), (3, True)]
"""step and whether it was guessed, of six of the tokens below: `runs` says that all but the last of a step were guesses that held"""


def origins(told: list[dict[str, Any]]) -> list[tuple[int, bool]]:
    return [(origin["step"], origin["guessed"]) for origin in told]


async def test_who_asks_is_told_how_each_token_came() -> None:
    async with serve(script=runs([5], [6, 7, 8], [9, 10, 11])) as front:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 6, "details": True, "origins": True}}
        assert origins([event["origin"] for event in await front.events("/generate_stream", body)]) == GUESSED
        _, whole = await front.post("/generate", body)
        assert origins(whole["details"]["origins"]) == GUESSED
        assert whole["details"]["speculation"]["steps"] == GUESSED[-1][0]


async def test_who_does_not_ask_sees_nothing_of_it() -> None:
    async with serve(script=runs([5], [6, 7, 8])) as front:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 4, "details": True}}
        assert b"origin" not in (await front.raw("/generate_stream", body))[1]
        assert b"origin" not in (await front.raw("/generate", body))[1]
