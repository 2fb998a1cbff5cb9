"""The seam for traces: what a server with `--otlp-endpoint` is told of each request, and what one without it does instead: nothing.

Everything is told when it is over, with the times that are known by then, so that a trace costs no request anything while it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Protocol

from aiohttp import web

from forerun.router.request import Sequence

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that was answered in full. `facts`: TGI's fields of the request's span, as its log line has them."""

    sequence: Sequence
    ended: float
    """monotonic seconds"""
    generated: int
    finish: str
    drafted: int
    accepted: int
    steps: int
    facts: dict[str, str]


class Tracing(Protocol):
    def around(self, name: str, handler: Handler) -> Handler:
        """The handler of a route that generates; each call of it is a span of this name."""
        ...

    def answered(self, ended: Ended) -> None:
        """Called inside of such a handler."""
        ...

    def failed(self, kind: str, message: str) -> None:
        """A stream broke off after its status was sent. Called inside of such a handler."""
        ...

    def lost(self) -> int:
        """Spans that did not arrive."""
        ...

    def close(self) -> None:
        """Send what is left, for a few seconds at the most. Blocks."""
        ...


class NoTracing:
    def around(self, name: str, handler: Handler) -> Handler:
        return handler

    def answered(self, ended: Ended) -> None:
        return None

    def failed(self, kind: str, message: str) -> None:
        return None

    def lost(self) -> int:
        return 0

    def close(self) -> None:
        return None
