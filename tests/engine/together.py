"""The real scheduler over the real engine in one process, and streams that know what they must hear."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable

import msgspec
import torch

from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Needs, Terms
from forerun.engine.grammar import Grammars, Threads
from forerun.messages import SamplingParams, StepPlan, StepResult
from forerun.router.guesses import Allowance
from forerun.router.policy import Policy
from forerun.router.request import Failure, Request, Run, Sequence
from tests.engine.test_identity import ALL as KINDS
from tests.engine.test_identity import prompt_of
from tests.engine.tiny import VOCAB, AtOnce, Sequence_, alone, params_for, random_tree, tables, tiny_engine
from tests.router.driver import Driver

UNKNOWN = -1


@functools.cache
def answer_of(
    kind: str, seed: int, length: int, dtype: torch.dtype, echo: bool = False, choice: int = 0, stops: tuple[int, ...] = ()
) -> Sequence_:
    """What a request of this kind is answered, alone and without guesses, to its 24th token. `choice`: of several answers to it, which have
    dice of their own. `stops`: ids that end it beside those of its kind."""
    prompt = prompt_of(seed, length)
    params = params_for(prompt, prompt_logprobs=echo, **KINDS[kind])
    changes = {"seed": (params.seed + choice) % 2**64, "stop_ids": (*params.stop_ids, *stops)}
    return alone(prompt, msgspec.structs.replace(params, **changes), dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Expected:
    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    echo: list[float]
    reason: str


def cut(whole: Sequence_, params: SamplingParams) -> Expected:
    """The answer to the same request with another limit and other stops: token by token, the limit before the stop."""
    count, reason = 0, ""
    while not reason:
        count += 1
        reason = "length" if count >= params.max_new_tokens else "eos_token" if whole.tokens[count - 1] in params.stop_ids else ""
    return Expected(whole.tokens[:count], whole.logprobs[:count], whole.top[:count], whole.prompt_logprobs, reason)


class Stream:
    """Compares whatever comes, at once. `stop_after`: a text rule ends it with this token."""

    def __init__(self, expected: Expected, stop_after: int | None = None) -> None:
        self.expected = expected
        self.stop_after = stop_after
        self.runs: list[Run] = []
        self.heard = 0
        self.echo: list[float] = []
        self.reason = ""
        self.failure: Failure | None = None
        self.over = False

    def tokens(self, run: Run) -> bool:
        assert not self.over, "it was told to stop, or has ended"
        start, self.heard = self.heard, self.heard + len(run.tokens)
        part = slice(start, self.heard)
        expected = self.expected
        assert (run.tokens, run.logprobs, run.top) == (expected.tokens[part], expected.logprobs[part], expected.top[part])
        if run.tokens:
            assert 0 <= run.accepted <= run.drafted <= run.asked
            assert len(run.tokens) == run.accepted + 1 or (self.heard == len(expected.tokens) and len(run.tokens) == run.accepted)
        self.runs.append(run)
        self.echo += run.prompt_logprobs
        self.over = self.stop_after is not None and self.heard >= self.stop_after
        return self.over

    def end(self, reason: str) -> None:
        assert not self.over and self.heard == len(self.expected.tokens)
        assert self.echo == self.expected.echo
        assert reason == self.expected.reason
        self.reason, self.over = reason, True

    def fail(self, failure: Failure) -> None:
        assert not self.over
        self.failure, self.over = failure, True


class Gambler:
    """A budget without sense: none, a price, or tolls."""

    def __init__(self, seed: int, most: int) -> None:
        self._random = random.Random(seed)
        self._most = most

    def __call__(self, sequences: list[Sequence], prompts: int = 0) -> Allowance | None:
        dice = self._random
        if not self._most or dice.random() < 0.2:
            return None
        guess = [dice.choice([0, 1, 2, self._most]) for _ in sequences]
        if dice.random() < 0.5:
            return Allowance(guess, dice.randint(0, sum(guess)), dice.choice([0.0, 0.1, 0.6]))
        step = dice.choice([0.0, 0.01, 0.2])
        toll = [step * (n + 1) for n in range(sum(guess))]
        weights = [dice.choice([0.5, 1.0, 4.0]) for _ in sequences] if dice.random() < 0.5 else []
        return Allowance(guess, sum(guess), 0.0, toll, dice.choice([0.0, 0.001]), dice.choice([1.0, 0.5]), dice.choice([0.0, 1e5]), weights)


class Bridge:
    """The engine behind the wire, with grammars of its own."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype) -> None:
        self.grammars = Grammars(tables, Threads(AtOnce(), AtOnce()))
        self.engine = tiny_engine(drafter, dtype, grammars=self.grammars)

    def step(self, plan: StepPlan) -> StepResult:
        result = self.engine.step(msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan))
        return msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult)


class Together(Driver):
    """`open_drafter`: for each worker that is started."""

    def __init__(
        self, open_drafter: Callable[[], Drafter], dtype: torch.dtype, policy: Policy, budget: Callable[[list[Sequence]], Allowance | None]
    ) -> None:
        self.drafter = open_drafter()
        self._open = open_drafter
        self._dtype = dtype
        bridge = Bridge(self.drafter, dtype)
        super().__init__(bridge.engine.ready, policy, budget)
        self.bridge = bridge
        self.streams: list[tuple[Sequence, Stream]] = []

    def ask(
        self, kind: str, seed: int, length: int, *, limit: int = 24, stop: int | None = None, echo: bool = False, **more: object
    ) -> tuple[Sequence, Stream]:
        """`stop`: its token of this number is a stop id, if it has so many."""
        stop_after, choice = more.pop("stop_after", None), int(more.pop("choice", 0))  # type: ignore[call-overload]
        whole = answer_of(kind, seed, length, self._dtype, echo, choice)
        if stop is not None and stop < len(whole.tokens):
            stops = (whole.tokens[stop], VOCAB - 1)
            if "grammar" in KINDS[kind]:  # allows what ends a row wherever the text may end, so that the answer may be another one
                whole = answer_of(kind, seed, length, self._dtype, echo, choice, stops)
            else:
                whole = dataclasses.replace(whole, params=msgspec.structs.replace(whole.params, stop_ids=stops))
        params = msgspec.structs.replace(whole.params, max_new_tokens=limit)
        request = Request(f"r{len(self.streams)}", list(whole.prompt), params, self.now, cache=not echo, **more)  # type: ignore[arg-type]
        stream = Stream(cut(whole, params), stop_after)  # type: ignore[arg-type]
        sequence = Sequence(request, params, stream, list(whole.prompt))
        self.streams.append((sequence, stream))
        self.scheduler.add(sequence, self.now)
        return sequence, stream

    def land(self) -> StepResult:
        result = self.bridge.step(self.plans.popleft())
        for event in self.scheduler.apply(result, self.now):
            event.tell(self)
        return result

    def restart(self) -> None:
        self.plans.clear()
        self.drafter = self._open()
        self.bridge = Bridge(self.drafter, self._dtype)
        self.scheduler.restart()
        self.tell()

    def close(self) -> None:
        """Everything ends, and everything is given back: pages and rows on both sides, matchers, and what is known of drafts."""
        self.drain(3000)
        assert all(stream.over or sequence.cancelled for sequence, stream in self.streams), "a sequence was forgotten"
        assert all(not stream.failure or stream.failure.kind == "deadline_exceeded" for _, stream in self.streams)
        self.bridge.step(StepPlan(1 << 40, drop=self.scheduler._rows.drops()))
        assert repr(self.bridge.engine._rows) == f"0 of {self.ready.rows} rows, 0 pages"
        assert self.scheduler._rows.free == self.scheduler.sizes.rows
        assert not self.scheduler._ledger.prefix._promises
        assert not any(compiled.rows for compiled in self.bridge.grammars._compiled.values())
        speculator = self.bridge.engine._speculator
        assert not speculator._answers and not speculator._trust._rows and not speculator._trust._offered


class Rogue:
    """A drafter that knows all answers (by how they begin) and makes of them whatever it likes: the truth, lies, nonsense, exceptions."""

    def __init__(self, seed: int, answers: list[list[int]], lazy: bool = True, failing: bool = False) -> None:
        self.needs = Needs(most=20, lazy=lazy, layers=() if lazy else (1,))
        self.rows: dict[int, list[int]] = {}
        self._dice = random.Random(seed)
        self._torch = torch.Generator().manual_seed(seed)
        self._answers = answers
        self._failing = failing

    def absorb(self, commit: Commit) -> None:
        self._perhaps_fail()
        for i, row in enumerate(commit.rows):
            start = commit.start[i]
            # What was found in a prefix cache is not told to a drafter that hears all: nothing was computed there.
            told = [] if start == 0 else self.rows.get(row, [UNKNOWN] * start)
            assert len(told) == start or self._failing, "nothing is told twice and nothing is left out"
            self.rows[row] = told + commit.tokens[i]

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self._perhaps_fail()
        assert set(rows) <= self.rows.keys()
        return [self._draft(self._future(self.rows[row]), most) for row, most in zip(rows, budget)]

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            self.rows.pop(row, None)
        self._perhaps_fail()

    def _perhaps_fail(self) -> None:
        if self._failing and self._dice.random() < 0.03:
            raise RuntimeError("the drafter does not feel well")

    def _future(self, known: list[int]) -> list[int]:
        """What comes after the root, which is one token behind what it was told."""
        fits = lambda answer: all(told in (UNKNOWN, token) for told, token in zip(known, answer))  # noqa: E731
        return next((answer[len(known) + 1 :] for answer in self._answers if len(answer) > len(known) and fits(answer)), [])

    def _draft(self, future: list[int], most: int) -> Draft:
        dice = self._dice
        kind = dice.randrange(6)
        if kind == 0:
            return Draft.none()
        if kind == 1:
            return Draft.chain(future[:most], [dice.random() for _ in future[:most]])
        if kind == 2:
            return Draft.chain([dice.choice([-1, VOCAB, 2**31, VOCAB - 1, *future[:1]]) for _ in range(most)])
        if kind == 3:
            tree = random_tree(self._torch, 3 * most, VOCAB, future[:4])
            return dataclasses.replace(tree, probe=[dice.random() < 0.2 for _ in tree.token])
        if kind == 4:
            strange = [dice.choice([0.0, 1.0, -1.0, 2.0, 1e300, float("inf"), *[math.nan] * self._failing]) for _ in range(most)]
            return Draft.chain((future + [VOCAB - 1] * most)[:most], strange)
        return random_tree(self._torch, most, VOCAB, future[:4])
