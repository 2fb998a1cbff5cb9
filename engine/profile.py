"""What a step costs by its rows: looked at roughly at start, measured while nobody asks for anything, remembered on disk.

The controller in the front weighs guesses against the time they take, so the worker measures that time for every row count up to 32
and for buckets above: steps of few rows with long guessed chains (`one row and its guesses` is what a verify step is made of). On the
way it measures what each further row adds (`segment`), and for several lengths of context what a position adds once (`read`) and for
every row that is scored against it (`score`). All counts are gone through several times, there and back. Each pass has its own weather, by
which its times are divided before the lower quartile is kept: guesses are priced by differences of sizes, and a machine that others make
slower for a while must not make some sizes look dear beside others.

    seconds(rows, segments, read, scored) = steps[rows] + (segments − 1) · segment + read · read(context) + scored · score(context)

    start ──▶ look: a few counts, one context (half a second on a small model) ──▶ Ready with these, or with the remembered ones if they fit
    idle  ──▶ rest: one group of steps after the other, each broken off when a plan arrives ──▶ Profile, and on disk for the next start

Steps of the profile write to pages of its own, behind those that the front knows of, so that what is cached stays as it is. Made-up
contexts lie on the front's pages, as after a hit in the prefix cache: they are read, and nothing is written there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import truediv
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from forerun import __version__
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Terms
from forerun.messages import Admit, Feed, Profile, Ready, SamplingParams, Start, StepPlan, StepResult

log = logging.getLogger(__name__)

DENSE = 32
BUCKETS = (40, 48, 64, 96, 128, 192, 256)
"""row counts above, as far as such steps are short enough"""
SPARSE = (1, 2, 4, 8, 16, 32, 64, 128)
"""row counts of a model so slow that all of them would take longer than `PATIENCE`"""
ROUGH = ((1, 2, 4, 8, 12, 16, 32), (1, 4, 8, 16, 32), (1, 8, 16), (1, 8))
"""row counts of the look at start: the most for which there is time"""
PASSES, ROUGH_PASSES = 5, 3
PATIENCE, LOOK_SECONDS = 30.0, 0.8
"""seconds that all may take, and the look at start"""
MOST_SECONDS, MOST_PLAIN = 0.1, 2.0
"""Seconds, and plain steps: what is expected to take longer than both is not measured, since a request may come in the middle of it."""
CONTEXTS = (256, 1024, 4096)
"""tokens of the long contexts"""
ROUGH_CONTEXT = 1024
BESIDE, GUESSES = 4, 3
"""sequences that have them, and their guesses"""
STEPS = 8
"""of a group: between two admissions"""
REPEATS = 7
APART, MOST_SEGMENT = 8, 0.05
"""rows that are compared with as many guesses, and the most of a plain step that such a row can add"""
SLOWEST = 1.0
"""Seconds of a plain step beyond which the look at start is all: nobody should wait for twice as long, nor take it for a hung worker."""
SAME, ALIKE = 1.6, 1.25
"""A remembered profile counts as long as its plain step is within the first factor of what a plain step takes now, and sizes of steps are
within the second of each other's: a machine that is slower in all of them is corrected for while it runs, one that was busy while it
was profiled is not."""
STALE_SECONDS = 60.0
"""What was measured before a pause this long is measured again: the machine may be another by now."""

ReportProgress = Callable[[str, int, int], None]
Wanted = Callable[[], bool]
"""somebody waits for a step"""


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


class Kind(NamedTuple):
    """What a sample is of. `what`: "rows" (in as few sequences as can have so many), "apart" and "together" (as many sequences as rows, or
    as few as can be), "context". `size`: rows, or tokens of context. `sequences`, `guess`, `far`: for a context, how many sequences took
    part, the guesses of each, and whether they were those that have the context."""

    what: str
    size: int
    sequences: int = 0
    guess: int = 0
    far: bool = False


class _Ended(Exception):
    """A row of the profile ended: what its steps would have taken is not known."""


class Stepper(Protocol):
    """What is measured: an engine whose drafter is a `Script`. Its pages from `ready.pages` on are scratch."""

    @property
    def ready(self) -> Ready: ...
    def step(self, plan: StepPlan) -> StepResult: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Steps that are timed between one admission and the next. `contexts`: tokens of made-up context of each sequence. `steps`: what each
    is a sample of, and the guesses of the sequences that take part, by place."""

    contexts: list[int]
    steps: list[tuple[Kind, dict[int, int]]]


def scratch_pages(rows: int, nodes: int, page_tokens: int) -> int:
    """How many pages the profile writes to, where a row may have so many guesses; none where there are no guesses."""
    return _sequences(rows, nodes) * _own_pages(nodes, page_tokens) if nodes else 0


def _sequences(rows: int, nodes: int) -> int:
    return min(rows, max(2 * BESIDE, -(-DENSE // (1 + nodes))))


def _own_pages(nodes: int, page_tokens: int) -> int:
    """Of a sequence: its prompt of one token, one token a step, and the guesses of the last."""
    return -(-(1 + STEPS + nodes + 1) // page_tokens)


class Profiler:
    """`clock`: seconds."""

    def __init__(self, stepper: Stepper, start: Start, progress: ReportProgress, clock: Callable[[], float] = time.perf_counter) -> None:
        ready = stepper.ready
        self._ready = ready
        self._run = stepper.step
        self._progress = progress
        self._clock = clock
        self._file = _file(ready, start)
        self._segment = 1 + ready.max_nodes
        self._sequences = _sequences(ready.rows, ready.max_nodes)
        self._own = _own_pages(ready.max_nodes, ready.page_tokens)
        self._samples: dict[Kind, list[float]] = {}
        self._todo: deque[_Group] = deque()
        self._measured_at = 0.0
        """when something was last measured"""
        self._row_seconds = 0.0
        """what a row costs in a step of many"""
        self.resting = False
        """there is something to measure in idle moments"""

    def look(self) -> Profile:
        """At start: what was remembered if the machine still is as it was then, else a rough profile. Empty where sequences are too short
        for a step to be measured, or where they end with an error."""
        ready = self._ready
        if not ready.max_nodes or self._own * ready.page_tokens > ready.max_tokens + ready.max_nodes:
            return Profile()
        first, *others = self._passes(self._rough_counts(), ROUGH_PASSES)
        try:
            samples = self._collect([first, *self._context(ROUGH_CONTEXT, 2), *others])
        except _Ended as error:
            return self._give_up(error)
        self.resting = ready.step_seconds[0] <= SLOWEST
        rough = _profile(samples, self.resting)
        remembered = _remembered(self._file, ready.step_seconds[0])
        if remembered is not None and _alike(rough, remembered):
            log.info("step costs: as measured before, %s", self._file)
            self.resting = False
            return remembered
        rows, seconds = rough.costs[-1]
        self._row_seconds = seconds / rows
        return rough

    def rest(self, wanted: Wanted) -> Profile | None:
        """Measure a little, in a moment when no row is running; broken off between two steps when somebody `wanted` one. Returns the whole
        profile once, when it is complete and has been written down; an empty one where it cannot be measured."""
        if not self.resting:
            return None
        if not self._todo or self._clock() - self._measured_at > STALE_SECONDS:
            self._samples = {}
            self._todo = deque(self._everything())
        try:
            left = self._measure(self._todo.popleft(), self._samples, wanted)
        except _Ended as error:
            return self._give_up(error)
        self._measured_at = self._clock()
        if left is not None:
            self._todo.appendleft(left)
        if self._todo:
            return None
        self.resting = False
        profile = _profile(self._samples)
        _remember(self._file, profile)
        log.info("step costs: measured at %d sizes", len(profile.costs))
        return profile

    def _give_up(self, error: _Ended) -> Profile:
        log.warning("step costs are not measured, what is known of them stays as it is: %s", error)
        self.resting = False
        return Profile()

    def _rough_counts(self) -> list[int]:
        """As many counts as there is time for, where a step of 32 rows takes four times as long as one of one row."""
        passes = ROUGH_PASSES * self._ready.step_seconds[0]
        return self._fitting(next((counts for counts in ROUGH if passes * sum(1 + rows / 10 for rows in counts) < LOOK_SECONDS), ROUGH[-1]))

    def _everything(self) -> Iterable[_Group]:
        plain = self._ready.step_seconds[0]
        dense = [*range(1, DENSE + 1), *BUCKETS]
        counts = self._fitting(dense if plain * 4 * len(dense) * PASSES < PATIENCE else SPARSE)
        longest = max(MOST_SECONDS, MOST_PLAIN * plain)
        yield from self._passes([rows for rows in counts if rows * self._row_seconds <= longest or rows == 1], PASSES)
        yield from self._apart()
        for tokens in CONTEXTS:
            yield from self._context(tokens, REPEATS)

    def _fitting(self, counts: Iterable[int]) -> list[int]:
        """Those of the row counts that a step can have."""
        most = self._sequences * self._segment
        nodes = self._ready.max_step_nodes or most
        return [rows for rows in counts if rows <= most and rows - -(-rows // self._segment) <= nodes]

    def _passes(self, counts: Sequence[int], passes: int) -> Iterable[_Group]:
        """Steps of so many rows with next to no context."""
        for number in range(passes):
            order = counts if number % 2 == 0 else counts[::-1]
            for first in range(0, len(order), STEPS):
                steps = [(Kind("rows", rows), self._together(rows)) for rows in order[first : first + STEPS]]
                yield _Group([0] * max(len(guesses) for _, guesses in steps), steps)

    def _together(self, rows: int) -> dict[int, int]:
        """As few sequences as can have so many rows, each with as many guesses as it may."""
        sequences = -(-rows // self._segment)
        left, most = rows - sequences, self._segment - 1
        return {place: max(0, min(most, left - place * most)) for place in range(sequences)}

    def _apart(self) -> Iterable[_Group]:
        rows = min(APART, self._sequences, self._segment)
        if rows >= 2:
            both = [(Kind("apart", rows), dict.fromkeys(range(rows), 0)), (Kind("together", rows), self._together(rows))]
            for _ in range(-(-2 * REPEATS // STEPS)):
                yield _Group([0] * rows, both * (STEPS // 2))

    def _context(self, tokens: int, repeats: int) -> Iterable[_Group]:
        """Steps of sequences with and without context in turn, so that what is subtracted was measured in the same weather."""
        ready, size = self._ready, self._ready.page_tokens
        tokens -= tokens % size
        count = min(BESIDE, self._sequences // 2, ready.pages * size // max(tokens, 1))
        guess = min(self._segment - 1, GUESSES, ready.max_step_nodes // max(count, 1) or GUESSES)
        if not tokens or tokens + self._own * size > ready.max_tokens or count < 1 or guess < 1:
            return
        kinds = [
            (Kind("context", tokens, count, guessed, far), dict.fromkeys(range(count * far, count * (1 + far)), guessed))
            for guessed in (0, guess)
            for far in (False, True)
        ]
        for _ in range(-(-len(kinds) * repeats // STEPS)):
            yield _Group([0] * count + [tokens] * count, kinds * (STEPS // len(kinds)))

    def _collect(self, groups: Sequence[_Group]) -> dict[Kind, list[float]]:
        """The samples of the first group, and of the others as far as there is time."""
        samples: dict[Kind, list[float]] = {}
        began = self._clock()
        for done, group in enumerate(groups):
            self._progress("profiling", done, len(groups))
            if not done or self._clock() - began < LOOK_SECONDS:
                self._measure(group, samples, _nobody)
        self._progress("profiling", len(groups), len(groups))
        return samples

    def _measure(self, group: _Group, samples: dict[Kind, list[float]], wanted: Wanted) -> _Group | None:
        """Times the steps of a group. Returns what is left of it when somebody wanted something else. Raises `_Ended`."""
        rows = range(len(group.contexts))
        admits = [self._admit(row, context) for row, context in enumerate(group.contexts)]
        try:
            self._step(StepPlan(0, admits, [Feed(row, 1) for row in rows]))
            for done, (kind, guesses) in enumerate(group.steps):
                if wanted():
                    return _Group(group.contexts, group.steps[done:])
                plan = StepPlan(0, feed=[Feed(row, 1, guess) for row, guess in guesses.items()], budget=sum(guesses.values()))
                began = self._clock()
                self._step(plan)
                samples.setdefault(kind, []).append(self._clock() - began)
        finally:
            self._run(StepPlan(0, drop=list(rows)))
        return None

    def _step(self, plan: StepPlan) -> None:
        for emit in self._run(plan).emit:
            if emit.error or emit.finish:
                raise _Ended(emit.error or f"a sequence ended by {emit.finish}")

    def _admit(self, row: int, context: int) -> Admit:
        """A sequence with a prompt of one token behind so much made-up context."""
        ready = self._ready
        read, first = context // ready.page_tokens, ready.pages + row * self._own
        lent = [page % ready.pages for page in range(row % BESIDE * read, (row % BESIDE + 1) * read)]
        params = SamplingParams(seed=0, prompt_tokens=context + 1, max_new_tokens=1 << 30, logprobs=False)
        return Admit(row, [0] * (context + 1), context, [*lent, *range(first, first + self._own)], params)


def _nobody() -> bool:
    return False


def _profile(samples: dict[Kind, list[float]], rough: bool = False) -> Profile:
    seconds = {kind: _quartile(values) for kind, values in samples.items()}
    steps = _of_rows({kind.size: values for kind, values in samples.items() if kind.what == "rows"})
    contexts = [_of_context(seconds, kind) for kind in sorted(seconds) if kind.what == "context" and kind.far and kind.guess]
    return Profile(steps, _of_segment(seconds, steps[0][1]), contexts, rough)


def _of_rows(passes: dict[int, list[float]]) -> list[tuple[int, float]]:
    """(rows, seconds), ascending. `passes[rows]`: what a step of so many took in each of the passes."""
    usual = {rows: _quartile(values) for rows, values in passes.items()}
    slower = [statistics.median(value / usual[rows] for rows, value in zip(passes, values)) for values in zip(*passes.values())]
    return sorted((rows, _quartile(map(truediv, values, slower))) for rows, values in passes.items())


def _quartile(values: Iterable[float]) -> float:
    """The lower one: what disturbs a step makes it longer."""
    ranked = sorted(values)
    return ranked[len(ranked) // 4]


def _of_segment(seconds: dict[Kind, float], plain_seconds: float) -> float:
    """What a row of its own adds over a guess. A small difference of two measurements: no more is believed of it than can be."""
    found = 0.0
    for kind, apart in seconds.items():
        if kind.what == "apart":
            found = (apart - seconds[Kind("together", kind.size)]) / (kind.size - 1)
    return min(max(0.0, found), MOST_SEGMENT * plain_seconds)


def _of_context(seconds: dict[Kind, float], kind: Kind) -> tuple[int, float, float]:
    """(tokens, read, score). `kind`: that of the steps with guesses."""
    tokens, count, guess = kind.size, kind.sequences, kind.guess
    plain, verify = (
        max(0.0, seconds[kind._replace(guess=guessed)] - seconds[kind._replace(guess=guessed, far=False)]) for guessed in (0, guess)
    )
    score = max(0.0, verify - plain) / (guess * count * tokens)
    return tokens, max(0.0, plain / (count * tokens) - score), score


def _alike(rough: Profile, known: Profile) -> bool:
    """Whether steps of a few sizes take what a remembered profile says, up to a common factor."""
    remembered = dict(known.costs)
    factors = [seconds / remembered[rows] for rows, seconds in rough.costs if rows in remembered]
    if not factors or max(factors) > ALIKE * min(factors):
        log.info("step costs: not as they were remembered, so they are measured again")
        return False
    return True


def _file(ready: Ready, start: Start) -> Path | None:
    """Where the profile of this model on this machine is remembered."""
    if not start.hub_cache:
        return None
    known = [__version__, start.model_id, start.revision, ready.device, ready.dtype, ready.max_nodes, ready.rows, start.quantize]
    digest = hashlib.sha256(json.dumps([*known, sorted(ready.facts.items())]).encode()).hexdigest()[:24]
    return Path(start.hub_cache).expanduser() / ".forerun" / f"costs-{digest}.json"


def _remembered(file: Path | None, plain_seconds: float) -> Profile | None:
    try:
        known = msgspec.json.decode(file.read_bytes(), type=Profile) if file else None
    except (OSError, msgspec.DecodeError):
        return None
    if known is None or not known.costs or not 1 / SAME < known.costs[0][1] / plain_seconds < SAME:
        return None
    return known


def _remember(file: Path | None, profile: Profile) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(profile))
        fresh.replace(file)
    except OSError as error:
        log.info("step costs are measured again at the next start, they cannot be written down: %s", error)
