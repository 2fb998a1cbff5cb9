"""A request's name in headers and log lines: the client's own `x-request-id`, or a new one."""

from __future__ import annotations

import os
import re

from aiohttp import web

REQUEST_ID = web.RequestKey("request_id", str)
HEADER = "x-request-id"
_usable = re.compile(r"[!-~]{1,128}").fullmatch


def name(http: web.Request) -> None:
    """Give the request its name. A client's is taken if it is printable and short, since it is repeated in a header and in the log."""
    given = http.headers.get(HEADER, "")
    http[REQUEST_ID] = given if _usable(given) else os.urandom(16).hex()
