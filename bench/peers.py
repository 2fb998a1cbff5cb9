"""Our server beside those of others: the same prompts over HTTP, all started together and running in turns.

All servers of a run are up at once, get a load together and run in turns of a quarter of a second (`turns.py`), so that a machine that
slows down slows each of them. All processes of a server are stopped at the end of its turn, of whomever it is: some have a worker that
schedules by itself and is never idle. Ratios are taken within a round, and their median counts. Answers have the same length everywhere:
peers are told to ignore the end of text, and ours, whose API has no word for that, gets prompts whose answers are long enough (chosen
beforehand, for each of its weight formats).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from forerun.bench import process, prompts
from forerun.bench.apis import APIS, Ask
from forerun.bench.bars import Bar
from forerun.bench.entrants import OURS, Entrant
from forerun.bench.errors import BenchError
from forerun.bench.launched import Launched
from forerun.bench.load import Amount, Load, Target, checked
from forerun.bench.records import Record, Shape
from forerun.bench.stats import median, percentile
from forerun.bench.turns import Clock, in_turns

PROMPT_WORDS = 57
SCREENINGS = 8
ALONE = 2
"""requests of a single stream, one after the other; of several streams each sends one, since all answers are equally long"""
AT_ONE = {"bf16": 1.05, "8 bits": 1.5, "4 bits": 1.3}
"""of llama.cpp's server, one stream"""
TOGETHER = 1.2
"""of the best peer's server, 8 and 16 streams"""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    streams: Sequence[int] = (1, 8, 16)
    rounds: int = 3
    tokens: int = 128

    @classmethod
    def quick(cls) -> Settings:
        return cls(rounds=1)


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One server under one load. `rate`: tokens a second in all, prompts included; `tokens`: of all answers."""

    entrant: str
    round: int
    streams: int
    rate: float
    requests_rate: float
    tokens: int
    first_token_ms: float
    first_token_p99_ms: float
    gap_p99_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """`start_seconds`: from the start of the process to the first healthy answer. `memory_mb`: after the loads."""

    entrant: str
    start_seconds: float
    memory_mb: float


class Contest:
    """`turns`, `facts`: of the rounds that are whole so far; `remarks`: for people."""

    def __init__(self, entrants: Sequence[Entrant], settings: Settings, say: Callable[[str], None]) -> None:
        self._entrants = entrants
        self._settings = settings
        self._say = say
        self._texts: dict[str, list[str]] = {}
        self.turns: list[Turn] = []
        self.facts: list[Facts] = []
        self.remarks: list[str] = []

    async def run(self) -> None:
        """Raises BenchError when a server did not start or a request failed."""
        others = process.Others()
        async with AsyncExitStack() as stack:
            servers = {}
            for entrant in self._entrants:
                self._say(f"starting {entrant.name}")
                servers[entrant.name] = await stack.enter_async_context(Launched(entrant.program))
            for entrant in self._entrants:
                self._say(f"{entrant.name}: warming up")
                await self._prepare(entrant, servers[entrant.name])
            for number in range(self._settings.rounds):
                self.turns += await self._round(servers, number)
                self.facts = [Facts(name, server.ready_seconds, server.memory / 1e6) for name, server in servers.items()]
        self.remarks.append(f"other programs took {others.share():.0%} of the machine meanwhile")

    async def _round(self, servers: dict[str, Launched], number: int) -> list[Turn]:
        found: list[Turn] = []
        for streams in self._settings.streams:
            self._say(f"round {number + 1} of {self._settings.rounds}: {streams} streams")
            order = rotated(self._entrants, number)
            families = [servers[entrant.name].family for entrant in order]
            jobs = [self._put(entrant, servers[entrant.name], number, streams) for entrant in order]
            loads = await in_turns(families, jobs, idle=None)
            found += [outcome(entrant, number, streams, records) for entrant, records in zip(order, loads)]
        return found

    def _put(self, entrant: Entrant, server: Launched, number: int, streams: int) -> Callable[[Clock], Awaitable[list[Record]]]:
        texts = self._texts[entrant.name]
        asked = [texts[at % len(texts)] for at in range(number, number + max(streams, ALONE))]
        return lambda clock: self._load(entrant, server, streams, asked, clock)

    async def _prepare(self, entrant: Entrant, server: Launched) -> None:
        """Finds the entrant's prompts, which warms it up too."""
        most = max(self._settings.streams)
        drawn = prompts.synthetic(PROMPT_WORDS, seed=1)
        found: list[str] = []
        for _ in range(SCREENINGS):
            texts = list(itertools.islice(drawn, most))
            records = checked(await self._load(entrant, server, most, texts), entrant.name)
            found += [text for text, record in zip(texts, records) if record.tokens == self._settings.tokens]
            if len(found) >= most:
                self._texts[entrant.name] = found[:most]
                return
        raise BenchError(f"{entrant.name}: of {SCREENINGS * most} answers only {len(found)} have {self._settings.tokens} tokens")

    async def _load(
        self, entrant: Entrant, server: Launched, streams: int, texts: Sequence[str], clock: Clock = time.perf_counter
    ) -> list[Record]:
        ask = Ask(self._settings.tokens, model=entrant.model, ignore_eos=not entrant.ends)
        load = Load(Target(server.origin, APIS[entrant.api]), ask, iter(texts), clock=clock)
        return await load.run(Shape(streams=streams), Amount(requests=len(texts)))


def outcome(entrant: Entrant, number: int, streams: int, records: list[Record]) -> Turn:
    """What became of a load. Raises BenchError when a request failed."""
    seconds = max(record.ended for record in checked(records, entrant.name)) - records[0].due
    firsts = sorted(record.first_token_seconds * 1000 for record in records)
    gaps = sorted(gap * 1000 for record in records for gap in record.gaps)
    tokens = sum(record.tokens for record in records)
    return Turn(
        entrant.name,
        number,
        streams,
        rate=tokens / seconds,
        requests_rate=len(records) / seconds,
        tokens=tokens,
        first_token_ms=percentile(firsts, 50),
        first_token_p99_ms=percentile(firsts, 99),
        gap_p99_ms=percentile(gaps, 99) if gaps else 0.0,
    )


def rotated(entrants: Sequence[Entrant], number: int) -> list[Entrant]:
    """Another one begins in each round."""
    start = number % len(entrants)
    return [*entrants[start:], *entrants[:start]]


def ratio(turns: Sequence[Turn], streams: int, ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Median over the rounds of the fastest of `ours` over the fastest of `theirs`."""

    def best(number: int, names: Sequence[str]) -> float:
        return max(turn.rate for turn in turns if (turn.round, turn.streams) == (number, streams) and turn.entrant in names)

    rounds = sorted({turn.round for turn in turns if turn.streams == streams})
    return median(best(number, ours) / best(number, theirs) for number in rounds)


def rate(turns: Sequence[Turn], streams: int, name: str) -> float:
    return median(turn.rate for turn in turns if (turn.entrant, turn.streams) == (name, streams))


def bars(turns: Sequence[Turn], entrants: Sequence[Entrant]) -> list[Bar]:
    """Those for which there are peers."""
    found = []
    counts = sorted({turn.streams for turn in turns})
    for weights, limit in AT_ONE.items():
        own = [one for one in entrants if one.weights == weights and one.server == OURS]
        llama = [one for one in entrants if one.weights == weights and one.server == "llama.cpp"]
        if own and llama and 1 in counts:
            found.append(_bar(turns, 1, weights, own, llama, limit))
    for streams in (count for count in counts if count > 1):
        for weights in ("bf16", "any weights") if len({one.weights for one in entrants}) > 1 else ("bf16",):
            chosen = [one for one in entrants if weights in (one.weights, "any weights")]
            own, theirs = [one for one in chosen if one.server == OURS], [one for one in chosen if one.server != OURS]
            if own and theirs:
                found.append(_bar(turns, streams, weights, own, theirs, TOGETHER))
    return found


def _bar(turns: Sequence[Turn], streams: int, weights: str, own: Sequence[Entrant], theirs: Sequence[Entrant], limit: float) -> Bar:
    fastest = max(own, key=lambda one: rate(turns, streams, one.name))
    rival = max(theirs, key=lambda one: rate(turns, streams, one.name))
    value = ratio(turns, streams, [one.name for one in own], [one.name for one in theirs])
    figures = f"{fastest.name} {rate(turns, streams, fastest.name):.0f}, {rival.name} {rate(turns, streams, rival.name):.0f} tok/s"
    return Bar(f"{streams} stream{'s' * (streams > 1)}, {weights}: ours / best peer", value, "≥", limit, "", figures)


def table(turns: Sequence[Turn], facts: Sequence[Facts]) -> str:
    """A line for each server: tokens a second and time to the first token by streams, memory, start."""
    counts = sorted({turn.streams for turn in turns})
    head = f"{'server':<18}" + "".join(f"{f'{count} str. tok/s':>15}{'first ms p50/p99':>18}" for count in counts)
    lines = [head + f"{'memory MB':>11}{'start s':>9}"]
    for one in facts:
        cells = ""
        for count in counts:
            own = [turn for turn in turns if (turn.entrant, turn.streams) == (one.entrant, count)]
            firsts = f"{median(turn.first_token_ms for turn in own):.0f} / {median(turn.first_token_p99_ms for turn in own):.0f}"
            cells += f"{rate(turns, count, one.entrant):>15.0f}{firsts:>18}"
        lines.append(f"{one.entrant:<18}{cells}{one.memory_mb:>11.0f}{one.start_seconds:>9.1f}")
    return "\n".join(lines)
