"""The step loop of one worker group: plans go down, results come up, tokens go to their streams.

Owns the worker (through a `Link`), its scheduler, the sequences that are alive in it, and what happens when the worker dies. Decides
nothing about batching (the scheduler does) and knows nothing of text (the streams do). Everything runs synchronously on the event
loop, when a request comes or a frame arrives:

    submit ─▶ add ──┐                          plan ─▶ Link.send: at most two plans on the way, so that the worker
                    ├─▶ pump while there is a                     starts the next step the moment it has answered one
    result ─▶ apply ┘   └─▶ then tell the streams what the result brought

The front holds every token, and the dice depend on seed and index only. So when a worker dies, the scheduler puts its sequences back
into the queue, a new worker is started, and the streams go on as if nothing had happened. A sequence that kills one worker after the
other ends alone (see `suspects.py`); workers that die of something else end the replica at the third death within a minute.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from forerun.messages import Inject, Profile, Progress, Ready, Start, StepResult
from forerun.router.controller.fallible import Fallible
from forerun.router.controller.journal import Journal, View, sources_of
from forerun.router.controller.make import profile_of
from forerun.router.events import Event, Tally
from forerun.router.guesses import Controller, no_guesses
from forerun.router.link import Death, Link
from forerun.router.observer import Load, Observer
from forerun.router.policy import Policy
from forerun.router.report import report_of, round_of
from forerun.router.request import Failure, Run, Sequence
from forerun.router.scheduler import Scheduler
from forerun.router.suspects import Suspects

MOST_DEATHS = 3
DEATHS_SECONDS = 60.0
BACKOFF_SECONDS = (0.0, 0.0, 1.0)
"""Pause before a worker is started again, by the number of deaths within the last minute."""
RETRY_SECONDS = 1.0
"""between two tries to start a process on a machine that has no room for it"""
TICK_SECONDS = 0.25
LOG_SECONDS = 2.0
"""between two lines about the progress of one stage"""

_log = structlog.get_logger("forerun.router")
_worker_log = structlog.get_logger("forerun.worker")
_NO_RESULT = (StepResult(0), 0.0)


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


class Overseer(Protocol):
    """Who hears what becomes of a replica."""

    def terms(self, ready: Ready) -> Policy:
        """How to batch on this worker, which is ready. Raises ValueError when it cannot serve what was asked of it."""
        ...

    def controller(self, ready: Ready) -> Controller:
        """Who decides how much is guessed on this worker. Raises ValueError as `terms`."""
        ...

    def changed(self) -> None:
        """`state` is another one than before."""
        ...


Spawn = Callable[[Start, "Replica"], Link]
"""starts a worker that tells the replica what happens to it"""


class Replica:
    def __init__(self, start: Start, spawn: Spawn, overseer: Overseer, observer: Observer) -> None:
        self.state = State.LOADING
        self.progressed: Progress | None = None
        self.offer: Ready | None = None
        """what the worker offers; None until one was ready"""
        self.death: Death | None = None
        """why it failed"""
        self._start = start
        self._spawn = spawn
        self._overseer = overseer
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._scheduler: Scheduler | None = None
        self._controller: Controller = no_guesses
        self._journal = Journal([])
        self._live: dict[Sequence, None] = {}
        self._sent: collections.deque[float] = collections.deque()
        """when each plan on the way was sent"""
        self._landing = _NO_RESULT
        """the result being applied, and how long its step took"""
        self._last_result_at = 0.0
        self._logged_at = 0.0
        self._deaths: collections.deque[float] = collections.deque(maxlen=MOST_DEATHS)
        self._suspects = Suspects()
        self._trusted = False
        """a worker brought a token since a sequence was last blamed for a death"""
        self._pumping = False
        self._closed = False
        self._link: Link | None = None
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        self._start_worker()

    def __repr__(self) -> str:
        return f"{self.state.value}: {self._scheduler if self._scheduler else 'no worker yet'}"

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._live

    @property
    def alive(self) -> int:
        """Sequences that are waiting or running."""
        return len(self._live)

    # What the router asks for.

    def submit(self, sequence: Sequence) -> None:
        """Queue it. Raises ValueError for one that could never run."""
        assert self._scheduler is not None, "nothing is submitted before the worker was ready"
        self._scheduler.add(sequence)
        self._live[sequence] = None
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump_and_tell)

    def cancel(self, sequence: Sequence) -> None:
        """Its stream hears nothing any more. Idempotent."""
        if self._scheduler is not None:
            self._scheduler.cancel(sequence)
        self._leave(sequence)

    def fail_all(self, failure: Failure) -> None:
        for sequence in list(self._live):
            self.cancel(sequence)
            self._tell_failure(sequence, failure)

    def load(self) -> Load:
        return self._scheduler.load() if self._scheduler else Load(0, 0, 0, 0, 0, 1)

    def look(self) -> View:
        """What the controller thinks, and what it has heard."""
        return View(self._controller.snapshot(), self._journal.curves(), list(self._journal.rounds))

    def inject(self, message: Inject) -> None:
        if self._link is not None:
            self._link.send(message)

    def beat_age(self) -> float:
        """Seconds since the worker's last sign of life; infinite while there is no worker."""
        return self._link.beat_age() if self._link else float("inf")

    async def close(self) -> None:
        """Stop the worker. Sequences that are alive hear nothing: fail them first."""
        self._closed = True
        self._timer.cancel()
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    # What the worker says (link.Listener).

    def progress(self, message: Progress) -> None:
        now = time.monotonic()
        if self.progressed is None or self.progressed.stage != message.stage or now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            _log.info(f"Worker: {message.stage}", done=message.done, total=message.total)
        self.progressed = message

    def ready(self, message: Ready) -> None:
        try:
            policy = self._overseer.terms(message)
            if self._scheduler is None:
                self._controller = Fallible(lambda: self._overseer.controller(message))
                self._journal = Journal(sources_of(message.drafter))
                self._scheduler = Scheduler(message, policy, self._controller)
            else:
                self._scheduler.restart(message, self._suspects.several)
                if self._controller.snapshot().rough and not message.rough:  # the one before did not come to tell it
                    self._controller.profiled(profile_of(message))
        except ValueError as error:
            self._give_up(Death(str(error), fatal=True))
            return
        if self.offer is not None:
            _log.info("Worker ready again", alive=len(self._live))
        self.offer = message
        self.progressed = None
        self._become(State.READY)
        self._pump_and_tell()

    def profiled(self, message: Profile) -> None:
        self._controller.profiled(message)

    def result(self, message: StepResult) -> None:
        assert self._scheduler is not None
        now = time.monotonic()
        began = max(self._sent.popleft(), self._last_result_at)
        self._last_result_at = now
        self._landing = message, now - began
        for failure in message.draft_failures:
            _log.error("The drafter failed; answers go on without its guesses", reason=failure)
        try:
            events = self._scheduler.apply(message, now)
            self._pump(now)
        except Exception:
            # Whatever the worker said or the scheduler got wrong, a new worker and a cleared table put it right; the streams go on.
            _log.exception("A result could not be applied")
            self._lose("sent a result that could not be applied")
            return
        self._tell(events)
        self._tell(self._scheduler.take_events())
        self._observer.load(self._scheduler.load())

    def said(self, line: str) -> None:
        _worker_log.info(line)

    def died(self, death: Death) -> None:
        self._link = None
        if self.state is State.FAILED:
            return
        self._sent.clear()
        self._observer.worker_died(death.reason)
        now = time.monotonic()
        if not self._blame(death):
            self._deaths.append(now)
        recent = sum(now - then < DEATHS_SECONDS for then in self._deaths)
        if death.fatal and self.offer is None:
            self._give_up(death)
        elif recent >= MOST_DEATHS:
            self._give_up(Death(f"{recent} workers died within a minute, the last because: {death.reason}", death.cure))
        else:
            _log.error("Worker died, starting another", reason=death.reason, cure=death.cure, alive=len(self._live))
            if self._scheduler is not None:
                self._scheduler.restart()
            self.progressed = None
            self._become(State.LOADING)
            self._loop.call_later(BACKOFF_SECONDS[recent], self._start_worker)

    def _blame(self, death: Death) -> bool:
        """Fail the sequence that must have killed the worker, if there is one, and forget the deaths: they were its fault. Unless blame
        follows on blame without a token in between: then it is the worker's own."""
        guilty = self._suspects.died(self._scheduler.busy()) if self._scheduler else None
        if guilty is None:
            return False
        self.cancel(guilty)
        _log.error("Request kills workers, ended it", request_id=guilty.request.id, reason=death.reason)
        reason = f"two workers in a row died in a step of this request, the last because: {death.reason}"
        self._tell_failure(guilty, Failure(f"Request failed during generation: {reason}", "generation", 424))
        trusted, self._trusted = self._trusted, False
        if trusted:
            self._deaths.clear()
        return trusted

    def _tell_failure(self, sequence: Sequence, failure: Failure) -> None:
        """A stream that breaks on the news must not keep others from hearing theirs."""
        try:
            sequence.stream.fail(failure)
        except Exception:
            _log.exception("A stream broke when it was told of its failure", request_id=sequence.request.id)

    # What the scheduler says (events.Listener).

    def tokens(self, sequence: Sequence, run: Run) -> None:
        if run.asked:
            self._controller.landed(sequence, run.drafted, run.accepted, run.expected)
        if sequence.cancelled:
            return
        try:
            done = sequence.stream.tokens(run)
        except Exception:
            self.cancel(sequence)
            sequence.stream.fail(Failure("The answer could not be written", "generation", 500))
            raise
        if done:
            self.cancel(sequence)

    def ended(self, sequence: Sequence, reason: str) -> None:
        if not sequence.cancelled:
            self._leave(sequence)
            sequence.stream.end(reason)

    def failed(self, sequence: Sequence, failure: Failure) -> None:
        if not sequence.cancelled:
            self._leave(sequence)
            sequence.stream.fail(failure)

    def admitted(self, sequence: Sequence, hit_tokens: int) -> None:
        if sequence.preemptions == 0 and len(sequence.tokens) == sequence.params.prompt_tokens:
            self._observer.prefix(hit_tokens, sequence.params.prompt_tokens)

    def preempted(self, sequence: Sequence) -> None:
        self._observer.preempted(1)

    def stepped(self, tally: Tally) -> None:
        result, seconds = self._landing
        round, report = round_of(tally, result, seconds), report_of(tally, result, seconds)
        self._controller.stepped(round)
        self._journal.heard(round, report.sources)
        self._trusted = self._trusted or tally.tokens > 0
        self._observer.stepped(report)

    # How it goes on.

    def _pump(self, now: float) -> None:
        """Send plans as long as there is something to do and fewer than two are on the way."""
        if self.state is not State.READY or self._link is None:
            return
        assert self._scheduler is not None
        while (plan := self._scheduler.plan(now)) is not None:
            self._link.send(plan)
            self._sent.append(now)
            if plan.admit:
                self._observer.admitted(len(plan.admit))

    def _pump_and_tell(self) -> None:
        self._pumping = False
        if self._scheduler is None:
            return
        try:
            self._pump(time.monotonic())
        except Exception:
            _log.exception("No plan could be made")
            self._lose("waited for a plan that could not be made")
            return
        self._tell(self._scheduler.take_events())

    def _tell(self, events: Iterable[Event]) -> None:
        """Streams must not raise. If one does, it is the only one that suffers."""
        for event in events:
            try:
                event.tell(self)
            except Exception:
                _log.exception("A stream could not take what came")

    def _tick(self) -> None:
        """Deadlines pass and gauges are read also while no step ends."""
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        if self._scheduler is not None:
            self._scheduler.expire(time.monotonic())
            self._pump_and_tell()
            self._observer.load(self._scheduler.load())

    def _leave(self, sequence: Sequence) -> None:
        self._live.pop(sequence, None)
        self._controller.forget(sequence)

    def _become(self, state: State) -> None:
        self.state = state
        self._overseer.changed()

    def _lose(self, reason: str) -> None:
        if self._link is not None:
            self._link.kill(reason)

    def _start_worker(self) -> None:
        if self._closed:
            return
        try:
            self._link = self._spawn(self._start, self)
        except OSError as error:
            # This machine is short of something; that is no worker's death, and it passes.
            if self.offer is None:
                self.died(Death(f"no worker could be started: {error}"))
            else:
                _log.error("No worker could be started, trying again", reason=str(error), alive=len(self._live))
                self._loop.call_later(RETRY_SECONDS, self._start_worker)

    def _give_up(self, death: Death) -> None:
        self.death = death
        _log.error("Worker failed", reason=death.reason, cure=death.cure)
        self.fail_all(Failure(f"Request failed during generation: {death.reason}", "generation", 424))
        self._become(State.FAILED)
