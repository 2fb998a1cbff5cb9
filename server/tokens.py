"""The answers of `/tokenize` and `/chat_tokenize`: a list of tokens that may be fifty times as long as its text.

Owns how such an answer is made without stopping the loop or filling the memory: it is encoded where the text is tokenized, and only so
many long ones are held until their clients have read them. Knows no body and no template.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

from forerun.server.text import SHORT_CHARS, Tokenizer

_encode = msgspec.json.Encoder().encode
_SLICE = 1024


class TokenLists:
    """`most`: long answers at a time."""

    def __init__(self, most: int) -> None:
        self._long = asyncio.Semaphore(most)

    async def answer(
        self, http: web.Request, tokenizer: Tokenizer, text: str, *, special: bool = True, before: bytes = b"", behind: bytes = b""
    ) -> web.Response:
        """The tokens' array between `before` and `behind`. `special`: whether special tokens are added."""

        def rendered(items: Iterator[Any]) -> bytes:
            return before + _array(items) + behind

        if len(text) <= SHORT_CHARS:
            return _json(await tokenizer.encode_offsets(text, rendered, special))
        async with self._long:
            response = _json(await tokenizer.encode_offsets(text, rendered, special))
            await response.prepare(http)
            await response.write_eof()
        return response


def _array(items: Iterator[Any]) -> bytes:
    """A JSON array, encoded a slice at a time, so that few of its items exist at once."""
    slices = iter(lambda: list(itertools.islice(items, _SLICE)), [])
    return b"[" + b",".join([_encode(part)[1:-1] for part in slices]) + b"]"


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
