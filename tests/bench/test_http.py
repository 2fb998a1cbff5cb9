"""The response parser under any cutting, and connections that are kept, closed and lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given

from forerun.bench.http import Connection, HttpError, Origin, ResponseParser
from tests.bench.cuts import cut, cuts

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: y\r\n\r\n5\r\nhello\r\n6;note=1\r\n world\r\n0\r\nTrailer: 1\r\n\r\n"
SIZED = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 11\r\nConnection: close\r\n\r\nhello world"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\nhello world"
OPEN_ENDED = b"HTTP/1.0 200 OK\r\n\r\nhello world"


def parse(pieces: list[bytes]) -> tuple[ResponseParser, bytes]:
    body: list[bytes] = []
    parser = ResponseParser(body.append)
    for piece in pieces:
        parser.feed(piece)
    return parser, b"".join(body)


@pytest.mark.parametrize(("stream", "status", "kept"), [(CHUNKED, 200, True), (SIZED, 429, False), (CONTINUED, 200, True)])
def test_framing(stream: bytes, status: int, kept: bool) -> None:
    @given(cuts(stream))
    def any_cutting(places: list[int]) -> None:
        parser, body = parse(cut(stream, places))
        assert (parser.complete, parser.status, parser.keep_alive, body) == (True, status, kept, b"hello world")

    any_cutting()


@given(cuts(OPEN_ENDED))
def test_a_body_without_length_ends_with_the_connection(places: list[int]) -> None:
    parser, body = parse(cut(OPEN_ENDED, places))
    assert not parser.complete
    parser.end()
    assert (parser.complete, parser.keep_alive, body) == (True, False, b"hello world")


@pytest.mark.parametrize("length", range(len(CHUNKED)))
def test_a_response_cut_short_is_an_error(length: int) -> None:
    parser, _ = parse([CHUNKED[:length]] if length else [])
    with pytest.raises(HttpError, match="before the response was complete") as caught:
        parser.end()
    assert caught.value.fresh == (length == 0)


@pytest.mark.parametrize("stream", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 OK\r\n\r\n", CHUNKED.replace(b"5\r\nhello", b"zz\r\nhello")])
def test_nonsense_is_an_error(stream: bytes) -> None:
    with pytest.raises(HttpError):
        parse([stream])


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://localhost:8080", Origin("localhost", 8080, False, "")),
        ("localhost:8080", Origin("localhost", 8080, False, "")),
        ("https://example.org/api/", Origin("example.org", 443, True, "/api")),
    ],
)
def test_origins(url: str, origin: Origin) -> None:
    assert Origin.parse(url) == origin


@pytest.mark.parametrize("url", ["ftp://x", "http://", ""])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        Origin.parse(url)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def serving(handler: Handler) -> tuple[asyncio.Server, Connection]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    return server, Connection(Origin("127.0.0.1", server.sockets[0].getsockname()[1], False, ""))


async def read_request(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def ask(connection: Connection) -> int:
    return await connection.exchange("GET", "/", b"", lambda data: None)


async def test_a_connection_is_kept() -> None:
    opened = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        for _ in range(3):
            await read_request(reader)
            writer.write(ANSWER)
        writer.close()

    server, connection = await serving(handle)
    assert [await ask(connection) for _ in range(3)] == [200] * 3
    assert opened == 1
    connection.close()
    server.close()


async def test_a_kept_connection_that_the_server_closed_is_opened_again() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(ANSWER)
        await read_request(reader)
        writer.close()

    server, connection = await serving(handle)
    assert [await ask(connection) for _ in range(4)] == [200] * 4
    connection.close()
    server.close()


async def test_a_server_that_hangs_up_is_an_error_not_a_loop() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.close()

    server, connection = await serving(handle)
    with pytest.raises(HttpError):
        await ask(connection)
    server.close()


async def test_an_exchange_that_is_cancelled_closes_its_connection() -> None:
    """Else the answer to the abandoned request would be taken for that of the next one."""
    closed = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await reader.read()
        closed.set()
        writer.close()

    server, connection = await serving(handle)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(connection), 0.05)
    await asyncio.wait_for(closed.wait(), 5)
    server.close()
