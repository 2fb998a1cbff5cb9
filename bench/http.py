"""A light HTTP/1.1 client: one response parser without I/O, and a keep-alive connection around it.

The load generator shares its cores with the server it measures, so a token event may cost it a few microseconds only: bytes go
from the socket's callback to the reader of events without a task being woken in between.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import urllib.parse
from collections.abc import Callable


class HttpError(ConnectionError):
    """The connection or the response broke off. `fresh`: no byte of the response had come."""

    def __init__(self, message: str, fresh: bool = False) -> None:
        super().__init__(message)
        self.fresh = fresh


class ResponseParser:
    """One response, fed in pieces of any size; body bytes go to `sink` as they come, without their framing.

    `complete` turns true with the last byte; `keep_alive` says whether the connection can carry another request."""

    def __init__(self, sink: Callable[[bytes], None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keep_alive = True
        self.started = False
        self._sink = sink
        self._buffer = b""
        self._left = 0
        self._step: Callable[[], bool] = self._head

    def feed(self, data: bytes) -> None:
        """Raises HttpError when the bytes are not HTTP."""
        self.started = True
        self._buffer += data
        while not self.complete and self._step():
            pass

    def end(self) -> None:
        """The peer closed. Raises HttpError unless the response was complete or ran until the close."""
        if self._step == self._until_close and not self.complete:
            self.complete = True
        if not self.complete:
            raise HttpError("the server closed the connection before the response was complete", fresh=not self.started)

    def _take(self, mark: bytes) -> bytes | None:
        head, found, rest = self._buffer.partition(mark)
        if not found:
            return None
        self._buffer = rest
        return head

    def _head(self) -> bool:
        head = self._take(b"\r\n\r\n")
        if head is None:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise HttpError(f"not an HTTP/1.1 response: {first[:80]!r}")
        self.status = int(words[1])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if self.status >= 200:
            self._choose_framing()
        return True

    def _choose_framing(self) -> None:
        self.keep_alive = self.headers.get("connection", "").lower() != "close"
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._step = self._chunk_size
        elif "content-length" in self.headers or self.status in (204, 304):
            self._left = int(self.headers.get("content-length", 0))
            self._step = self._sized
        else:
            self.keep_alive = False
            self._step = self._until_close

    def _deliver(self) -> bool:
        """Hands on what is there of the `_left` bytes; true when all came."""
        piece = self._buffer[: self._left]
        self._buffer = self._buffer[len(piece) :]
        self._left -= len(piece)
        if piece:
            self._sink(piece)
        return self._left == 0

    def _sized(self) -> bool:
        self.complete = self._deliver()
        return False

    def _until_close(self) -> bool:
        self._left = len(self._buffer)
        self._deliver()
        return False

    def _chunk_size(self) -> bool:
        line = self._take(b"\r\n")
        if line is None:
            return False
        try:
            self._left = int(line.partition(b";")[0], 16)
        except ValueError as error:
            raise HttpError(f"bad chunk size {line[:20]!r}") from error
        self._step = self._chunk_data if self._left else self._trailer
        return True

    def _chunk_data(self) -> bool:
        if not self._deliver():
            return False
        self._step = self._chunk_end
        return True

    def _chunk_end(self) -> bool:
        if self._take(b"\r\n") is None:
            return False
        self._step = self._chunk_size
        return True

    def _trailer(self) -> bool:
        line = self._take(b"\r\n")
        self.complete = line == b""
        return line is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is, taken from its URL. `prefix`: a path in front of every route, without a slash at its end."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a server's address: give http://host:port")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))


class _Wire(asyncio.Protocol):
    """The asyncio end of one connection; carries one exchange at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._parser: ResponseParser | None = None
        self._done: asyncio.Future[None] | None = None

    def begin(self, parser: ResponseParser) -> asyncio.Future[None]:
        self._parser = parser
        self._done = asyncio.get_running_loop().create_future()
        return self._done

    def data_received(self, data: bytes) -> None:
        parser, done = self._parser, self._done
        if parser is None or done is None or done.done():
            return
        try:
            parser.feed(data)
        except HttpError as error:
            done.set_exception(error)
            return
        if parser.complete:
            done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        parser, done = self._parser, self._done
        if parser is None or done is None or done.done():
            return
        try:
            parser.end()
        except HttpError as broken:
            done.set_exception(broken)
        else:
            done.set_result(None)


class Connection:
    """A client of one server: opens when needed, keeps the connection between exchanges. One exchange at a time."""

    def __init__(self, origin: Origin, headers: dict[str, str] | None = None) -> None:
        self._origin = origin
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._wire: _Wire | None = None
        self._transport: asyncio.Transport | None = None

    async def exchange(self, method: str, path: str, body: bytes, sink: Callable[[bytes], None]) -> int:
        """Sends a request and feeds the response's body to `sink`; returns the status. Raises OSError (HttpError among them) when the
        connection fails. A kept connection that the server had closed meanwhile is opened again once."""
        kept = self._wire is not None and not self._wire.closed
        try:
            return await self._once(method, path, body, sink)
        except HttpError as error:
            if not (kept and error.fresh):
                raise
            return await self._once(method, path, body, sink)

    async def _once(self, method: str, path: str, body: bytes, sink: Callable[[bytes], None]) -> int:
        if self._wire is None or self._wire.closed:
            await self._open()
        assert self._wire is not None and self._transport is not None
        parser = ResponseParser(sink)
        done = self._wire.begin(parser)
        self._transport.write(self._request(method, path, body))
        try:
            await done
        except BaseException:
            self.close()
            raise
        if not parser.keep_alive:
            self.close()
        return parser.status

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        origin = self._origin
        head = f"{method} {origin.prefix}{path} HTTP/1.1\r\nHost: {origin.host}:{origin.port}\r\n{self._headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + body

    async def _open(self) -> None:
        context = ssl.create_default_context() if self._origin.tls else None
        loop = asyncio.get_running_loop()
        self._transport, self._wire = await loop.create_connection(_Wire, self._origin.host, self._origin.port, ssl=context)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._wire = self._transport = None
