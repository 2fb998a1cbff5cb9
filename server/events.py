"""Streamed answers: each token becomes a server-sent event, written to the socket the moment it is known.

A `Channel` is the socket's side of one response; an `EventStream` is the TokenStream of one sequence that speaks through it (`/v1` has
several of them on one channel), in the words of its `Voice`. The router calls the stream from its step loop; it encodes there and then,
so that a token costs no task switch. The handler's task sleeps meanwhile and wakes twice: for `first` (to send the status and headers,
or the error that came instead) and for `done`.

    tokens ─▶ voice ─▶ pending ──outbox──▶ transport            a chunk of HTTP for each write:  1f\r\ndata: {…}\n\n\r\n

What is pending is written as soon as the loop has heard what had come from the worker. Usually that is one step. But when the front is
behind, it is several, and then each stream pays for one system call instead of one a token.

A client that stops reading is cut off when `BACKLOG_BYTES` wait for it, instead of filling the memory.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from forerun.router.request import Failure, Run
from forerun.server import errors
from forerun.server.errors import ApiError
from forerun.server.pace import Pace
from forerun.server.schema import Token
from forerun.server.transcript import Transcript

BACKLOG_BYTES = 4 << 20
KEEP_ALIVE_SECONDS = 15.0
"""No more than this passes without an event or else an empty comment, so that proxies do not close the connection."""

_log = structlog.get_logger("forerun.server")


class Voice(Protocol):
    """What a sequence's tokens are on the wire."""

    def say(self, said: list[Token], run: Run, transcript: Transcript) -> list[bytes]:
        """One JSON object for each event. `transcript` has these tokens already; its `finish` says whether they are the last."""
        ...


class Ending(Protocol):
    """What a stream says besides its tokens."""

    def error(self, error: ApiError) -> list[bytes]: ...
    def closing(self) -> list[bytes]:
        """When all of its sequences have ended well."""
        ...


class Outbox:
    """Channels with something to write; they write it at the end of this turn of the loop."""

    def __init__(self) -> None:
        self._channels: list[Channel] = []

    def add(self, channel: Channel) -> None:
        if not self._channels:
            asyncio.get_running_loop().call_soon(self._flush)
        self._channels.append(channel)

    def _flush(self) -> None:
        channels, self._channels = self._channels, []
        for channel in channels:
            try:
                channel.flush()
            except Exception:
                _log.exception("A stream could not be written to")


class Channel:
    """`sequences`: how many speak through it. `chunked`: the response uses chunked transfer coding (HTTP/1.1)."""

    def __init__(self, ending: Ending, outbox: Outbox, *, sequences: int = 1, chunked: bool) -> None:
        self.failure: ApiError | None = None
        self.silent = True
        """Nothing has been said yet, so that a failure can still be an ordinary error response."""
        self._ending = ending
        self._outbox = outbox
        self._speaking = sequences
        self._chunked = chunked
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = self._loop.create_future()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._pending: list[bytes] = []
        self._quiet = True
        """nothing was sent since the keep-alive looked last"""
        self._timer: asyncio.TimerHandle | None = None

    def open(self, transport: asyncio.Transport) -> None:
        """Status and headers are out: send what is waiting and go on directly."""
        self._transport = transport
        if self._pending:
            self.flush()
        else:
            self._comment()
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS / 2, self._keep_alive)

    def close(self) -> None:
        self.flush()
        if self._timer is not None:
            self._timer.cancel()

    def send(self, events: list[bytes]) -> None:
        """Nothing goes behind the last word, which may be the failure of another sequence."""
        if self.done.done():
            return
        self.silent = self._quiet = False
        if self._pending:
            self._pending += events
        else:
            self._pending = events
            self._announce()

    def ended(self) -> None:
        """One of the sequences has said all."""
        self._speaking -= 1
        if not self._speaking and not self.done.done():
            if closing := self._ending.closing():
                self.send(closing)
            self._settle()

    def fail(self, error: ApiError) -> None:
        """One of the sequences cannot go on: neither does the response."""
        if self.done.done():
            return
        self.failure = error
        if not self.silent or self._transport is not None:
            self.send(self._ending.error(error))
        self._settle()

    def flush(self) -> None:
        """Write what is pending, as one chunk."""
        if self._pending and self._transport is not None:
            events = b"\n\ndata: ".join(self._pending)
            self._pending = []
            self._write(b"%x\r\ndata: %b\n\n\r\n" % (len(events) + 8, events) if self._chunked else b"data: %b\n\n" % events)

    def _settle(self) -> None:
        for future in (self.first, self.done):
            if not future.done():
                future.set_result(None)

    def _announce(self) -> None:
        """Tell whoever sends what is pending that there is something."""
        if self._transport is not None:
            self._outbox.add(self)
        elif not self.first.done():
            self.first.set_result(None)

    def _comment(self) -> None:
        self._write(b"3\r\n:\n\n\r\n" if self._chunked else b":\n\n")

    def _write(self, data: bytes) -> None:
        transport = self._transport
        assert transport is not None
        if transport.is_closing():
            return
        transport.write(data)
        if transport.get_write_buffer_size() > BACKLOG_BYTES:
            transport.abort()

    def _keep_alive(self) -> None:
        if self._quiet:
            self._comment()
        self._quiet = True
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS / 2, self._keep_alive)


class EventStream:
    """One sequence, spoken through a channel."""

    def __init__(self, transcript: Transcript, pace: Pace, voice: Voice, channel: Channel) -> None:
        self.transcript = transcript
        self._pace = pace
        self._voice = voice
        self._channel = channel

    def tokens(self, run: Run) -> bool:
        transcript = self.transcript
        said = transcript.extend(run)
        if not said:
            return False
        self._pace.tick(len(said), min(run.accepted, len(said)))
        if events := self._voice.say(said, run, transcript):
            self._channel.send(events)
        finish = transcript.finish
        if finish:
            self._channel.ended()
        return finish == "stop_sequence"

    def end(self, reason: str) -> None:
        if not self.transcript.finish:
            self._channel.fail(ApiError(500, "Incomplete generation stream", "incomplete_generation_stream", label="incomplete"))

    def fail(self, failure: Failure) -> None:
        if not self.transcript.finish:
            self._channel.fail(errors.failed(failure))
