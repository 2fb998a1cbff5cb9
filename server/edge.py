"""What every request passes on its way in and out: its name, CORS, the API key, and errors as JSON.

One middleware and one signal. Knows no route: the key guards every POST, because here whatever generates is a POST and nothing else is.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from forerun.server import errors, identity
from forerun.server.errors import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = structlog.get_logger("forerun.server")
UNREAD_SECONDS = 120.0
"""A client that takes nothing in for so long while there is something to send, or whose machine is gone, is cut off."""
_VARY = "origin, access-control-request-method, access-control-request-headers"


class Edge:
    """`origins`: who may call from a browser; empty = everybody. `api_key`: None = no key is asked for."""

    def __init__(self, origins: tuple[str, ...], api_key: str | None) -> None:
        self._origins = frozenset(origins)
        self._key = None if api_key is None else api_key.encode()

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        identity.name(request)
        if request.method == "OPTIONS":
            return self._preflight(request)
        try:
            if request.method == "POST":
                self._check_key(request)
            return await handler(request)
        except ApiError as error:
            say = _log.error if error.status in (424, 500) else _log.debug
            say(error.message, request_id=request[identity.REQUEST_ID], error_type=error.kind, status=error.status, path=request.path)
            return _answer(request, error)
        except web.HTTPException as error:
            return _answer(request, _translated(request, error))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            _log.exception("Internal error", request_id=request[identity.REQUEST_ID], path=request.path)
            return _answer(request, ApiError(500, "Internal server error; the server's log tells more", "internal"))

    async def sign(self, http: web.Request, response: web.StreamResponse) -> None:
        """Signal before the headers go out."""
        headers = response.headers
        headers["vary"] = _VARY
        if not self._origins:
            headers["access-control-allow-origin"] = "*"
        elif (origin := http.headers.get("origin")) in self._origins:
            headers["access-control-allow-origin"] = origin
        headers["access-control-expose-headers"] = "*"
        headers[identity.HEADER] = http.get(identity.REQUEST_ID, "")
        headers.popall("Server", None)
        if http.transport is not None and not http.transport.is_closing():
            connection = http.transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_SECONDS * 1000))

    def _check_key(self, http: web.Request) -> None:
        if self._key is not None:
            scheme, _, given = http.headers.get("authorization", "").partition(" ")
            # Schemes have no case (RFC 9110), keys have.
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._key) or scheme.lower() != "bearer":
                raise errors.unauthorized()

    def _preflight(self, http: web.Request) -> web.Response:
        """Any header may be sent: clients add their own (x-stainless-…), and a key in a header is not sent by browsers on their own."""
        wanted = http.headers.get("access-control-request-headers", "authorization, content-type")
        return web.Response(headers={"access-control-allow-methods": "GET,POST", "access-control-allow-headers": wanted})


def _answer(http: web.Request, error: ApiError) -> web.Response:
    body = error.body(openai=http.path.startswith("/v1/"))
    response = web.Response(status=error.status, body=body, content_type="application/json", headers=error.headers)
    if "expect" in http.headers and not http.content.is_eof():
        response.force_close()  # it may never send its body now: nobody could tell that from its next request
    return response


def _translated(http: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return errors.missing(f"There is no {http.path}; see /docs")
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    message = f"{http.method} is not allowed on {http.path}" if error.status == 405 else error.reason
    return ApiError(error.status, message, "method_not_allowed" if error.status == 405 else "request", headers=headers)
