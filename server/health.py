"""Four questions about the server's health, told apart.

    /health, /ping, GET /   TGI's: can requests be sent? 503 while loading, draining, failed, or without a sign of life from the worker
    /health/live            is the process worth keeping? 503 only when it has given up
    /health/ready           should new requests be routed here? as /health; fails first when shutting down
    /health/generate        does a token come out? looks at the running steps, or generates one token itself

None of them takes a permit or waits in the queue's limits, so a full server is still a healthy one.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from aiohttp import web

from forerun.messages import SamplingParams
from forerun.router.request import Failure, Request, Run
from forerun.router.service import Phase, Refused, Router
from forerun.server.schema import HealthError, LoadProgress
from forerun.server.services import Services

SILENT_SECONDS = 2.0
"""A worker says it is alive twice a second; silence of this many seconds, and of many steps, is not business as usual."""
SILENT_STEPS = 4
PROBE_SECONDS = 5.0
LOOK_SECONDS = 0.05
PROBE_PRIORITY = 1 << 16

_encode = msgspec.json.Encoder().encode


class Health:
    def __init__(self, router: Router, services: Services) -> None:
        self._router = router
        self._services = services
        self._probe: asyncio.Task[bool] | None = None

    async def health(self, http: web.Request) -> web.Response:
        problem = self._problem()
        return _unhealthy(problem) if problem else web.Response()

    async def live(self, http: web.Request) -> web.Response:
        if self._router.phase is Phase.FAILED:
            return _unhealthy(self._failure())
        return web.Response()

    async def generate(self, http: web.Request) -> web.Response:
        problem = self._problem()
        if problem:
            return _unhealthy(problem)
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._generates())
        # Probes that come meanwhile share the one that is running, and one that gives up does not end it for the others.
        if await asyncio.shield(self._probe):
            return web.Response()
        return _unhealthy(HealthError(f"unhealthy: no token within {PROBE_SECONDS:g} s", "healthcheck"))

    def _problem(self) -> HealthError | None:
        phase = self._router.phase
        if phase is Phase.LOADING or (phase is Phase.READY and self._services.tokenizer is None):
            return self._loading()
        if phase is Phase.DRAINING:
            return HealthError("unhealthy: shutting down", "healthcheck")
        if phase is Phase.FAILED:
            return self._failure()
        if self._router.beat_age() > self._patience():
            return HealthError("unhealthy", "healthcheck")
        return None

    def _loading(self) -> HealthError:
        progress = self._router.progress
        if progress is None:
            return HealthError("loading", "healthcheck")
        told = LoadProgress(progress.stage, progress.done, progress.total)
        return HealthError(f"{progress.stage}: {progress.done} of {progress.total}", "healthcheck", told)

    def _failure(self) -> HealthError:
        failure = self._router.failure
        return HealthError(f"unhealthy: {failure.message}" if failure else "unhealthy", "healthcheck")

    def _patience(self) -> float:
        ready = self._router.ready
        return max(SILENT_SECONDS, SILENT_STEPS * max(ready.step_seconds)) if ready else SILENT_SECONDS

    async def _generates(self) -> bool:
        """Whether a token comes out soon: of any request, or of one of our own if the batch is idle."""
        batch = self._services.metrics.batch
        before, began = batch.committed_steps, time.monotonic()
        listener = _OneToken()
        params = SamplingParams(seed=0, prompt_tokens=1, max_new_tokens=1, logprobs=False)
        request = Request("health", [0], params, began, deadline=began + PROBE_SECONDS, priority=PROBE_PRIORITY, cache=False)
        try:
            sequence = self._router.submit(request, listener)
        except Refused:
            return False
        try:
            while not listener.came.done() and time.monotonic() < began + PROBE_SECONDS:
                await asyncio.wait((listener.came,), timeout=LOOK_SECONDS)
                if batch.committed_steps > before:
                    return True
        finally:
            self._router.cancel(sequence)
        return listener.came.done() and listener.came.result()


class _OneToken:
    """A TokenStream that only wants to know whether a token came."""

    def __init__(self) -> None:
        self.came: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def tokens(self, run: Run) -> bool:
        self._settle(True)
        return False

    def end(self, reason: str) -> None:
        self._settle(True)

    def fail(self, failure: Failure) -> None:
        self._settle(False)

    def _settle(self, came: bool) -> None:
        if not self.came.done():
            self.came.set_result(came)


def _unhealthy(error: HealthError) -> web.Response:
    return web.Response(status=503, body=_encode(error), content_type="application/json", headers={"Retry-After": "1"})
