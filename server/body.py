"""Reading a JSON body: content type, size, syntax, shape, in TGI's order and with its status codes and words.

Knows no route and no parameter; what a field means is `validate.py`'s.
"""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from aiohttp import HttpVersion11, web

from forerun.server.errors import ApiError, malformed

T = TypeVar("T")

BODY_SECONDS, SLOWEST_BYTES = 60.0, 16 << 10
"""A body may take that long, and a second more for so many bytes: a slow client is served, one that only holds a connection is not."""

_TOO_LARGE = "Failed to buffer the request body: length limit exceeded"
_SYNTAX = "Failed to parse the request body as JSON: "
_SHAPE = "Failed to deserialize the JSON body into the target type: "
_TRAILING = re.compile(r"JSON is malformed: trailing characters \(byte (\d+)\)")
_PATH = re.compile(r"(.*) - at `\$\.?(.*)`$", re.DOTALL)
_TYPE = re.compile(r"Expected `(.+)`, got `(.+)`")
_RANGE = re.compile(r"Expected `int` (<=|>=) (-?\d+)")
_SERDE_NAMES = {
    "int": "integer",
    "float": "floating point",
    "str": "string",
    "bool": "boolean",
    "array": "sequence",
    "object": "map",
    "null": "null",
}


async def read(http: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The decoded body. Raises ApiError: 415 wrong content type, 413 too large, 408 too slow, 400 not JSON or cut off, 422 wrong shape."""
    return decode(await read_bytes(http), decoder)


async def read_bytes(http: web.Request) -> bytes:
    if not _is_json(http.content_type):
        raise malformed(415, "Expected request with `Content-Type: application/json`")
    size = http.client_max_size if http.content_length is None else http.content_length
    if size > http.client_max_size:
        raise malformed(413, _TOO_LARGE)
    try:
        async with asyncio.timeout(BODY_SECONDS + size / SLOWEST_BYTES):
            await _invite(http)
            return await http.read()
    except TimeoutError:
        raise malformed(408, "Failed to buffer the request body: it takes too long") from None
    except web.HTTPRequestEntityTooLarge as error:
        raise malformed(413, _TOO_LARGE) from error
    except (web.RequestPayloadError, ConnectionError) as error:
        raise malformed(400, f"Failed to buffer the request body: {' '.join(str(error).split())}") from error


async def expected(http: web.Request) -> None:
    """Instead of the library's answer to `Expect`, which calls for every body before anybody looked at the head. Any other expectation
    than `100-continue` is ignored, as in TGI."""


async def _invite(http: web.Request) -> None:
    """A client that waits to be asked for its body is asked now: had it no key or too much to say, it has been told already."""
    if http.version >= HttpVersion11 and http.headers.get("expect", "").lower() == "100-continue":
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # the answer itself has not begun, so that it may still be an error


def decode(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _wrong_shape(error) from error
    except msgspec.DecodeError as error:
        trailing = _TRAILING.match(str(error))
        if trailing is None:
            raise malformed(400, _SYNTAX + str(error)) from error
        # TGI's parser stops at the end of the document and never looks at what follows (msgspec counts bytes from 1).
        return decode(raw[: int(trailing[1]) - 1], decoder)
    except RecursionError as error:
        raise malformed(400, _SYNTAX + "recursion limit exceeded") from error


def _is_json(content_type: str) -> bool:
    main, _, sub = content_type.partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


def _wrong_shape(error: msgspec.ValidationError) -> ApiError:
    located = _PATH.match(str(error))
    message, path = (located[1], located[2]) if located else (str(error), "")
    return malformed(422, _SHAPE + (f"{path}: " if path else "") + _serde_words(message))


def _serde_words(message: str) -> str:
    """msgspec's sentence in the words of TGI's parser, which users search for."""
    if message.startswith("Object missing required field"):
        return message.replace("Object missing required field", "missing field")
    if kinds := _TYPE.match(message):
        wanted = [_SERDE_NAMES.get(name, name) for name in kinds[1].split(" | ") if name != "null"]
        return f"invalid type: {_SERDE_NAMES.get(kinds[2], kinds[2])}, expected {' or '.join(wanted)}"
    if bound := _RANGE.match(message):
        return f"invalid value: integer out of range, expected {bound[1]} {bound[2]}"
    return message
