"""The plan of a speculation sweep and the arithmetic of its results. Pure: knows neither servers nor clocks.

A prompt that a server has answered once is a prompt that it can guess perfectly, so no server sees one twice: the points of a sweep are
dealt to *lives*, in each of which fresh servers get every prompt at most once.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Sequence

from forerun.bench import steady
from forerun.bench.bars import Bar
from forerun.bench.stats import median
from forerun.bench.workloads import Workload

NEVER_LOSES = 0.98
"""of the speed without guesses, at every point"""
ENOUGH = 2.0
"""prompts a stream from which a match is long enough to leave out how it starts"""


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """One load, to be put on both servers. `guessing_first`: the order, which alternates from round to round."""

    round: int
    workload: str
    streams: int
    prompts: Sequence[str]
    guessing_first: bool

    @property
    def steady(self) -> bool:
        """It is judged from when all streams are busy on; the others, from their first request on."""
        return len(self.prompts) >= ENOUGH * self.streams


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """What one server made of a match. `seconds`: while all streams were busy, in which `tokens` came; `requests_rate`: finished requests
    a second; `step_ms`: of a step without prompts."""

    seconds: float
    tokens: float
    requests_rate: float
    first_token_ms: float
    step_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """`pairs`: seconds that the one that guesses and the plain one took for parts of equal work. `guesses`, `tokens`: of a sequence in a
    step, on average, of the server that guesses; `acceptance`: share of its guesses that held. `state`: its series about speculation: what
    counters gained, and gauges afterwards. `differing`: prompts whose answers differ between the two, which must never be."""

    round: int
    workload: str
    streams: int
    guessing: Side
    plain: Side
    pairs: list[tuple[float, float]]
    guesses: float
    acceptance: float
    tokens: float
    differing: list[str] = dataclasses.field(default_factory=list)
    state: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Seconds that the plain server takes for what the other one did, over the seconds of the other one."""
        return steady.ratio(self.pairs)

    @property
    def doubt(self) -> float:
        """Standard error of the ratio, as the parts of the match have it."""
        return steady.doubt(self.pairs)

    @property
    def plain_rate(self) -> float:
        """Tokens a second of the plain server; the other one has `ratio` times as many, for equal work."""
        return self.plain.tokens / self.plain.seconds if self.plain.seconds else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    """All matches of one workload at one number of streams. The ratio of a round is that of all its matches together, so that chance counts
    for less; `ratio`, `least`, `most`: median, least and greatest of rounds, `doubt`: standard error of their mean, as the parts of matches
    have it. The others are medians of matches."""

    workload: str
    streams: int
    rounds: int
    ratio: float
    least: float
    most: float
    doubt: float
    guessing_rate: float
    plain_rate: float
    guesses: float
    acceptance: float
    tokens: float


def requests(streams: int) -> int:
    """How many make a match. Most for one stream, which has bars, since one text is easier to guess than another: six prompts of a kind,
    replayed by the dozen, came to anything from 1.2 to 2.0 on chat. And enough for the others to be busy for seconds: two for each of eight
    streams were over in less than one."""
    return 20 if streams == 1 else min(8 * streams, max(2 * streams, 64))


def matches(streams: int) -> int:
    """Of a round. A crowd is through with the prompts of a workload in three to ten seconds."""
    return 1 if streams <= 8 else streams // 8


LEAST_EACH = 2
"""requests of each stream: the time in which all of them are busy ends with the first that has no more"""


def lives(workloads: Sequence[Workload], streams: Sequence[int], rounds: int, seed: int = 0, most: int = 0) -> list[list[Match]]:
    """Matches in order, in groups for fresh servers. A workload with fewer prompts than a match has requests gives what it has. `most`:
    requests of a match, but no fewer than two for each stream; 0 = as many as are good for its figures."""
    found: list[list[Match]] = [[]]
    order = [count for count in streams for _ in range(1 if most else matches(count))]
    for number in range(rounds):
        decks = _shuffled(workloads, seed + number)
        for index, count in enumerate(order):
            each = min(requests(count), max(most, LEAST_EACH * count)) if most else requests(count)
            wanted = {workload.name: min(each, len(workload.prompts)) for workload in workloads}
            if any(len(decks[name]) < needed for name, needed in wanted.items()):
                found.append([])
                decks = _shuffled(workloads, seed + number)
            for place, (name, needed) in enumerate(wanted.items()):
                dealt, decks[name] = decks[name][:needed], decks[name][needed:]
                found[-1].append(Match(number, name, count, dealt, (number + index + place) % 2 == 0))
        found.append([])
    return [life for life in found if life]


def _shuffled(workloads: Sequence[Workload], seed: int) -> dict[str, list[str]]:
    return {one.name: random.Random(f"{seed} {one.name}").sample(list(one.prompts), len(one.prompts)) for one in workloads}


def condense(outcomes: Iterable[Outcome]) -> list[Spot]:
    """One for each workload and number of streams, in the order in which they came first."""
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.workload, outcome.streams), []).append(outcome)
    return [_spot(workload, streams, group) for (workload, streams), group in groups.items()]


def _spot(workload: str, streams: int, group: Sequence[Outcome]) -> Spot:
    rounds: dict[int, list[tuple[float, float]]] = {}
    for one in group:
        rounds.setdefault(one.round, []).extend(one.pairs)
    ratios = [steady.ratio(pairs) for pairs in rounds.values()]
    ratio, plain_rate = median(ratios), median(one.plain_rate for one in group)
    return Spot(
        workload,
        streams,
        len(rounds),
        ratio,
        least=min(ratios),
        most=max(ratios),
        doubt=math.hypot(*(steady.doubt(pairs) for pairs in rounds.values())) / len(rounds),
        guessing_rate=ratio * plain_rate,
        plain_rate=plain_rate,
        guesses=median(one.guesses for one in group),
        acceptance=median(one.acceptance for one in group),
        tokens=median(one.tokens for one in group),
    )


def bars(spots: Sequence[Spot], wanted: dict[str, float]) -> list[Bar]:
    """Never to lose at any point; and what a workload must win (`wanted`) when it has the machine for itself."""
    found = [
        Bar(f"{spot.workload}, 1 stream: speed over plain", spot.ratio, "≥", wanted[spot.workload], "", _note(spot))
        for spot in spots
        if spot.streams == 1 and wanted.get(spot.workload)
    ]
    worst = [min((spot for spot in spots if spot.streams == count), key=lambda spot: spot.ratio) for count in _counts(spots)]
    losers = [spot for spot in spots if spot.ratio < NEVER_LOSES and spot not in worst]
    for spot in sorted([*worst, *losers], key=lambda spot: (spot.streams, spot.ratio)):
        name = f"{'worst at ' if spot in worst else ''}{spot.streams} streams: {spot.workload}"
        found.append(Bar(name, spot.ratio, "≥", NEVER_LOSES, "", _note(spot)))
    return found


def _counts(spots: Sequence[Spot]) -> list[int]:
    return sorted({spot.streams for spot in spots})


def _note(spot: Spot) -> str:
    spread = f" ± {spot.doubt:.3f}" + (f", rounds {spot.least:.3f} … {spot.most:.3f}" if spot.rounds > 1 else "")
    return f"{spot.guessing_rate:.0f} of {spot.plain_rate:.0f} tok/s,{spread}"


def table(spots: Sequence[Spot]) -> str:
    """Speed over plain decoding by workload and streams, with its standard error; in brackets the guesses of a sequence in a step."""
    counts = _counts(spots)
    cells = {(spot.workload, spot.streams): f"{spot.ratio:.3f} ± {spot.doubt:.3f} ({spot.guesses:.1f})" for spot in spots}
    head = f"{'workload':<12}" + "".join(f"{f'{count} stream' + 's' * (count > 1):>22}" for count in counts)
    names = dict.fromkeys(spot.workload for spot in spots)
    return "\n".join([head, *(f"{name:<12}" + "".join(f"{cells.get((name, count), '–'):>22}" for count in counts) for name in names)])
