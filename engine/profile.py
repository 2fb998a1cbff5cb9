"""What a step costs by its rows: measured at start, remembered on disk.

The controller in the front weighs guesses against the time they take, so the worker measures that time for every row count up to 32
and for buckets above: steps of few rows with long guessed chains (`one row and its guesses` is what a verify step is made of). On the
way it measures what each further row adds (`segment`), and for several lengths of context what a position adds once (`read`) and for
every row that is scored against it (`score`). Measurements go round all counts several times, there and back, and medians are kept: a
machine that is busy for a moment spoils no count more than another.

    seconds(rows, segments, read, scored) = steps[rows] + (segments − 1) · segment + read · read(context) + scored · score(context)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from forerun import __version__
from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Needs, Terms
from forerun.engine.engine import Engine
from forerun.messages import Admit, Feed, Ready, SamplingParams, Start, StepPlan

log = logging.getLogger(__name__)

DENSE = 32
BUCKETS = (40, 48, 64, 96, 128, 192, 256)
"""Measured in every other pass: they take as long as all the others, and fewer steps are as large."""
SPARSE = (1, 2, 4, 8, 16, 32, 64, 128)
"""row counts of a model so slow that all of them would take too long"""
LEAST_PASSES, MOST_PASSES = 3, 9
SECONDS = 5.0
"""no further pass is begun after so long"""
CONTEXTS = (256, 1024, 4096)
"""tokens of the long contexts, whole pages"""
BESIDE, GUESSES = 4, 3
"""sequences that have them, and their guesses"""
EMPTY: Mapping[int, int] = {}
STEPS = 48
"""steps after which sequences start over, so that their context stays short"""
REPEATS = 7
APART, MOST_SEGMENT = 8, 0.05
"""rows that are compared with as many guesses, and the most of a plain step that such a row can add"""
SAME, ALIKE = 1.6, 1.25
"""A remembered profile counts as long as its plain step is within the first factor of what a plain step takes now, and sizes of steps are
within the second of each other's: a machine that is slower in all of them is corrected for while it runs, one that was busy while it
was profiled is not."""
SAMPLES = (1, 8, 16, 32)

Around = Callable[[Drafter], Engine]
"""makes an engine with another drafter out of the same parts"""
ReportProgress = Callable[[str, int, int], None]


class Costs(msgspec.Struct, frozen=True):
    """The profile, in seconds."""

    steps: list[tuple[int, float]]
    segment: float
    contexts: list[tuple[int, float, float]]


class Script:
    """A drafter that always has as many nodes as it may. They are probes: computed like any guess, and never accepted, so that a step
    brings a row one token whatever it carries."""

    def __init__(self, most: int) -> None:
        self.needs = Needs(most=most, lazy=True)

    def absorb(self, commit: Commit) -> None:
        return None

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        return [Draft([0] * most, list(range(-1, most - 1)), [1.0] * most, [True] * most) for most in budget]

    def forget(self, rows: list[int]) -> None:
        return None


def profiled(ready: Ready, start: Start, around: Around, progress: ReportProgress) -> Ready:
    """`ready` with its costs: those that were remembered if the machine is still as fast, otherwise measured ones. Unchanged where
    sequences are too short for a step to be measured."""
    if ready.max_tokens < 2 * ready.max_nodes + 8:
        return ready
    file = _file(ready, start)
    costs = _remembered(file, ready.step_seconds[0])
    profile = _Profile(around(Script(ready.max_nodes)), progress)
    if costs is None or not profile.resembles(costs):
        costs = profile.run()
        _remember(file, costs)
    return msgspec.structs.replace(ready, costs=costs.steps, segment_seconds=costs.segment, contexts=costs.contexts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """A decode step: `rows` rows of the forward, in so few sequences as can have that many guesses, or one sequence for each row."""

    rows: int
    apart: bool = False


class _Profile:
    def __init__(self, engine: Engine, progress: ReportProgress) -> None:
        self._engine = engine
        self._progress = progress
        self._done = 0
        self._total = 1
        ready = engine.ready
        self._segment = 1 + ready.max_nodes
        self._rows = self._tokens = self._left = 0
        """sequences that were admitted, tokens of their prompts, and steps that they still have room for"""
        self._most = max(1, min(ready.rows, ready.pages // self._pages(1))) * self._segment

    def run(self) -> Costs:
        shapes = [_Shape(rows) for rows in self._counts()]
        self._total = LEAST_PASSES * len(shapes) + (2 + 4 * len(CONTEXTS)) * REPEATS
        seconds = self._passes(shapes)
        steps = [(shape.rows, seconds[shape]) for shape in shapes]
        segment = self._apart(steps[0][1])
        contexts = self._contexts()
        self._progress("profiling", self._total, self._total)
        return Costs(steps, segment, contexts)

    def resembles(self, costs: Costs) -> bool:
        """Whether steps of a few sizes take what a remembered profile says, up to a common factor."""
        known = dict(costs.steps)
        shapes = [_Shape(rows) for rows in SAMPLES if rows in known and rows <= self._most]
        seconds = self._passes(shapes, passes=LEAST_PASSES)
        factors = [seconds[shape] / known[shape.rows] for shape in shapes]
        if max(factors) > ALIKE * min(factors):
            log.info("step costs: not as they were remembered, so they are measured again")
            return False
        return True

    def _counts(self) -> list[int]:
        """Which row counts are measured: all, unless that would take too long."""
        first = self._passes([_Shape(1)], passes=2)[_Shape(1)]
        dense = [*range(1, DENSE + 1), *BUCKETS]
        counts = dense if first * 2 * len(dense) * LEAST_PASSES < 2 * SECONDS else list(SPARSE)
        nodes = self._engine.ready.max_step_nodes or self._most
        return [rows for rows in counts if rows <= self._most and rows - self._sequences(_Shape(rows)) <= nodes]

    def _passes(self, shapes: Sequence[_Shape], passes: int = 0) -> dict[_Shape, float]:
        """Median seconds of each shape with next to no context."""
        seconds: dict[_Shape, list[float]] = {shape: [] for shape in shapes}
        began = time.perf_counter()
        count = 0
        while count < (passes or MOST_PASSES):
            if not passes and count >= self._least(began, count) and time.perf_counter() - began > SECONDS:
                break
            self._admit(max(self._sequences(shape) for shape in shapes), 1)
            for shape in shapes if count % 2 == 0 else reversed(shapes):
                if shape.rows <= DENSE or count % 2 == 0:
                    seconds[shape].append(self._step(shape))
            self._drop()
            count += 1
        return {shape: statistics.median_low(values) for shape, values in seconds.items()}

    def _least(self, began: float, count: int) -> int:
        """Passes that are made even if they take long: fewer where one alone takes longer than all should."""
        return 1 if count and (time.perf_counter() - began) / count > SECONDS else LEAST_PASSES

    def _apart(self, plain_seconds: float) -> float:
        """What a row of its own adds over a guess. A small difference of two measurements: no more is believed of it than can be."""
        rows = min(APART, self._most // self._segment, self._segment)
        if rows < 2:
            return 0.0
        apart, together = _Shape(rows, apart=True), _Shape(rows)
        self._admit(rows, 1)
        seconds: dict[_Shape, list[float]] = {apart: [], together: []}
        for _ in range(REPEATS):
            for shape, values in seconds.items():
                values.append(self._step(shape))
        self._drop()
        more = statistics.median_low(seconds[apart]) - statistics.median_low(seconds[together])
        return min(max(0.0, more / (rows - 1)), MOST_SEGMENT * plain_seconds)

    def _contexts(self) -> list[tuple[int, float, float]]:
        """What positions of context add, at several lengths. Sequences with context and such without are stepped in turn, so that what is
        subtracted was measured in the same weather; the context is made up, as after a hit in the prefix cache, and costs no prefill."""
        ready = self._engine.ready
        found: list[tuple[int, float, float]] = []
        for tokens in CONTEXTS:
            count = min(BESIDE, ready.rows // 2, (ready.pages - BESIDE * self._pages(1)) // self._pages(tokens + 1))
            if tokens + self._segment + 2 * REPEATS + 2 >= ready.max_tokens or count < 1:
                break
            guesses = min(self._segment - 1, GUESSES, ready.max_step_nodes // count or GUESSES)
            if not guesses:
                break
            plain, verify = self._with_context(tokens, count, guesses)
            score = max(0.0, verify - plain) / (guesses * count * tokens)
            found.append((tokens, max(0.0, plain / (count * tokens) - score), score))
        return found

    def _with_context(self, tokens: int, count: int, guesses: int) -> tuple[float, float]:
        """Seconds by which `count` sequences with so many tokens of context make a step longer, alone and with guesses."""
        self._admit(2 * count, 1, dict.fromkeys(range(count, 2 * count), tokens))
        seconds: dict[tuple[int, int], list[float]] = {(first, guess): [] for guess in (0, guesses) for first in (0, count)}
        for _ in range(REPEATS):
            for (first, guess), values in seconds.items():
                values.append(self._timed([Feed(first + row, 1, guess) for row in range(count)], guess * count))
        self._drop()
        median = {kind: statistics.median_low(values) for kind, values in seconds.items()}
        return max(0.0, median[count, 0] - median[0, 0]), max(0.0, median[count, guesses] - median[0, guesses])

    def _sequences(self, shape: _Shape) -> int:
        return shape.rows if shape.apart else -(-shape.rows // self._segment)

    def _step(self, shape: _Shape) -> float:
        """Seconds of one step."""
        left = shape.rows - self._sequences(shape)
        feeds = []
        for row in range(self._sequences(shape)):
            guess = 0 if shape.apart else min(left, self._segment - 1)
            left -= guess
            feeds.append(Feed(row, 1, guess))
        if not self._left:
            self._admit(self._rows, self._tokens)
        self._left -= 1
        return self._timed(feeds, shape.rows)

    def _timed(self, feeds: list[Feed], budget: int) -> float:
        plan = StepPlan(0, feed=feeds, budget=budget)
        began = time.perf_counter()
        self._engine.step(plan)
        seconds = time.perf_counter() - began
        self._done += 1
        self._progress("profiling", min(self._done, self._total - 1), self._total)
        return seconds

    def _room(self, tokens: int) -> int:
        """Steps that a sequence is admitted for."""
        return max(1, min(STEPS, self._engine.ready.max_tokens - tokens - self._segment - 1))

    def _pages(self, tokens: int) -> int:
        """Of a sequence with such a prompt."""
        return -(-(tokens + self._room(tokens) + self._segment + 1) // self._engine.ready.page_tokens)

    def _admit(self, rows: int, tokens: int, contexts: Mapping[int, int] = EMPTY) -> None:
        """Sequences with prompts of so many tokens, instead of those that are there; some behind so many made-up positions of context."""
        page = 0
        admits: list[Admit] = []
        for row in range(rows):
            context = contexts.get(row, 0)
            pages = self._pages(context + tokens)
            params = SamplingParams(seed=0, prompt_tokens=context + tokens, max_new_tokens=1 << 30, logprobs=False)
            admits.append(Admit(row, [0] * (context + tokens), context, list(range(page, page + pages)), params))
            page += pages
        self._engine.step(StepPlan(0, admits, [Feed(row, tokens) for row in range(rows)], self._drops()))
        self._rows, self._tokens, self._left = rows, tokens, self._room(tokens)

    def _drop(self) -> None:
        self._engine.step(StepPlan(0, drop=self._drops()))
        self._rows = 0

    def _drops(self) -> list[int]:
        return list(range(self._rows))


def _file(ready: Ready, start: Start) -> Path | None:
    """Where the profile of this model on this machine is remembered."""
    if not start.hub_cache:
        return None
    known = [__version__, start.model_id, start.revision, ready.device, ready.dtype, ready.max_nodes, ready.rows, start.quantize]
    digest = hashlib.sha256(json.dumps([*known, sorted(ready.facts.items())]).encode()).hexdigest()[:24]
    return Path(start.hub_cache).expanduser() / ".forerun" / f"costs-{digest}.json"


def _remembered(file: Path | None, plain_seconds: float) -> Costs | None:
    try:
        costs = msgspec.json.decode(file.read_bytes(), type=Costs) if file else None
    except (OSError, msgspec.DecodeError):
        return None
    if costs is None or not costs.steps or not 1 / SAME < costs.steps[0][1] / plain_seconds < SAME:
        return None
    log.info("step costs: as measured before, %s", file)
    return costs


def _remember(file: Path | None, costs: Costs) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(costs))
        fresh.replace(file)
    except OSError as error:
        log.info("step costs are measured again at the next start, they cannot be written down: %s", error)
