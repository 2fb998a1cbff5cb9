"""What a connection says before there is a request: HTTP that cannot be read is answered in the same JSON as every other error.

The library has no public way to say which class a connection is, so its server is made anew with ours. Knows no route.
"""

from __future__ import annotations

import secrets

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
        headers = {identity.HEADER: secrets.token_hex(16)}
        response = web.Response(status=error.status, body=error.body(), content_type="application/json", headers=headers)
        response.force_close()
        return response


def _error(status: int, exc: BaseException | None, message: str) -> ApiError:
    if status >= 500:
        return ApiError(status, "Internal server error; the server's log tells more", "internal")
    if isinstance(exc, http_exceptions.LineTooLong):
        status, message = 431, "The request line or a header is too long"
    return malformed(status, f"Malformed HTTP request: {' '.join(message.split())[:SHOWN_CHARS]}")


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        factory, cancels = made.request_factory, made.handler_cancellation
        return _Server(made.request_handler, request_factory=factory, handler_cancellation=cancels, loop=made._loop, **made._kwargs)
