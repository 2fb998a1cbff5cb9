"""The face the server sees: one router with its phase, limits, permits and replicas.

Owns admission and the phases of the server's life; leaves steps to the replicas. Everything here runs on the event loop and returns at
once; only `drain` and `close` wait.

    LOADING ──ready──▶ READY ──drain──▶ DRAINING            LOADING again while a worker that died is replaced
       └───────────────── gave up ───────────────▶ FAILED
"""

from __future__ import annotations

import asyncio
import enum
import time

import msgspec
import structlog

from forerun.config import Config
from forerun.messages import Inject, Progress, Ready, SamplingParams, Start
from forerun.router import limits as limit_rules
from forerun.router.balance import Balance
from forerun.router.controller.journal import View
from forerun.router.controller.make import make
from forerun.router.guesses import Controller
from forerun.router.limits import LimitError as LimitError
from forerun.router.limits import Limits as Limits
from forerun.router.link import Death, Link
from forerun.router.observer import Load, Observer
from forerun.router.policy import Policy
from forerun.router.queue import Gate
from forerun.router.queue import Permit as Permit
from forerun.router.replica import Replica, State
from forerun.router.request import Failure, Request, Sequence, TokenStream

LOADING_RETRY_SECONDS = 2
DRAIN_POLL_SECONDS = 0.02
_log = structlog.get_logger("forerun.router")


class Phase(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Refused(Exception):
    """A request that is not taken: 429 with Retry-After. `kind` is TGI's error_type."""

    def __init__(self, message: str, kind: str = "overloaded", retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_seconds = retry_after_seconds


class Router:
    """`start`: what a worker is told; `open` starts one. `environment`: that of the worker process."""

    def __init__(self, config: Config, start: Start, observer: Observer, environment: dict[str, str] | None = None) -> None:
        self.limits: Limits | None = None
        """None until a worker was ready"""
        self.failed = asyncio.Event()
        """set when the router gave up; `death` says why"""
        self.prelude: Progress | None = None
        """what goes on before there is a worker: a download"""
        self.became_ready = asyncio.Event()
        self._config = config
        self._start = start
        self._observer = observer
        self._environment = environment
        self._gate = Gate(config.limits.max_concurrent_requests, time.monotonic)
        self._balance = Balance()
        self._replicas: list[Replica] = []
        self._draining = False

    def __repr__(self) -> str:
        return f"{self.phase.value}, {self._gate.inside} requests; {self._replicas}"

    def open(self, tokenizer: str = "") -> None:
        """Start the workers. Called once, on the event loop. `tokenizer`: the model's tokenizer.json, which grammars take."""
        self._start = msgspec.structs.replace(self._start, tokenizer=tokenizer)
        self._replicas.append(Replica(self._start, self._spawn, self, self._observer))

    @property
    def phase(self) -> Phase:
        if self.failed.is_set():
            return Phase.FAILED
        if self._draining:
            return Phase.DRAINING
        ready = any(replica.state is State.READY for replica in self._replicas)
        return Phase.READY if ready else Phase.LOADING

    @property
    def progress(self) -> Progress | None:
        """How far loading is, while something loads."""
        return next((replica.progressed for replica in self._replicas if replica.progressed), self.prelude)

    @property
    def ready(self) -> Ready | None:
        """What a worker offers; None until one was ready."""
        return next((replica.offer for replica in self._replicas if replica.offer), None)

    @property
    def death(self) -> Death | None:
        """Why the router gave up."""
        return next((replica.death for replica in self._replicas if replica.death), None) if self.failed.is_set() else None

    @property
    def failure(self) -> Failure | None:
        death = self.death
        return Failure(death.reason, "generation", 503) if death else None

    def enter(self, permits: int = 1) -> Permit:
        """The right to be in the server; hold it until the answer is sent. Raises Refused."""
        phase = self.phase
        if phase is not Phase.READY:
            raise Refused(_REFUSALS[phase], retry_after_seconds=LOADING_RETRY_SECONDS)
        permit = self._gate.enter(permits)
        if permit is None:
            raise Refused("Model is overloaded", retry_after_seconds=self._gate.retry_after_seconds(permits))
        return permit

    def submit(self, request: Request, stream: TokenStream, params: SamplingParams | None = None) -> Sequence:
        """Queue one sequence of a request that holds a permit. `params` instead of the request's own (the seeds of `best_of`). Raises
        Refused when nothing can be generated any more."""
        choices = [replica for replica in self._replicas if replica.offer and replica.state is not State.FAILED]
        if not choices:
            raise Refused(_REFUSALS[self.phase], retry_after_seconds=LOADING_RETRY_SECONDS)
        sequence = Sequence(request, params or request.params, stream, list(request.tokens), queued_at=time.monotonic())
        try:
            self._balance.choose(choices, request).submit(sequence)
        except ValueError as error:
            raise Refused(str(error)) from error
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants it any more; its stream hears nothing from now on. Idempotent, also after its end."""
        sequence.cancelled = True
        for replica in self._replicas:
            if sequence in replica:
                replica.cancel(sequence)

    def load(self) -> Load:
        """Of all replicas together."""
        loads = [replica.load() for replica in self._replicas]
        return Load(
            waiting=sum(load.waiting for load in loads),
            running=sum(load.running for load in loads),
            used_pages=sum(load.used_pages for load in loads),
            cached_pages=sum(load.cached_pages for load in loads),
            total_pages=sum(load.total_pages for load in loads),
            page_tokens=max((load.page_tokens for load in loads), default=1),
        )

    def look(self) -> list[View]:
        """What the controller of each replica thinks, and what it was told lately."""
        return [replica.look() for replica in self._replicas]

    def inject(self, message: Inject) -> None:
        """Test hook. Raises PermissionError unless the server was started with test faults."""
        if not self._start.test_faults:
            raise PermissionError("faults can be injected only into a server that was started with --test-faults")
        for replica in self._replicas:
            replica.inject(message)

    def beat_age(self) -> float:
        """Seconds since a worker's last sign of life: of the one that is silent for longest; infinite while one is missing."""
        return max((replica.beat_age() for replica in self._replicas), default=float("inf"))

    async def drain(self, seconds: float) -> None:
        """Take nothing new and let what is there end, for so long; then end the rest with an error. A worker that dies meanwhile is still
        replaced."""
        self._draining = True
        end = time.monotonic() + seconds
        # Permits and sequences have different owners, and this happens once in a server's life: look, do not be told.
        while (self._gate.inside or self._alive()) and time.monotonic() < end and not self.failed.is_set():  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        for replica in self._replicas:
            replica.fail_all(Failure("Request failed during generation: the server is shutting down", "generation", 424))

    async def close(self) -> None:
        """End what is still there with an error and stop the workers."""
        await self.drain(0)
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    # What a replica asks and tells (replica.Overseer).

    def terms(self, ready: Ready) -> Policy:
        limits = limit_rules.resolve(self._config, ready)
        asked = self._config.limits.max_total_tokens
        if asked is not None and limits.max_total_tokens < asked:
            _log.warning("The model allows less than --max-total-tokens", asked=asked, model=limits.max_total_tokens)
        self.limits = limits
        return limit_rules.policy(self._config, limits)

    def controller(self, ready: Ready) -> Controller:
        return make(self._config.speculation, ready, _guard_changed)

    def changed(self) -> None:
        states = [replica.state for replica in self._replicas]
        if State.READY in states:
            self.became_ready.set()
        if states and all(state is State.FAILED for state in states):
            self.failed.set()

    def _spawn(self, start: Start, replica: Replica) -> Link:
        return Link(start, replica, self._config.device.worker_timeout, self._environment)

    def _alive(self) -> int:
        return sum(replica.alive for replica in self._replicas)


_REFUSALS = {
    Phase.LOADING: "Model is loading",
    Phase.READY: "Model is overloaded",
    Phase.DRAINING: "The server is shutting down",
    Phase.FAILED: "The model cannot generate any more",
}


def _guard_changed(least: int, state: str) -> None:
    """A breaker opened, or closed again."""
    what = "Guessing lost time and is switched off" if state == "open" else "Guessing pays again"
    _log.info(what, sequences=f"{least} and more" if least > 1 else "1")
