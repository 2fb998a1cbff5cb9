"""What tests of the router share: a stream that remembers, an observer that counts, and a router with a real echo worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator

from forerun.config import Batching, Config, Device, Limits, Testing
from forerun.engine.echo import answer
from forerun.messages import SamplingParams, Start
from forerun.router.observer import Load, StepReport
from forerun.router.request import Failure, Request, Run
from forerun.router.service import Router

VOCAB = 32000


class Collector:
    """A TokenStream. `stop_at`: a text rule ends it after so many tokens."""

    def __init__(self, stop_at: int = 0) -> None:
        self.got: list[int] = []
        self.runs: list[Run] = []
        self.reason = ""
        self.failure: Failure | None = None
        self.over = asyncio.Event()
        self._stop_at = stop_at

    def tokens(self, run: Run) -> bool:
        assert not self.over.is_set(), "called after the end"
        self.runs.append(run)
        self.got += run.tokens
        if self._stop_at and len(self.got) >= self._stop_at:
            self.over.set()
            return True
        return False

    def end(self, reason: str) -> None:
        assert not self.over.is_set(), "called after the end"
        self.reason = reason
        self.over.set()

    def fail(self, failure: Failure) -> None:
        assert not self.over.is_set(), "called after the end"
        self.failure = failure
        self.over.set()

    async def wait(self, seconds: float = 20.0) -> None:
        await asyncio.wait_for(self.over.wait(), seconds)


class Counting:
    """An Observer."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.loads: list[Load] = []
        self.deaths: list[str] = []
        self.counts: Counter[str] = Counter()

    def load(self, load: Load) -> None:
        self.loads.append(load)

    def admitted(self, sequences: int) -> None:
        self.counts["admitted"] += sequences

    def stepped(self, report: StepReport) -> None:
        self.steps.append(report)

    def prefix(self, hit_tokens: int, prompt_tokens: int) -> None:
        self.counts["hit"] += hit_tokens
        self.counts["prompt"] += prompt_tokens

    def preempted(self, sequences: int) -> None:
        self.counts["preempted"] += sequences

    def worker_died(self, reason: str) -> None:
        self.deaths.append(reason)


def request(prompt: list[int], new: int = 10, *, seed: int = 1, sample: bool = True, deadline: float | None = None) -> Request:
    params = SamplingParams(seed, len(prompt), new, sample=sample)
    return Request(f"test-{prompt[0]}", prompt, params, time.monotonic(), deadline)


def expected(what: Request) -> list[int]:
    return answer(what.tokens, what.params, VOCAB)


def configuration(*, concurrent: int = 128, batch: int | None = None, pool: int | None = None, timeout: float = 30.0) -> Config:
    return Config(
        limits=Limits(max_concurrent_requests=concurrent),
        batching=Batching(max_batch_size=batch, max_batch_total_tokens=pool),
        device=Device(worker_timeout=timeout),
        testing=Testing(echo=True, test_faults=True),
    )


@contextlib.asynccontextmanager
async def running(config: Config | None = None, start: Start | None = None) -> AsyncIterator[tuple[Router, Counting]]:
    """A router whose worker is ready."""
    observer = Counting()
    start = start or Start("none", echo=True, test_faults=True)
    router = Router(config or configuration(), start, observer)
    router.open()
    await asyncio.wait_for(router.became_ready.wait(), 10)
    try:
        yield router, observer
    finally:
        await router.close()


def worker_pid(router: Router) -> int:
    """Of the only worker."""
    link = router._replicas[0]._link
    assert link is not None
    return link.pid


def children() -> list[int]:
    """Workers that this process started and that are still there (not the servers that other tests keep running)."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [pid for pid in map(int, file.read().split()) if b"forerun.engine.worker" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
