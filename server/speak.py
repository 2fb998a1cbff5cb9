"""Sending a stream of events as the answer to a request: status and headers once there is something to send, or the error instead."""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

from forerun.server.events import KEEP_ALIVE_SECONDS, Channel

_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


def chunked(http: web.Request) -> bool:
    """Whether the client understands chunks; for others the end of the connection is the end of the stream."""
    return http.version >= HttpVersion11


async def speak(http: web.Request, channel: Channel, headers: dict[str, str]) -> web.StreamResponse:
    """Returns when all is said. Raises ApiError when the request failed before its first event."""
    await asyncio.wait((channel.first,), timeout=KEEP_ALIVE_SECONDS)
    if channel.failure and channel.silent:
        raise channel.failure
    response = web.StreamResponse(headers=_HEADERS | headers)
    if chunked(http):
        response.enable_chunked_encoding()
    await response.prepare(http)
    if http.transport is None:
        raise ConnectionResetError("the client left")
    channel.open(http.transport)
    await channel.done
    return response
