"""Speculation on against off, over HTTP: the same requests to two servers of one build, in turns, from one to many streams.

Two servers rather than one whose requests switch guesses off: the yardstick is the server that never guesses, with nothing of speculation
in its memory or its steps. Each prompt goes to both in the same order, and they run in short turns (`turns.py`). The answers must be the
same, token by token; a single one that differs fails the run. With `none` as the drafter, none is measured beside none: what chance does.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from forerun.bench import process, prompts
from forerun.bench.apis import APIS, Ask
from forerun.bench.errors import BenchError
from forerun.bench.launched import Launched, Program, ours
from forerun.bench.load import Amount, Load, Target, checked
from forerun.bench.records import Record, Shape
from forerun.bench.stats import median, percentile
from forerun.bench.steady import Steady, compare
from forerun.bench.sweep import Match, Outcome, Side, lives
from forerun.bench.turns import SECONDS, Clock, in_turns, standing
from forerun.bench.workloads import Workload

FLAGS = {"--max-batch-total-tokens": "32768", "--max-total-tokens": "4096"}
"""unless given otherwise"""
WARM_TOKENS = 48
RULES = f"equal work while all streams are busy, matches of a round together, turns of {SECONDS:g} s that end with the front"
"""By which matches are judged, for a result file. To be worded anew with every change of what a ratio is made of."""
STATE = "forerun_speculation_"
"""how the names begin under which a server shows what its drafters and its controller do"""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """`tokens`: most of an answer. `seed`: which prompts meet in a match."""

    streams: Sequence[int] = (1, 2, 4, 8, 16, 32)
    rounds: int = 3
    tokens: int = 128
    seed: int = 0

    @classmethod
    def quick(cls) -> Settings:
        return cls(streams=(1, 4, 16), rounds=1)


class Sweep:
    """Runs a plan. `outcomes`: of the matches so far; `remarks`: for people."""

    def __init__(
        self,
        model_id: str,
        speculator: str,
        flags: Sequence[str],
        settings: Settings,
        form: Callable[[str], str],
        say: Callable[[str], None],
    ) -> None:
        given = [word for name, value in FLAGS.items() if name not in flags for word in (name, value)]
        self._programs = [ours(model_id, [*given, *flags, "--speculator", name]) for name in (speculator, "none")]
        self._plain = speculator == "none"
        self._settings = settings
        self._form = form
        self._say = say
        self._ask = Ask(settings.tokens, extra={"details": True})
        self.outcomes: list[Outcome] = []
        self.remarks: list[str] = []

    async def run(self, workloads: Sequence[Workload]) -> list[Outcome]:
        """Raises BenchError when a request failed or a server did not start."""
        plan = lives(workloads, self._settings.streams, self._settings.rounds, self._settings.seed)
        total, others = sum(map(len, plan)), process.Others()
        for life in plan:
            self._say(f"{len(self.outcomes)}/{total}: starting two servers")
            async with contextlib.AsyncExitStack() as stack:
                guessing, plain = await start(stack, self._programs, max(match.streams for match in life))
                if not self._plain and (await guessing.info())["speculator"] == "none":
                    raise BenchError("the server that is to guess does not: name a drafter with --speculator")
                for match in life:
                    self._say(f"{len(self.outcomes) + 1}/{total}: {match.workload}, {match.streams} streams, round {match.round + 1}")
                    self.outcomes.append(await self._match(guessing, plain, match))
        self.remarks.append(f"other programs took {others.share():.0%} of the machine meanwhile")
        return self.outcomes

    async def _match(self, guessing: Launched, plain: Launched, match: Match) -> Outcome:
        servers = (guessing, plain) if match.guessing_first else (plain, guessing)
        taken = dict(zip(servers, await take(servers, match, self._ask, self._form)))
        (fast, counts), (slow, _) = taken[guessing], taken[plain]
        return outcome(match, fast, counts, slow)


async def start(stack: contextlib.AsyncExitStack, programs: Iterable[Program], streams: int) -> list[Launched]:
    """Servers, ready and warm. One after the other, and those that are warm stand still meanwhile: what its steps cost, each measures on a
    machine that has nothing else to do."""
    servers: list[Launched] = []
    for program in programs:
        with standing([server.family for server in servers]):
            server = await stack.enter_async_context(Launched(program))
            await warm(server, streams)
        servers.append(server)
    return servers


async def warm(server: Launched, streams: int) -> None:
    """Touches the memory that the largest batch needs, and records its steps, with texts that no workload has; then lets it measure what
    steps cost."""
    load = Load(Target(server.origin, APIS["tgi"]), Ask(WARM_TOKENS), prompts.synthetic(WARM_TOKENS))
    for count in sorted({1, streams}):
        checked(await load.run(Shape(streams=count), Amount(requests=2 * count)))
    await server.settled()


Taken = tuple[list[Record], "Counts"]
"""what came of a match on one server, and what its counters gained by it"""


async def take(servers: Sequence[Launched], match: Match, ask: Ask, form: Callable[[str], str]) -> list[Taken]:
    """The match on each of the servers, which run in turns. Raises BenchError when a request failed."""

    def put(server: Launched) -> Callable[[Clock], Awaitable[list[Record]]]:
        async def run(clock: Clock) -> list[Record]:
            load = Load(Target(server.origin, APIS["tgi"]), ask, map(form, match.prompts), clock=clock)
            return await load.run(Shape(streams=match.streams), Amount(len(match.prompts), cut=True, staggered=match.steady))

        return run

    before = [Counts.of(await server.metrics()) for server in servers]
    loads = await in_turns([server.family for server in servers], [put(server) for server in servers])
    after = [Counts.of(await server.metrics()) for server in servers]
    return [(checked(records), now.since(then)) for records, now, then in zip(loads, after, before)]


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """What a server has counted. `state`: its speculation's series."""

    drafted: float
    accepted: float
    committed: float
    state: dict[str, float]

    @classmethod
    def of(cls, metrics: dict[str, float]) -> Counts:
        def total(name: str) -> float:
            return sum(value for full, value in metrics.items() if full.partition("{")[0] == name)

        return cls(
            drafted=total("forerun_drafted_tokens_total"),
            accepted=total("forerun_accepted_tokens_total"),
            committed=total("forerun_committed_tokens_total"),
            state={name: value for name, value in metrics.items() if name.startswith(STATE)},
        )

    def since(self, before: Counts) -> Counts:
        return Counts(
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            self.committed - before.committed,
            {name: value - before.state.get(name, 0.0) * ("_total" in name) for name, value in self.state.items()},
        )


def outcome(match: Match, fast: Sequence[Record], counts: Counts, slow: Sequence[Record]) -> Outcome:
    """Of a match, what came of its guesses: answers with them and what they counted, and answers without."""
    steps = counts.committed - counts.accepted  # each step of a sequence brings one token that was not guessed
    busy, plain_busy = (Steady.of(records, match.prompts, match.streams, not match.steady) for records in (fast, slow))
    plain = side(slow, plain_busy)
    return Outcome(
        match.round,
        match.workload,
        match.streams,
        side(fast, busy),
        plain,
        compare(busy, plain_busy, plain.step_ms / 1000 / match.streams),
        guesses=counts.drafted / steps if steps else 0.0,
        acceptance=counts.accepted / counts.drafted if counts.drafted else 0.0,
        tokens=counts.committed / steps if steps else 0.0,
        differing=differing(match.prompts, fast, slow),
        state=counts.state,
    )


def side(records: Sequence[Record], busy: Steady) -> Side:
    """First tokens are those of requests that came while all streams were busy: at 32 streams half of a match's are sent at once when it
    begins, so that the median of all stood at the edge between those few and that crowd, now on this side and now on the other."""
    finished = [record for record in records if not record.cut]
    spoke = [record for record in records if record.arrivals]
    settled = [record for record in spoke if record.due >= busy.start]
    return Side(
        busy.seconds,
        busy.gained(busy.tokens),
        requests_rate=len(finished) / (max(record.ended for record in finished) - records[0].due),
        first_token_ms=median(record.first_token_seconds for record in settled or spoke) * 1000,
        step_ms=_step_seconds(records) * 1000,
    )


def _step_seconds(records: Sequence[Record]) -> float:
    """The lower quartile of the time from one step's tokens to the next of a stream: steps without prompts, also where most have some. A
    little low: what came out while the front was stopped it sends at once when its turn begins, and gaps are short then. So it is on both
    sides, and one of them sets the price of a token for both."""
    gaps = sorted(gap for record in records for gap in record.gaps if gap > 0.0)
    return percentile(gaps, 25) if gaps else 0.0


def differing(asked: Sequence[str], left: Sequence[Record], right: Sequence[Record]) -> list[str]:
    """The prompts whose answers are not the same, and from which token on; of answers that were cut, as far as both go."""
    found = []
    for text, one, other in zip(asked, left, right, strict=True):
        length = min(len(one.ids), len(other.ids))
        at = next((place for place in range(length) if one.ids[place] != other.ids[place]), length)
        short = at < max(len(one.ids), len(other.ids)) and not (one.cut if len(one.ids) < len(other.ids) else other.cut)
        if at < length or short:
            found.append(f"token {at + 1} of the answer to {text[:60]!r}")
    return found


def describe(outcomes: Sequence[Outcome]) -> list[str]:
    """The differing answers, for people."""
    return [f"{one.workload}, {one.streams} streams: {text}" for one in outcomes for text in one.differing]


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """For a result file."""
    return {"rules": RULES, "outcomes": [dataclasses.asdict(one) for one in outcomes]}


def earlier(result: dict[str, Any]) -> list[Outcome]:
    """The outcomes of a result file. Raises BenchError for those of another version, or that were judged by other rules."""
    if (rules := result.get("rules")) != RULES:
        raise BenchError(
            "the matches of the result file that is to be added to were judged by other rules, so medians would mix two ways of measuring: "
            f"give a new file with --out (its rules: {rules or 'not told, it is older'}; now: {RULES})"
        )
    try:
        return msgspec.convert(result.get("outcomes"), list[Outcome])
    except msgspec.ValidationError as error:
        raise BenchError(f"the result file that is to be added to is another version's, give a new one with --out: {error}") from error


def numbered(outcomes: Sequence[Outcome], after: Sequence[Outcome]) -> list[Outcome]:
    """`outcomes` as rounds that follow those of `after`."""
    start = max((one.round for one in after), default=-1) + 1
    return [dataclasses.replace(one, round=one.round + start) for one in outcomes]
