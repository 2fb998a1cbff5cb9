"""`GET /debug/live`: everything the live page shows, in one answer that is made when somebody asks.

As open as `/metrics` under an API key: it tells how busy the server is and which model it has, never what anybody asked or was told.
"""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from forerun import __version__
from forerun.config import Config
from forerun.router.controller.journal import Curve
from forerun.router.guesses import Snapshot
from forerun.router.service import Router
from forerun.server.errors import malformed
from forerun.server.metrics import Metrics
from forerun.server.recent import Quantiles, Sample
from forerun.server.schema import LoadProgress

_encode = msgspec.json.Encoder().encode


class Model(msgspec.Struct):
    """What is served, and how much of it at once."""

    id: str
    device: str
    dtype: str
    speculator: str
    max_concurrent_requests: int
    page_tokens: int
    pages: int


class Requests(msgspec.Struct):
    """Since the start. `failed`: for any reason but overload."""

    received: int
    answered: int
    failed: int
    overloaded: int


class Thoughts(msgspec.Struct):
    """Of one replica: what its controller thinks, and how guesses fare, by source."""

    controller: Snapshot
    survival: dict[str, Curve]


class Live(msgspec.Struct):
    """`now` and the samples' `at` are monotonic seconds, `started` is unix time: another one is another server. `silence`: seconds since
    the worker's last sign of life; null while there is none. `secured`: requests need an API key. Latencies are of the last minute."""

    now: float
    started: float
    version: str
    phase: str
    problem: str
    progress: LoadProgress | None
    silence: float
    secured: bool
    model: Model | None
    requests: Requests
    first_token: Quantiles | None
    between_tokens: Quantiles | None
    history: list[Sample]
    speculation: list[Thoughts]


class LiveRoute:
    def __init__(self, config: Config, router: Router, metrics: Metrics) -> None:
        self._config = config
        self._router = router
        self._metrics = metrics
        self._started = time.time()

    async def live(self, http: web.Request) -> web.Response:
        """`?since=T`: only samples that were taken after `at` = T."""
        asked = http.query.get("since", "0")
        try:
            since = float(asked)
        except ValueError as error:
            raise malformed(400, f"`since` must be a number, the `at` of a sample. Given: {asked[:100]}") from error
        return web.Response(body=_encode(self._look(since)), content_type="application/json", headers={"cache-control": "no-store"})

    def _look(self, since: float) -> Live:
        router, requests, now = self._router, self._metrics.requests, time.monotonic()
        progress, failure = router.progress, router.failure
        return Live(
            now=now,
            started=self._started,
            version=__version__,
            phase=router.phase.value,
            problem=failure.message if failure else "",
            progress=LoadProgress(progress.stage, progress.done, progress.total) if progress else None,
            silence=router.beat_age(),
            secured=self._config.serving.api_key is not None,
            model=self._model(),
            requests=Requests(*requests.counts()),
            first_token=requests.first_tokens.quantiles(now),
            between_tokens=requests.gaps.quantiles(now),
            history=self._metrics.batch.history.since(since),
            speculation=[Thoughts(view.controller, view.survival) for view in router.look()],
        )

    def _model(self) -> Model | None:
        """None while it loads."""
        limits, ready = self._router.limits, self._router.ready
        if limits is None or ready is None:
            return None
        load, most = self._router.load(), limits.max_concurrent_requests
        return Model(self._config.model.model_id, ready.device, ready.dtype, ready.drafter, most, ready.page_tokens, load.total_pages)
