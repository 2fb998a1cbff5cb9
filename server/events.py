"""Streamed answers: each token becomes one server-sent event, written to the socket the moment it is known.

An `EventStream` is a TokenStream. The router calls it from its step loop; it encodes there and then, so that a token costs no task
switch. The handler's task sleeps meanwhile and wakes twice: for `first` (to send the status and headers, or the error that came
instead) and for `done`.

    tokens ─▶ pending ──outbox──▶ transport            a chunk of HTTP for each write:  1f\r\ndata: {…}\n\n\r\n

What is pending is written as soon as the loop has heard what had come from the worker. Usually that is one step. But when the front is
behind, it is several, and then each stream pays for one system call instead of one a token.

A client that stops reading is cut off when `BACKLOG_BYTES` wait for it, instead of filling the memory.
"""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from forerun.messages import SamplingParams
from forerun.router.request import Failure, Run
from forerun.server import errors
from forerun.server.answer import Form
from forerun.server.errors import ApiError
from forerun.server.pace import Pace
from forerun.server.schema import StreamDetails, StreamResponse
from forerun.server.transcript import Transcript

BACKLOG_BYTES = 4 << 20
KEEP_ALIVE_SECONDS = 15.0
"""No more than this passes without an event or else an empty comment, so that proxies do not close the connection."""

_log = structlog.get_logger("forerun.server")
_encode = msgspec.json.Encoder().encode


class Outbox:
    """Streams with something to write; they write it at the end of this turn of the loop."""

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._flush)
        self._streams.append(stream)

    def _flush(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            try:
                stream.flush()
            except Exception:
                _log.exception("A stream could not be written to")


class EventStream:
    """`chunked`: the response uses chunked transfer coding (HTTP/1.1)."""

    def __init__(self, transcript: Transcript, pace: Pace, params: SamplingParams, form: Form, outbox: Outbox, *, chunked: bool) -> None:
        self.transcript = transcript
        self.failure: ApiError | None = None
        self._pace = pace
        self._seed = params.seed if params.sample else None
        self._form = form
        self._outbox = outbox
        self._chunked = chunked
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = self._loop.create_future()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._pending: list[bytes] = []
        self._index = 0
        self._looked_at = 0
        """`_index` when the keep-alive looked last"""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def silent(self) -> bool:
        """Nothing has been said yet, so that a failure can still be an ordinary error response."""
        return self._index == 0

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

    def tokens(self, run: Run) -> bool:
        transcript = self.transcript
        said = transcript.extend(run)
        if not said:
            return False
        self._pace.tick(len(said), min(run.accepted, len(said)))
        finish = transcript.finish
        pending = self._pending or self._announced()
        for i, token in enumerate(said):
            self._index += 1
            event = StreamResponse(self._index, token)
            if run.top:
                event.top_tokens = transcript.alternatives(run.top[i])
            if finish and token is said[-1]:
                event.generated_text = self._form.prefix + transcript.text()
                event.details = self._details() if self._form.details else None
            pending.append(_encode(event))
        if finish:
            self._settle()
        return finish == "stop_sequence"

    def end(self, reason: str) -> None:
        if not self.done.done():
            self._fail(ApiError(500, "Incomplete generation stream", "incomplete_generation_stream", label="incomplete"))

    def fail(self, failure: Failure) -> None:
        if not self.done.done():
            self._fail(errors.failed(failure))

    def flush(self) -> None:
        """Write what is pending, as one chunk."""
        if self._pending and self._transport is not None:
            events = b"\n\ndata: ".join(self._pending)
            self._pending.clear()
            self._write(b"%x\r\ndata: %b\n\n\r\n" % (len(events) + 8, events) if self._chunked else b"data: %b\n\n" % events)

    def _details(self) -> StreamDetails:
        finish = self.transcript.finish
        assert finish is not None
        return StreamDetails(finish, self.transcript.generated, self._seed, self._form.input_length, self.transcript.speculation())

    def _fail(self, error: ApiError) -> None:
        self.failure = error
        if not self.silent or self._transport is not None:
            (self._pending or self._announced()).append(error.body())
        self._settle()

    def _settle(self) -> None:
        for future in (self.first, self.done):
            if not future.done():
                future.set_result(None)

    def _announced(self) -> list[bytes]:
        """`_pending`, empty, after telling whoever sends it that something comes."""
        if self._transport is not None:
            self._outbox.add(self)
        elif not self.first.done():
            self.first.set_result(None)
        return self._pending

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
        if self._index == self._looked_at:
            self._comment()
        self._looked_at = self._index
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS / 2, self._keep_alive)
