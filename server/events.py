"""Streamed answers: each token becomes one server-sent event, written to the socket the moment it is known.

An `EventStream` is a TokenStream. The router calls it from its step loop; it encodes and writes there and then, so that a token costs no
task switch. The handler's task sleeps meanwhile and wakes twice: for `first` (to send the status and headers, or the error that came
instead) and for `done`.

    tokens ─▶ pending ──open──▶ transport            a chunk of HTTP for each event:  1f\r\ndata: {…}\n\n\r\n

A client that stops reading is cut off when `BACKLOG_BYTES` wait for it, instead of filling the memory.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from forerun.messages import SamplingParams
from forerun.router.request import Failure, Run
from forerun.server import errors
from forerun.server.answer import Form
from forerun.server.errors import ApiError
from forerun.server.pace import Pace
from forerun.server.schema import StreamDetails, StreamResponse, Token
from forerun.server.transcript import Transcript

BACKLOG_BYTES = 4 << 20
KEEP_ALIVE_SECONDS = 15.0
"""After so long without an event an empty comment is sent, so that proxies do not close the connection."""

_encode = msgspec.json.Encoder().encode


class EventStream:
    """`chunked`: the response uses chunked transfer coding (HTTP/1.1)."""

    def __init__(self, transcript: Transcript, pace: Pace, params: SamplingParams, form: Form, *, chunked: bool) -> None:
        self.transcript = transcript
        self.failure: ApiError | None = None
        self._pace = pace
        self._seed = params.seed if params.sample else None
        self._form = form
        self._chunked = chunked
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = self._loop.create_future()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._pending: list[bytes] = []
        self._index = 0
        self._wrote_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def silent(self) -> bool:
        """Nothing has been said yet, so that a failure can still be an ordinary error response."""
        return self._index == 0

    def open(self, transport: asyncio.Transport) -> None:
        """Status and headers are out: send what is waiting and go on directly."""
        self._transport = transport
        waiting, self._pending = self._pending, []
        self._write(b"".join(waiting) or self._comment())
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._keep_alive)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def tokens(self, run: Run) -> bool:
        transcript = self.transcript
        said = transcript.extend(run)
        if not said:
            return False
        self._pace.tick(len(said), run.accepted)
        last = len(said) - 1 if transcript.finish else -1
        self._write(b"".join([self._event(token, run.top[i] if run.top else None, i == last) for i, token in enumerate(said)]))
        if transcript.finish:
            self._settle()
            return transcript.finish == "stop_sequence"
        return self._transport is not None and self._transport.is_closing()

    def end(self, reason: str) -> None:
        if not self.done.done():
            self._fail(ApiError(500, "Incomplete generation stream", "incomplete_generation_stream", label="incomplete"))

    def fail(self, failure: Failure) -> None:
        if not self.done.done():
            self._fail(errors.failed(failure))

    def _event(self, token: Token, top: list[tuple[int, float]] | None, last: bool) -> bytes:
        self._index += 1
        event = StreamResponse(self._index, token)
        if top:
            event.top_tokens = self.transcript.alternatives(top)
        if last:
            event.generated_text = self._form.prefix + self.transcript.text()
            event.details = self._details() if self._form.details else None
        return self._data(_encode(event))

    def _details(self) -> StreamDetails:
        finish = self.transcript.finish
        assert finish is not None
        return StreamDetails(finish, self.transcript.generated, self._seed, self._form.input_length, self.transcript.speculation())

    def _fail(self, error: ApiError) -> None:
        self.failure = error
        if not self.silent or self._transport is not None:
            self._write(self._data(error.body()))
        self._settle()

    def _settle(self) -> None:
        for future in (self.first, self.done):
            if not future.done():
                future.set_result(None)

    def _data(self, json: bytes) -> bytes:
        """An event; its chunk holds eight bytes more than the JSON."""
        return b"%x\r\ndata: %b\n\n\r\n" % (len(json) + 8, json) if self._chunked else b"data: %b\n\n" % json

    def _comment(self) -> bytes:
        return b"3\r\n:\n\n\r\n" if self._chunked else b":\n\n"

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None:
            self._pending.append(data)
            if not self.first.done():
                self.first.set_result(None)
            return
        if transport.is_closing():
            return
        transport.write(data)
        self._wrote_at = time.monotonic()
        if transport.get_write_buffer_size() > BACKLOG_BYTES:
            transport.abort()

    def _keep_alive(self) -> None:
        """One timer a stream, moved on lazily: an event only notes when it was written."""
        idle = time.monotonic() - self._wrote_at
        if idle >= KEEP_ALIVE_SECONDS:
            self._write(self._comment())
            idle = 0.0
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS - idle, self._keep_alive)
