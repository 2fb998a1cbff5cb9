"""Guesses beside none without servers: two schedulers and two engines over one model in this process, which take turns step by step.

What a server adds (a front on cores that steps need, sockets, clients) is left out, and so is most of the weather: on a machine whose speed
moves by half within a second, two lanes that step in turns have the same one. Each has a clock of its own that runs while it does.

    lane A: step ─ apply, plan ─▶        step ─ apply, plan ─▶        …     steps count in its clock; what the front's
    lane B:                      step ─▶                      step ─▶ …     part took is told apart

    python -m forerun.bench.lanes --prompts FOLDER --only mt-bench --streams 16 --streams 32 --seconds 40
    python -m forerun.bench.lanes --speculator none …                                              none beside none: what chance does
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import gc
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from forerun.backends.registry import open_backend
from forerun.bench import steady, workloads
from forerun.bench.cli import machine, write
from forerun.bench.errors import BenchError
from forerun.bench.records import Record
from forerun.bench.speculation import FLAGS, differing
from forerun.bench.stats import median
from forerun.bench.steady import Steady
from forerun.bench.template import chat_form
from forerun.bench.unheard import Unheard
from forerun.config import Config, Speculation
from forerun.engine.build import assemble, leaves_room, open_auto
from forerun.engine.drafters.registry import Host, Setting, open_drafter
from forerun.engine.engine import Engine
from forerun.engine.models.load import find, load_model
from forerun.launch import start_message
from forerun.messages import Ready, SamplingParams, Start, StepPlan, StepResult
from forerun.router.controller.make import make
from forerun.router.events import Tally
from forerun.router.guesses import Controller
from forerun.router.policy import Policy
from forerun.router.report import round_of
from forerun.router.request import Failure, Request, Run
from forerun.router.request import Sequence as Stream
from forerun.router.scheduler import Scheduler
from forerun.train.target import stop_ids

Clock = Callable[[], float]


class Worker(Protocol):
    """An engine, or what stands for one."""

    @property
    def ready(self) -> Ready: ...
    def step(self, plan: StepPlan) -> StepResult: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A closed loop of so many `streams` over these prompts, greedy answers of at most `tokens`; the first ones are of all lengths up to
    that, so that streams are at all places of theirs from then on."""

    prompts: Sequence[list[int]]
    streams: int
    tokens: int
    stop: tuple[int, ...] = ()


class Lane:
    """A worker, its scheduler and its controller. `seconds`: its clock, in which steps count; `front_seconds`: what else it took. `done`: a
    stream found no more work. Hears of events as a server's streams do (`router/events.py`)."""

    def __init__(self, worker: Worker, controller: Controller, policy: Policy, work: Work, clock: Clock = time.perf_counter) -> None:
        self._worker, self._controller, self._work, self._clock = worker, controller, work, clock
        self._scheduler = Scheduler(worker.ready, policy, controller)
        self._plans: collections.deque[StepPlan] = collections.deque()
        self._places: dict[Stream, int] = {}
        self._landing: tuple[StepResult, float] | None = None
        self.records: list[Record] = []
        self.seconds = self.front_seconds = 0.0
        self.steps = self.nodes = self.held = self.roots = 0
        self.plain_seconds: list[float] = []
        """of steps in which all streams decoded and nothing else was done"""
        self.done = False
        for place in range(work.streams):
            self._submit((place + 1) / work.streams)

    def turn(self) -> None:
        """A step, and what the front does about it."""
        began = self._clock()
        if not self._plans:
            self._plan()
        planned = self._clock()
        result = self._worker.step(self._plans.popleft())
        stepped = self._clock()
        self.seconds += stepped - planned
        self._landing = result, stepped - planned
        for event in self._scheduler.apply(result, self.seconds):
            event.tell(self)
        self._plan()
        for event in self._scheduler.take_events():
            event.tell(self)
        self.front_seconds += self._clock() - stepped + planned - began
        self.steps += 1

    def _plan(self) -> None:
        while (plan := self._scheduler.plan(self.seconds)) is not None:
            self._plans.append(plan)

    def _submit(self, share: float = 1.0) -> None:
        number = len(self.records)
        if number == len(self._work.prompts):
            self.done = True
            return
        ids, most = self._work.prompts[number], math.ceil(share * self._work.tokens)
        params = SamplingParams(seed=0, prompt_tokens=len(ids), max_new_tokens=most, stop_ids=self._work.stop)
        stream = Stream(Request(str(number), ids, params, self.seconds), params, Unheard(), list(ids))
        self._places[stream] = number
        self.records.append(Record(due=self.seconds, cut=True))
        self._scheduler.add(stream, self.seconds)

    # router/events.Listener

    def tokens(self, sequence: Stream, run: Run) -> None:
        record = self.records[self._places[sequence]]
        record.arrivals += [self.seconds] * len(run.tokens)
        record.ids += run.tokens
        if run.asked:
            self._controller.landed(sequence, run.drafted, run.accepted, run.expected)

    def ended(self, sequence: Stream, reason: str) -> None:
        record = self.records[self._places.pop(sequence)]
        record.ended, record.cut = self.seconds, False
        self._controller.forget(sequence)
        self._submit()

    def failed(self, sequence: Stream, failure: Failure) -> None:
        raise BenchError(f"a request failed: {failure.message}")

    def admitted(self, sequence: Stream, hit_tokens: int) -> None:
        return None

    def preempted(self, sequence: Stream) -> None:
        return None

    def stepped(self, tally: Tally) -> None:
        assert self._landing is not None
        result, seconds = self._landing
        self._controller.stepped(round_of(tally, result, seconds))
        self.nodes, self.held, self.roots = self.nodes + result.nodes, self.held + tally.accepted, self.roots + tally.roots
        if tally.roots == self._work.streams and not result.nodes and not tally.prefill_tokens:
            self.plain_seconds.append(seconds)

    def finish(self) -> list[Record]:
        """All that was sent, what was cut included."""
        for number in self._places.values():
            self.records[number].ended = self.seconds
        return self.records


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """`ratio`, `doubt`: of the speed with guesses over that without, for equal work, and its standard error. `with_front`: the same where
    the front's part is done between steps instead of beside them. `front_ms`: of a step, with and without guesses. `guesses`: of a sequence
    in a step, and the share of them that held. `differing`: prompts whose answers differ, which must never be."""

    workload: str
    streams: int
    ratio: float
    doubt: float
    with_front: float
    front_ms: tuple[float, float]
    guesses: float
    acceptance: float
    steps: int
    differing: list[str]

    def __str__(self) -> str:
        front, plain = self.front_ms
        return (
            f"{self.workload:<11}{self.streams:>3} streams: {self.ratio:.3f} ± {self.doubt:.3f}, front between steps {self.with_front:.3f} "
            f"({front:.2f} and {plain:.2f} ms a step); {self.guesses:.2f} guesses a sequence and step, {self.acceptance:.0%} held; "
            f"{self.steps} steps"
        )


def race(workload: str, lanes: tuple[Lane, Lane], texts: Sequence[str], streams: int, ended: Callable[[], bool]) -> Verdict:
    """Both lanes in turns, the first to step another one each time, until one found no more work or it has `ended`. The second lane is the
    plain one. Raises BenchError when it ended before all streams were busy."""
    for number in itertools.count():
        if ended() or any(lane.done for lane in lanes):
            break
        for lane in lanes if number % 2 else lanes[::-1]:
            lane.turn()
    guessing, plain = lanes
    records = [lane.finish() for lane in lanes]
    common = min(len(of_one) for of_one in records)
    busy, other = (Steady.of(of_one, texts[: len(of_one)], streams) for of_one in records)
    if not plain.plain_seconds:
        raise BenchError("there was no step without prompts in which all streams decoded: give more seconds")
    pairs = steady.compare(busy, other, median(plain.plain_seconds) / streams)
    ratio, shares = steady.ratio(pairs), [lane.front_seconds / lane.seconds for lane in lanes]
    return Verdict(
        workload,
        streams,
        ratio,
        steady.doubt(pairs),
        ratio * (1 + shares[1]) / (1 + shares[0]),
        (1e3 * guessing.front_seconds / guessing.steps, 1e3 * plain.front_seconds / plain.steps),
        guessing.nodes / max(1, guessing.roots),
        guessing.held / guessing.nodes if guessing.nodes else 0.0,
        guessing.steps,
        differing(texts[:common], records[0][:common], records[1][:common]),
    )


def engines(start: Start, speculators: Sequence[str]) -> Iterator[Engine]:
    """One for each over one model, which know what their steps cost. Raises StartError."""

    def said(stage: str, done: int, total: int) -> None:
        return None

    backend = open_backend(start.device, start.threads, start.memory_fraction)
    model = load_model(start, backend, said)
    for spec in speculators:
        asked = msgspec.structs.replace(start, speculator=spec)
        setting = Setting(start.speculate, backend.caps.tree_attention, Host(asked, backend, model, said))
        fits = functools.partial(leaves_room, asked, backend, model)
        name, drafter = open_auto(find(asked), setting, fits) if spec == "auto" else (spec, open_drafter(spec, setting))
        engine = assemble(msgspec.structs.replace(start, speculator=name), backend, model, drafter, said)
        while engine.resting:
            if (profile := engine.rest(lambda: False)) is not None and profile.costs:
                told = {"costs": profile.costs, "segment_seconds": profile.segment_seconds, "contexts": profile.contexts, "rough": False}
                engine.ready = msgspec.structs.replace(engine.ready, **told)
        yield engine


def compete(model_id: str, speculator: str, chosen: workloads.Workload, work: Work, seconds: float, swapped: bool) -> Verdict:
    """`work.prompts` are those of the workload's prompts. `swapped`: the plain engine is made first, and has what memory comes first."""
    flags = [word for pair in FLAGS.items() for word in pair]
    start = start_message(Config.parse(["--model-id", model_id, *flags]))
    specs = ["none", speculator] if swapped else [speculator, "none"]
    made = dict(zip(("plain", "guessing") if swapped else ("guessing", "plain"), engines(start, specs)))
    policy = Policy(max_total_tokens=start.max_total_tokens, max_batch_total_tokens=start.max_pool_tokens)

    def lane(engine: Engine) -> Lane:
        return Lane(engine, make(Speculation(), engine.ready, lambda least, state: None), policy, work)

    lanes = lane(made["guessing"]), lane(made["plain"])
    gc.collect()
    gc.freeze()
    until = time.perf_counter() + seconds
    return race(chosen.name, lanes, chosen.prompts, work.streams, lambda: time.perf_counter() > until)


def main(argv: Sequence[str] | None = None) -> int:
    """0 done, 1 failed or answers differ."""
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.lanes", description=__doc__.split("\n")[0])
    parser.add_argument("--model-id", default="models/smollm2-135m-instruct", help="(default: %(default)s)")
    parser.add_argument("--speculator", default="auto", help="what runs beside `none`; may be `none` (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, help="a folder of NAME.jsonl (default: prompts of our own)")
    parser.add_argument("--only", action="append", default=[], metavar="WORKLOAD")
    parser.add_argument("--streams", type=int, action="append", help="may be repeated (default: 16, 32)")
    parser.add_argument("--rounds", type=int, default=1, help="each with other prompts (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each, both lanes together (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="most of an answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which prompts come first")
    parser.add_argument("--out", type=Path, default=Path("bench/out/lanes.json"))
    asked = parser.parse_args(argv)
    try:
        verdicts = _run(asked)
    except (BenchError, ValueError, FileNotFoundError) as wrong:
        print(f"forerun bench: {wrong}", file=sys.stderr)
        return 1
    settings = {name: str(value) for name, value in vars(asked).items()}
    write(asked.out, {"settings": settings, "machine": machine(), "verdicts": [dataclasses.asdict(one) for one in verdicts]})
    wrong_answers = [text for one in verdicts for text in one.differing]
    if wrong_answers:
        print("ANSWERS DIFFER with and without guesses, which must never be:", *wrong_answers, sep="\n  ", file=sys.stderr)
    return int(bool(wrong_answers))


def _run(asked: argparse.Namespace) -> list[Verdict]:
    from tokenizers import Tokenizer  # the servers' own reading of a prompt

    torch.set_grad_enabled(False)
    folder = Path(asked.model_id)
    form, tokenizer = chat_form(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for number, chosen, streams in itertools.product(
        range(asked.rounds),
        workloads.from_folder(asked.prompts, asked.only) if asked.prompts else workloads.made(asked.only),
        asked.streams or (16, 32),
    ):
        texts = random.Random(f"{asked.seed + number} {chosen.name}").sample(list(chosen.prompts), len(chosen.prompts))
        ids = [tokenizer.encode(form(text), add_special_tokens=False).ids for text in texts]
        work = Work(ids, streams, asked.tokens, stop_ids(folder))
        one = compete(asked.model_id, asked.speculator, dataclasses.replace(chosen, prompts=texts), work, asked.seconds, number % 2 == 1)
        found.append(one)
        print(one, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
