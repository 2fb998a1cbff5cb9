"""What is read, not generated: `/info`, `/metrics`, `/debug/speculation`, `/docs` and its document, and the routes that are not served."""

from __future__ import annotations

from importlib import resources

import msgspec
from aiohttp import web

from forerun.config import Config
from forerun.router.service import Router
from forerun.server import errors
from forerun.server.errors import ApiError
from forerun.server.info import info
from forerun.server.metrics import Metrics
from forerun.server.telemetry import Tracing

_DOCS = resources.files("forerun.server").joinpath("docs.html").read_bytes()


class Pages:
    def __init__(self, config: Config, router: Router, metrics: Metrics, tracing: Tracing) -> None:
        self._config = config
        self._router = router
        self._metrics = metrics
        self._tracing = tracing
        self.document = b"{}"
        """the OpenAPI document; made from the table of routes, so after it"""

    async def info(self, http: web.Request) -> web.Response:
        known = info(self._config, self._router)
        if known is None:
            raise ApiError(503, "The model is loading: its limits are not known yet", "loading", headers={"Retry-After": "1"})
        return web.Response(body=msgspec.json.encode(known), content_type="application/json")

    async def metrics(self, http: web.Request) -> web.Response:
        if self._router.limits is not None:
            self._metrics.requests.size(self._router.limits)
        self._metrics.batch.speculation.look(self._router.ready, self._router.look(), self._config.model.model_id)
        self._metrics.lost_spans.value = self._tracing.lost()
        return web.Response(text=self._metrics.text(), content_type="text/plain", charset="utf-8")

    async def speculation(self, http: web.Request) -> web.Response:
        """What the controllers think, for people who wonder why there are so many guesses or so few."""
        return web.Response(body=msgspec.json.encode(self._router.look()), content_type="application/json")

    async def docs(self, http: web.Request) -> web.Response:
        return web.Response(body=_DOCS, content_type="text/html", charset="utf-8")

    async def openapi(self, http: web.Request) -> web.Response:
        return web.Response(body=self.document, content_type="application/json")

    async def not_served(self, http: web.Request) -> web.Response:
        raise errors.missing(f"{http.path} is not served: there are /v1/chat/completions, /v1/completions and /v1/models; see /docs")
