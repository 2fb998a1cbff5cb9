"""The files of the live page, held in memory: `/dashboard` and what it loads.

The page is let do nothing but talk to this server (its Content-Security-Policy): no other host is asked for anything, and text that a
model wrote cannot run. It names everything relative to itself, so it also works behind a proxy that adds a prefix.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from aiohttp import web

from forerun.server.errors import missing

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FOLDER = resources.files("forerun.server").joinpath("dashboard")
_FILES = {entry.name: entry.read_bytes() for entry in _FOLDER.iterdir() if entry.name.rpartition(".")[2] in _TYPES}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def dashboard(http: web.Request) -> web.StreamResponse:
    return _file(http, "index.html")


async def slash(http: web.Request) -> web.StreamResponse:
    """`/dashboard/`, beside which the page's relative names would lead nowhere."""
    return web.Response(status=308, headers={"location": "../dashboard"})


async def part(http: web.Request) -> web.StreamResponse:
    return _file(http, http.match_info["name"])


def _file(http: web.Request, name: str) -> web.StreamResponse:
    body = _FILES.get(name)
    if body is None:
        raise missing(f"There is no {http.path}; see /dashboard")
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {
        "cache-control": "no-cache",
        "etag": tag,
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    if tag in http.headers.get("if-none-match", ""):
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, content_type=_TYPES[name.rpartition(".")[2]], charset="utf-8", headers=headers)
