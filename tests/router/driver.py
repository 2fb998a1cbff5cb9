"""A scheduler and a model worker in one loop, and streams that check themselves: what the tests of the batcher share."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable

from forerun.messages import Ready, SamplingParams, StepPlan, StepResult
from forerun.router.events import Tally
from forerun.router.guesses import Budget, no_guesses
from forerun.router.policy import Policy
from forerun.router.request import Failure, Request, Run, Sequence
from forerun.router.scheduler import Scheduler
from tests.router.worker_model import STEADY, WorkerModel, alternatives, answer, prompt_logprob, ready


class Stream:
    """Records; complains about anything after the end. `stop_after`: the text rule, in tokens."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.got: list[int] = []
        self.echo: list[float] = []
        self.echo_top: list[list[tuple[int, float]]] = []
        self.reason = ""
        self.failure: Failure | None = None
        self.stop_after = stop_after

    def tokens(self, run: Run) -> bool:
        assert not self.over, "tokens after the end"
        self.got += run.tokens
        self.echo += run.prompt_logprobs
        self.echo_top += run.prompt_top
        return self.stop_after is not None and len(self.got) >= self.stop_after

    def end(self, reason: str) -> None:
        assert not self.over
        self.reason = reason

    def fail(self, failure: Failure) -> None:
        assert not self.over
        self.failure = failure

    @property
    def over(self) -> bool:
        return bool(self.reason) or self.failure is not None


@dataclasses.dataclass
class Case:
    """A sequence with its stream."""

    sequence: Sequence
    stream: Stream

    @property
    def prompt(self) -> list[int]:
        return self.sequence.request.tokens

    def check(self, vocab: int) -> None:
        """What came so far is what had to come."""
        params = self.sequence.params
        tokens, reason = answer(self.prompt, params.seed, params.max_new_tokens, vocab)
        assert self.stream.got == tokens[: len(self.stream.got)], f"{self.stream.got} instead of {tokens}"
        assert self.sequence.tokens == self.prompt + self.stream.got or self.sequence.cancelled
        if self.stream.reason:
            assert (self.stream.got, self.stream.reason) == (tokens, reason)
            if params.prompt_logprobs:
                assert self.stream.echo == [prompt_logprob(self.prompt, i) for i in range(1, len(self.prompt))]
                assert self.stream.echo_top == alternatives(self.stream.echo)


class Driver:
    """`plans`: sent and not answered; `turn` makes one and answers one, `land` and `plan` take them apart."""

    def __init__(
        self,
        ready: Ready,
        policy: Policy | None = None,
        budget: Budget = no_guesses,
        accept: Callable[[int], int] = lambda guess: 0,
    ) -> None:
        self.ready = ready
        self.accept = accept
        self.scheduler = Scheduler(ready, policy, budget)
        self.worker = WorkerModel(ready, accept)
        self.plans: deque[StepPlan] = deque()
        self.cases: list[Case] = []
        self.now = 1.0
        self.preemptions = 0
        self.hits: dict[Sequence, int] = {}
        self.order: list[Sequence] = []
        """in which they were admitted first"""
        self.tallies: list[Tally] = []

    # Listener

    def tokens(self, sequence: Sequence, run: Run) -> None:
        if not sequence.cancelled and sequence.stream.tokens(run):
            self.scheduler.cancel(sequence)

    def ended(self, sequence: Sequence, reason: str) -> None:
        if not sequence.cancelled:
            sequence.stream.end(reason)

    def failed(self, sequence: Sequence, failure: Failure) -> None:
        if not sequence.cancelled:
            sequence.stream.fail(failure)

    def admitted(self, sequence: Sequence, hit_tokens: int) -> None:
        if sequence not in self.hits:
            self.hits[sequence] = hit_tokens
            self.order.append(sequence)

    def preempted(self, sequence: Sequence) -> None:
        self.preemptions += 1

    def stepped(self, tally: Tally) -> None:
        self.tallies.append(tally)

    # Moves

    def add(self, prompt: list[int], new: int = 4, *, stop_after: int | None = None, seed: int = 0, **more: object) -> Case:
        echo = bool(more.pop("prompt_logprobs", False))
        params = SamplingParams(seed, len(prompt), new, prompt_logprobs=echo)
        request = Request(f"r{len(self.cases)}", list(prompt), params, self.now, **more)  # type: ignore[arg-type]
        stream = Stream(stop_after)
        case = Case(Sequence(request, params, stream, list(prompt)), stream)
        self.cases.append(case)
        self.scheduler.add(case.sequence, self.now)
        return case

    def steady(self, prompt: list[int], new: int, **more: object) -> Case:
        """One that will not end before `new` tokens."""
        return self.add(prompt, new, seed=STEADY, **more)  # type: ignore[arg-type]

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        self.tell()
        if plan is not None:
            self.plans.append(plan)
        return plan

    def land(self) -> StepResult:
        """The worker answers the oldest plan."""
        result = self.worker.step(self.plans.popleft())
        for event in self.scheduler.apply(result, self.now):
            event.tell(self)
        return result

    def tell(self) -> None:
        for event in self.scheduler.take_events():
            event.tell(self)

    def turn(self) -> None:
        """As the step loop does it: keep two plans on the way, take one result."""
        while self.plan() is not None:
            pass
        if self.plans:
            self.land()

    def restart(self) -> None:
        """The worker dies with everything it knew."""
        self.plans.clear()
        self.worker = WorkerModel(self.ready, self.accept)
        self.worker.step_number = self.scheduler._number
        self.scheduler.restart()
        self.tell()

    def drain(self, most: int = 20_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            self.turn()
            if not self.plans and self.plan() is None:
                break
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.used_pages) == (0, 0, 0), f"stuck: {self.scheduler}"

    def check(self) -> None:
        for case in self.cases:
            case.check(self.ready.vocab)


def prompt(length: int, start: int = 0) -> list[int]:
    """Prompts with different `start` have nothing in common."""
    rng = random.Random(start)
    return [rng.randint(1, 96) for _ in range(length)]


def roomy(**more: object) -> Driver:
    policy = more.pop("policy", None)
    offer = ready(**{"rows": 8, "pages": 64, "vocab": 97, "max_step_tokens": 256} | more)  # type: ignore[arg-type]
    return Driver(offer, policy)  # type: ignore[arg-type]


def known(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [feed.known for feed in plan.feed]
