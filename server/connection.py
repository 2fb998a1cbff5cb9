"""What a connection says before there is a request: HTTP that cannot be read is answered in the same JSON as every other error.

The library has no option that says which class a connection is. But a site asks its runner for the server to listen with, and that makes
the connections; so the runner answers with one of ours. Knows no route.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from aiohttp import http_exceptions, web

from forerun.server import identity
from forerun.server.errors import ApiError, malformed

SHOWN_CHARS = 200
"""of what the parser says, which repeats what was sent"""


class Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Instead of the library's text. It logs, and raises where a response has begun; both stay as they are."""
        super().handle_error(request, status, exc, message)
        error = _error(status, exc, message or "the request cannot be read")
        # No signal of the application sees this response: else the library would tell its own name and version.
        headers = {identity.HEADER: secrets.token_hex(16), "server": "forerun", **error.headers}
        response = web.Response(status=error.status, body=error.body(), content_type="application/json", headers=headers)
        response.force_close()
        return response


def _error(status: int, exc: BaseException | None, message: str) -> ApiError:
    if status >= 500:
        return ApiError(status, "Internal server error; the server's log tells more", "internal")
    if isinstance(exc, http_exceptions.ContentEncodingError):
        return ApiError(415, "Send the body as it is, or with gzip or deflate", "validation", headers={"accept-encoding": "gzip, deflate"})
    if isinstance(exc, http_exceptions.LineTooLong):
        status, message = 431, "The request line or a header is too long"
    return malformed(status, f"Malformed HTTP request: {' '.join(message.split())[:SHOWN_CHARS]}")


class _Server(web.Server):
    """What a site listens with: connections are ours, and the application's own server keeps account of them."""

    def __init__(self, made: web.Server, options: dict[str, Any]) -> None:
        super().__init__(made.request_handler)
        self._made = made
        self._options = options

    def __call__(self) -> web.RequestHandler:
        return Connection(self._made, loop=asyncio.get_running_loop(), **self._options)


class Runner(web.AppRunner):
    """A client that leaves cancels its handler at once; signals are left to whoever runs this. `connection`: options of each
    connection."""

    def __init__(self, app: web.Application, *, shutdown_timeout: float, **connection: Any) -> None:
        super().__init__(app, handler_cancellation=True, handle_signals=False, shutdown_timeout=shutdown_timeout)
        self._connection = connection

    @property
    def server(self) -> web.Server | None:
        made = super().server
        return None if made is None else _Server(made, self._connection)
