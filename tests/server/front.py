"""A front without a worker: the real application on a real socket, over a router that answers by a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
from aiohttp import web

from forerun.config import Config
from forerun.engine import echo
from forerun.messages import Inject, Progress, Ready, SamplingParams
from forerun.router.controller.journal import View
from forerun.router.observer import Load
from forerun.router.request import Failure, Request, Run, Sequence, TokenStream
from forerun.router.service import Limits, Phase, Refused
from forerun.server.app import Services, build_app, make_runner
from forerun.server.telemetry import NoTracing, Tracing
from forerun.server.text import Tokenizer
from tests.server import tiny

Script = Callable[[Sequence], Iterator[Run | Failure]]
LIMITS = Limits(
    max_input_tokens=200, max_total_tokens=256, max_batch_total_tokens=4096, max_batch_prefill_tokens=4096, max_concurrent_requests=8
)


class Permit:
    def __init__(self, router: FakeRouter, permits: int) -> None:
        self._router, self._permits = router, permits

    def leave(self) -> None:
        self._router.inside -= self._permits
        self._permits = 0

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def answers(vocab: int) -> Script:
    """One token a step, those of the echo worker."""

    def script(sequence: Sequence) -> Iterator[Run]:
        params = sequence.params
        prompt = [echo.logprob(token) for token in sequence.tokens[1:]] if params.prompt_logprobs else []
        others = (
            [likely(token, params.top_n, vocab) for token in sequence.tokens[1:]] if prompt and params.top_n and params.raw_logprobs else []
        )
        for token in echo.answer(sequence.request.tokens, params, vocab):
            logprobs = [echo.logprob(token)] if params.logprobs else []
            top = [likely(token, params.top_n, vocab)] if params.top_n else []
            yield Run([token], logprobs, top, prompt, prompt_top=others)
            prompt, others = [], []

    return script


def likely(token: int, count: int, vocab: int) -> list[tuple[int, float]]:
    return [((token + i) % vocab, echo.logprob(token) - i / 2) for i in range(count)]


def runs(*said: list[int], failure: Failure | None = None) -> Script:
    """These tokens, a list a step; then the failure, if there is one."""

    def script(sequence: Sequence) -> Iterator[Run | Failure]:
        for tokens in said:
            yield Run(tokens, [-0.5] * len(tokens), [], [], drafted=len(tokens), accepted=len(tokens) - 1)
        if failure:
            yield failure

    return script


def stuck(sequence: Sequence) -> Iterator[Run]:
    """Never says anything; the router must be told `step_seconds` to wait that long before each nothing."""
    while True:
        yield Run([], [], [], [])


class FakeRouter:
    """Answers each sequence in a task of its own, `step_seconds` a step."""

    def __init__(self, tokenizer: Tokenizer, script: Script | None = None, *, step_seconds: float = 0.0, limits: Limits = LIMITS) -> None:
        self.phase = Phase.READY
        self.progress: Progress | None = None
        self.failure: Failure | None = None
        self.limits: Limits | None = limits
        self.ready: Ready | None = Ready(8, 64, 16, 4, tokenizer.vocab_size, "echo", "none", "none", limits.max_total_tokens, 4096)
        self.script = script or answers(tokenizer.vocab_size)
        self.step_seconds = step_seconds
        self.inside = 0
        self.beat = 0.0
        self.views: list[View] = []
        self.submitted: list[Sequence] = []
        self.cancelled: list[Sequence] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        return sum(not task.done() for task in self._tasks.values())

    def enter(self, permits: int = 1) -> Permit:
        if self.phase is not Phase.READY:
            raise Refused("Model is loading", retry_after_seconds=3)
        assert self.limits is not None
        if self.inside + permits > self.limits.max_concurrent_requests:
            raise Refused("Model is overloaded")
        self.inside += permits
        return Permit(self, permits)

    def submit(self, request: Request, stream: TokenStream, params: SamplingParams | None = None) -> Sequence:
        sequence = Sequence(request, params or request.params, stream, list(request.tokens), queued_at=time.monotonic())
        self.submitted.append(sequence)
        self._tasks[id(sequence)] = asyncio.create_task(self._run(sequence))
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.cancelled.append(sequence)
        self._tasks[id(sequence)].cancel()

    def load(self) -> Load:
        return Load(0, self.running, 0, 0, 64, 16)

    def look(self) -> list[View]:
        return self.views

    def inject(self, message: Inject) -> None: ...

    def beat_age(self) -> float:
        return self.beat

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, sequence: Sequence) -> None:
        sequence.started_at = time.monotonic()
        params = sequence.params
        for said in self.script(sequence):
            await asyncio.sleep(self.step_seconds)
            if said.__class__ is Failure:
                sequence.stream.fail(said)
                return
            if (said.tokens or said.prompt_logprobs) and sequence.stream.tokens(said):
                return
            sequence.tokens += said.tokens
            ended = said.tokens and said.tokens[-1] in params.stop_ids
            if ended or sequence.generated >= params.max_new_tokens:
                sequence.stream.end("eos_token" if ended else "length")
                return


class Front:
    """A running front and a client session for it."""

    def __init__(self, url: str, router: FakeRouter, services: Services, session: aiohttp.ClientSession) -> None:
        self.url, self.router, self.services, self.session = url, router, services, session
        self.port = int(url.rpartition(":")[2])

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **more) as response:
            return response.status, await response.json(content_type=None)

    async def raw(self, path: str, body: Any, **more: Any) -> tuple[aiohttp.ClientResponse, bytes]:
        async with self.session.post(self.url + path, json=body, **more) as response:
            return response, await response.read()

    async def events(self, path: str, body: Any) -> list[Any]:
        response, raw = await self.raw(path, body)
        assert response.status == 200, raw
        return parse(raw)

    async def get(self, path: str, **more: Any) -> tuple[aiohttp.ClientResponse, bytes]:
        async with self.session.get(self.url + path, **more) as response:
            return response, await response.read()

    async def settled(self) -> None:
        """Until nothing is running and no permit is taken."""
        await until(lambda: not self.router.running and not self.router.inside)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the conditions are the router's, which signals nothing
            await asyncio.sleep(0.005)


def parse(raw: bytes) -> list[Any]:
    """The events of a stream, checking the framing of each."""
    *events, rest = raw.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events if event != b":")
    return [json.loads(event[6:]) for event in events if event != b":"]


def byte_level(eos: str | None = "</s>") -> Tokenizer:
    rust = tiny.byte_level()
    return Tokenizer(rust, [rust.token_to_id(eos)] if eos else [])


@contextlib.asynccontextmanager
async def serve(
    *flags: str, script: Script | None = None, limits: Limits = LIMITS, step_seconds: float = 0.0, tracing: Tracing | None = None
) -> AsyncIterator[Front]:
    tokenizer = byte_level()
    router = FakeRouter(tokenizer, script, step_seconds=step_seconds, limits=limits)
    services = Services(tokenizer=tokenizer, tracing=tracing or NoTracing())
    runner = make_runner(build_app(Config.parse(["--model-id", "tiny", *flags], {}), router, services))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            yield Front(f"http://127.0.0.1:{port}", router, services, session)
    finally:
        await router.close()
        await runner.cleanup()
        tokenizer.close()
