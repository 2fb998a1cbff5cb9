"""Draft services for tests: real ones behind real sockets, and some that misbehave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from forerun.drafting import fingerprint
from forerun.engine.drafters.draft import Drafter
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.draftserver import Server
from forerun.engine.draftservice import DraftService
from tests.engine.drafters.companions import word
from tests.engine.tiny import LONGEST, VOCAB

TOKENS = fingerprint(word(id).encode() for id in range(VOCAB))
"""of the tokenizer that `companions.write_target` writes"""


def service(
    drafter: Drafter | None = None,
    rows: int = 16,
    longest: int = LONGEST,
    vocab: int = VOCAB,
    tokens: str = TOKENS,
    clock: Callable[[], float] = time.monotonic,
) -> DraftService:
    return DraftService(drafter or open_drafter("suffix", Setting(nodes=8)), "a test", vocab, tokens, rows, longest, clock)


class Running:
    """An application on a port of its own, in a thread of its own. `port`: to be opened again later."""

    def __init__(self, app: web.Application, port: int = 0) -> None:
        self._app = app
        self.port = port
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()], daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        runner = web.AppRunner(self._app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._over.wait()
        await runner.cleanup()


@contextmanager
def running(app: web.Application) -> Iterator[str]:
    server = Running(app)
    try:
        yield server.url
    finally:
        server.stop()


def honest(of: DraftService | None = None) -> web.Application:
    return Server(of or service()).app


def answering(answer: Callable[[str, bytes], Awaitable[web.Response]]) -> web.Application:
    """Whatever is asked, this says what is answered: (path, body)."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request.path, await request.read())

    app = web.Application()
    app.add_routes([web.post("/{path:.*}", handle)])
    return app
