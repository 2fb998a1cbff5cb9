"""The load generator: sends requests to one server, closed loop or open loop, and records what came back when.

Owns connections and clocks. Knows neither the servers' JSON (`apis`) nor statistics (`records`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator

import msgspec

from forerun.bench.apis import Api, Ask
from forerun.bench.arrivals import arrivals
from forerun.bench.errors import BenchError
from forerun.bench.http import Connection, Origin
from forerun.bench.records import Record, Shape
from forerun.bench.sse import EventParser


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """`timeout`: seconds that a request may take in all before it is given up."""

    origin: Origin
    api: Api
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    timeout: float = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Amount:
    """When to stop sending: after so many requests, or so many seconds (0 = no such limit; one of them must be set). `cut`: a closed loop
    ends when one of its streams finds no more work; the others hang up, and their records say so. `staggered`: the first answers of a
    closed loop may have ever more tokens from stream to stream, so that the streams are at all places of their answers from then on."""

    requests: int = 0
    seconds: float = 0.0
    cut: bool = False
    staggered: bool = False

    def __post_init__(self) -> None:
        if self.requests <= 0 and self.seconds <= 0:
            raise ValueError("say how much to send: a number of requests or of seconds")


class Load:
    """Runs loads against one target. `prompts` is drawn from for every request; each body is made before its clock starts. `clock`: what
    records go by, in seconds."""

    def __init__(
        self,
        target: Target,
        ask: Ask,
        prompts: Iterator[str],
        progress: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        self._ask = ask
        self._prompts = prompts
        self._progress = progress
        self._clock = clock
        self._encode = msgspec.json.Encoder().encode
        self._running = 0

    async def run(self, shape: Shape, amount: Amount, seed: int = 0) -> list[Record]:
        """One record for each request sent, in the order they were due."""
        records: list[Record] = []
        watch = asyncio.create_task(self._watch(shape, records))
        try:
            if shape.streams:
                await self._closed(shape.streams, amount, records)
            else:
                await self._open(shape, amount, seed, records)
        finally:
            watch.cancel()
        return records

    async def _closed(self, streams: int, amount: Amount, records: list[Record]) -> None:
        count = itertools.count()
        start = self._clock()

        async def client(place: int) -> None:
            connection = self._connection()
            share = (place + 1) / streams if amount.staggered else 1.0
            while self._more(amount, next(count), self._clock() - start):
                body, share = self._body(share), 1.0
                record = Record(due=self._clock())
                records.append(record)
                await self._send(connection, body, record)
            connection.close()

        clients = [asyncio.create_task(client(place)) for place in range(streams)]
        try:
            await asyncio.wait(clients, return_when=asyncio.FIRST_COMPLETED if amount.cut else asyncio.FIRST_EXCEPTION)
        finally:
            for one in clients:
                one.cancel()
        for ended in await asyncio.gather(*clients, return_exceptions=True):
            if ended is not None and not isinstance(ended, asyncio.CancelledError):
                raise ended

    async def _open(self, shape: Shape, amount: Amount, seed: int, records: list[Record]) -> None:
        idle: list[Connection] = []
        start = self._clock()

        async def one(record: Record, body: bytes) -> None:
            connection = idle.pop() if idle else self._connection()
            await self._send(connection, body, record)
            idle.append(connection)

        async with asyncio.TaskGroup() as group:
            for number, offset in enumerate(arrivals(shape.rate, shape.burstiness, seed)):
                if not self._more(amount, number, offset):
                    break
                body = self._body()
                await asyncio.sleep(max(0.0, start + offset - self._clock()))
                record = Record(due=start + offset)
                records.append(record)
                group.create_task(one(record, body))
        for connection in idle:
            connection.close()

    @staticmethod
    def _more(amount: Amount, sent: int, seconds: float) -> bool:
        return (not amount.requests or sent < amount.requests) and (not amount.seconds or seconds < amount.seconds)

    def _connection(self) -> Connection:
        return Connection(self._target.origin, self._target.headers)

    def _body(self, share: float = 1.0) -> bytes:
        """`share`: of the tokens that an answer may have."""
        ask = dataclasses.replace(self._ask, max_new_tokens=math.ceil(share * self._ask.max_new_tokens))
        return self._encode(self._target.api.body(next(self._prompts), ask))

    async def _send(self, connection: Connection, body: bytes, record: Record) -> None:
        reader = _Reader(self._target.api, record, self._clock)
        self._running += 1
        record.sent = self._clock()
        try:
            async with asyncio.timeout(self._target.timeout):
                status = await connection.exchange("POST", self._target.api.path, body, reader.feed)
            reader.finish(status)
        except TimeoutError:
            record.error = "timeout"
        except OSError as error:
            record.error = f"connection: {error}"
        except asyncio.CancelledError:
            record.cut = True
            raise
        finally:
            record.ended = self._clock()
            self._running -= 1

    async def _watch(self, shape: Shape, records: list[Record]) -> None:
        while True:
            await asyncio.sleep(1)
            tokens = sum(record.tokens for record in records)
            self._progress(f"{shape.label}: {len(records) - self._running} done, {self._running} running, {tokens} tokens")


class _Reader:
    """Turns a response's bytes into a record's arrivals, tokens and error."""

    __slots__ = ("_api", "_body", "_clock", "_done", "_events", "_record")

    def __init__(self, api: Api, record: Record, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._record = record
        self._events = EventParser()
        self._body = b""
        self._done = False

    def feed(self, data: bytes) -> None:
        if not self._api.streamed:
            self._body += data
            return
        now = self._clock()
        for event in self._events.feed(data):
            self._take(event, now)
        if not self._record.arrivals:
            self._body = (self._body + data)[:4096]

    def _take(self, event: bytes, now: float) -> None:
        record = self._record
        try:
            reading = self._api.read(event)
        except msgspec.DecodeError as error:
            record.error = f"unreadable event: {error}"
            return
        if reading.tokens:
            record.arrivals.append(now)
        if reading.id is not None:
            record.ids.append(reading.id)
        record.guesses = reading.guesses or record.guesses
        record.tokens = reading.total if reading.total is not None else record.tokens + reading.tokens
        record.error = reading.error or record.error
        self._done = self._done or reading.done

    def finish(self, status: int) -> None:
        """The response ended in order; judges it as a whole."""
        record = self._record
        if status != 200:
            text = " ".join(self._body[:120].decode("utf-8", "replace").split())
            record.error = f"HTTP {status}: {text}"
        elif not self._api.streamed:
            self._take(self._body, self._clock())
        elif not self._done and not record.error:
            record.error = "the stream ended without its last event"


def checked(records: list[Record], who: str = "") -> list[Record]:
    """The records. Raises BenchError when a request failed: a figure of a run with errors says nothing."""
    errors = {record.error for record in records if record.error}
    if errors:
        raise BenchError(f"{who}{': ' if who else ''}requests failed: {'; '.join(sorted(errors))}")
    return records


def show_progress() -> Callable[[str], None]:
    """A line on stderr that writes over itself; silent when stderr is no terminal."""
    if not sys.stderr.isatty():
        return lambda line: None
    return lambda line: print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def show_steps() -> Callable[[str], None]:
    """The same for what happens every few seconds only: where stderr is no terminal, a line each."""
    return show_progress() if sys.stderr.isatty() else lambda line: print(line, file=sys.stderr, flush=True)
