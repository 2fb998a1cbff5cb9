"""A server that speaks every API in question, by a script: which tokens, how fast, which failures."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@dataclasses.dataclass
class Fake:
    """`tokens`: words of every answer; `gap`: seconds between them; `fail_at`: the event that is an error instead; `refuse`: every n-th
    request is answered 429; `cut`: the connection is lost after so many events."""

    tokens: int = 5
    gap: float = 0.0
    fail_at: int = 0
    refuse: int = 0
    cut: int = 0
    requests: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    headers: list[dict[str, str]] = dataclasses.field(default_factory=list)
    url: str = ""
    running: int = 0
    most_running: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.refuse and len(self.requests) % self.refuse == 0:
            return web.json_response({"error": "Model is overloaded", "error_type": "overloaded"}, status=429)
        if request.path == "/generate":
            return web.json_response({"generated_text": "x", "details": {"generated_tokens": self.tokens}})
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        events = list(SCRIPTS[request.path](self.tokens))
        for number, event in enumerate(events, 1):
            if number == self.cut:
                assert request.transport is not None
                request.transport.abort()
                return response
            if number == self.fail_at:
                await response.write(f"data: {json.dumps(FAILURES[request.path])}\n\n".encode())
                return response
            await response.write(f"data: {event}\n\n".encode())
            await asyncio.sleep(self.gap)
        return response


def _tgi(count: int) -> list[str]:
    return [
        json.dumps({"index": n, "token": {"id": n, "text": "x"}, "generated_text": "x" * n if n == count else None})
        for n in range(1, count + 1)
    ]


def _completions(count: int) -> list[str]:
    chunks = [{"choices": [{"index": 0, "text": "x"}]} for _ in range(count)]
    return [*map(json.dumps, chunks), json.dumps({"choices": [], "usage": {"completion_tokens": count + 1}}), "[DONE]"]


def _chat(count: int) -> list[str]:
    chunks = [{"choices": [{"delta": {"role": "assistant", "content": "x"}}], "usage": None} for _ in range(count)]
    return [json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}), *map(json.dumps, chunks), "[DONE]"]


def _llama(count: int) -> list[str]:
    chunks = [{"content": "x", "stop": False, "tokens": [1]} for _ in range(count)]
    return [*map(json.dumps, chunks), json.dumps({"content": "", "stop": True, "tokens_predicted": count})]


SCRIPTS = {"/generate_stream": _tgi, "/v1/completions": _completions, "/v1/chat/completions": _chat, "/completion": _llama}
OPENAI_FAILURE = {"error": {"message": "it broke", "http_status_code": 422}}
FAILURES: dict[str, Any] = {
    "/generate_stream": {"error": "it broke", "error_type": "generation"},
    "/v1/completions": OPENAI_FAILURE,
    "/v1/chat/completions": OPENAI_FAILURE,
    "/completion": {"error": {"code": 500, "message": "it broke"}},
}


@asynccontextmanager
async def serving(fake: Fake) -> AsyncIterator[Fake]:
    app = web.Application()
    for path in [*SCRIPTS, "/generate"]:
        app.router.add_post(path, fake.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()


async def _main(port: int, fake: Fake) -> None:
    """As a program of its own, with a health route."""
    app = web.Application()

    async def healthy(request: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/health", healthy)
    for path in SCRIPTS:
        app.router.add_post(path, fake.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), Fake(tokens=int(sys.argv[2]), gap=float(sys.argv[3]))))
