"""Connections that say nothing, or too slowly: they are ended, and nobody else is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from forerun.server import app, body
from tests.server.front import Front, parse, serve

PATIENCE = 0.5
"""seconds, instead of a minute and more"""
SAID = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 3}}).encode()
HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(SAID)


@pytest.fixture
async def impatient(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    monkeypatch.setattr(app, "KEEP_ALIVE_SECONDS", PATIENCE)
    monkeypatch.setattr(body, "BODY_SECONDS", PATIENCE)
    async with serve(step_seconds=0.01) as front:
        yield front


async def end(reader: asyncio.StreamReader) -> bytes:
    """What comes up to the end, which the server makes."""
    async with asyncio.timeout(30):
        return await reader.read()


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Now and then a byte, more often than anybody's patience for silence."""
    for at in range(len(data)):
        writer.write(data[at : at + 1])
        await asyncio.sleep(PATIENCE / 5)


@pytest.mark.parametrize("said", [b"", b"GET", HEAD[:40], b"\r\n"])
async def test_whoever_sends_no_request_is_cut_off(impatient: Front, said: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient.port)
    writer.write(said)
    assert await end(reader) == b""
    writer.close()


async def test_a_head_that_comes_by_the_byte_is_cut_off(impatient: Front) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient.port)
    dripping = asyncio.create_task(drip(writer, HEAD))
    assert await end(reader) == b""
    assert not dripping.done(), "long before it was whole"
    dripping.cancel()
    writer.close()


@pytest.mark.parametrize("head", [HEAD, HEAD.replace(b"Content-Length: %d" % len(SAID), b"Transfer-Encoding: chunked")])
async def test_a_body_that_comes_by_the_byte_is_told_so(impatient: Front, head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "SLOWEST_BYTES", 1 << 40)
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient.port)
    writer.write(head)
    dripping = asyncio.create_task(drip(writer, SAID if head is HEAD else b"100000\r\n" + b" " * 1000))
    status, _, rest = (await reader.readuntil(b"}")).partition(b"\r\n")
    assert status.startswith(b"HTTP/1.1 408")
    assert json.loads(rest.partition(b"\r\n\r\n")[2]) == {
        "error": "Failed to buffer the request body: it takes too long",
        "error_type": "validation",
    }
    dripping.cancel()
    writer.close()
    await impatient.settled()


async def test_a_larger_body_may_take_longer(impatient: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "SLOWEST_BYTES", 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", impatient.port)
    writer.write(HEAD + SAID[:-1])
    await asyncio.sleep(2 * PATIENCE)
    writer.write(SAID[-1:])
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_client_that_closes_its_half_is_let_go(impatient: Front) -> None:
    for said in (b"", HEAD[:40], HEAD, HEAD + SAID[:5]):
        reader, writer = await asyncio.open_connection("127.0.0.1", impatient.port)
        writer.write(said)
        writer.write_eof()
        await end(reader)
        writer.close()
    await impatient.settled()


async def test_streams_outlast_every_patience(impatient: Front) -> None:
    count = 3 * round(PATIENCE / 0.01)
    _, raw = await impatient.raw("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": count}})
    events = parse(raw)
    assert len(events) > count // 2 and "error" not in events[-1] and events[-1]["generated_text"] is not None
