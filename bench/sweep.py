"""The plan of a speculation sweep and the arithmetic of its results. Pure: knows neither servers nor clocks.

A prompt that a server has answered once is a prompt that it can guess perfectly, so no server sees one twice: the points of a sweep are
dealt to *lives*, in each of which fresh servers get every prompt at most once.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence

from forerun.bench.bars import Bar
from forerun.bench.stats import median
from forerun.bench.workloads import Workload

NEVER_LOSES = 0.98
"""of the speed without guesses, at every point"""


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """One load, to be put on both servers. `guessing_first`: the order, which alternates from round to round."""

    round: int
    workload: str
    streams: int
    prompts: Sequence[str]
    guessing_first: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """What one server made of a match. `seconds`: while all streams were busy, in which `tokens` came; `requests_rate`: finished requests
    a second; `step_ms`: of a step without prompts; `letters`: of the prompts that it had read by then."""

    seconds: float
    tokens: int
    requests_rate: float
    first_token_ms: float
    step_ms: float
    letters: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """`guesses`, `tokens`: of a sequence in a step, on average, of the server that guesses; `acceptance`: share of its guesses that held.
    `state`: its series about speculation: what counters gained, and gauges afterwards. `differing`: prompts whose answers differ between
    the two, which must never be."""

    round: int
    workload: str
    streams: int
    guessing: Side
    plain: Side
    guesses: float
    acceptance: float
    tokens: float
    differing: list[str] = dataclasses.field(default_factory=list)
    state: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Seconds that the plain server takes for what the other one did, over the seconds of the other one.

        When a stream finds no more work the others are in the middle of their answers, each side at other places, and one may have read a
        prompt or two more. The difference in tokens is added at the price of a token of the plain server's steps, that in prompts at
        the price of a letter: all time that its steps do not account for, over all that it read."""
        plain, guessing = self.plain, self.guessing
        token_seconds = plain.step_ms / 1000 / self.streams
        letter_seconds = max(0.0, plain.seconds - plain.tokens * token_seconds) / plain.letters if plain.letters else 0.0
        plain_seconds = plain.seconds + (guessing.tokens - plain.tokens) * token_seconds
        plain_seconds += (guessing.letters - plain.letters) * letter_seconds
        return plain_seconds / self.guessing.seconds if self.guessing.seconds else 0.0

    @property
    def plain_rate(self) -> float:
        """Tokens a second of the plain server; the other one has `ratio` times as many, for equal work."""
        return self.plain.tokens / self.plain.seconds if self.plain.seconds else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    """All rounds of one workload at one number of streams; medians, and the least and greatest ratio."""

    workload: str
    streams: int
    rounds: int
    ratio: float
    least: float
    most: float
    guessing_rate: float
    plain_rate: float
    guesses: float
    acceptance: float
    tokens: float


def requests(streams: int) -> int:
    """How many make a match: five for every two streams, as far as there are so many prompts; more for few streams, since one text is
    easier to guess than another, and most for one stream, which has bars: six prompts of a kind, replayed by the dozen, came to anything
    from 1.2 to 2.0 on chat."""
    return max(5 * streams // 2, 20 if streams == 1 else 16)


def lives(workloads: Sequence[Workload], streams: Sequence[int], rounds: int, seed: int = 0, most: int = 0) -> list[list[Match]]:
    """Matches in order, in groups for fresh servers. A workload with fewer prompts than a match has requests gives what it has. `most`:
    requests of a match, but no fewer than its streams; 0 = as many as are good for its figures."""
    found: list[list[Match]] = [[]]
    for number in range(rounds):
        decks = _shuffled(workloads, seed + number)
        for index, count in enumerate(streams):
            each = min(requests(count), max(most, count)) if most else requests(count)
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
    ratios = [one.ratio for one in group]
    return Spot(
        workload,
        streams,
        len(group),
        ratio=median(ratios),
        least=min(ratios),
        most=max(ratios),
        guessing_rate=median(one.ratio * one.plain_rate for one in group),
        plain_rate=median(one.plain_rate for one in group),
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
    spread = f", rounds {spot.least:.3f} … {spot.most:.3f}" if spot.rounds > 1 else ""
    return f"{spot.guessing_rate:.0f} of {spot.plain_rate:.0f} tok/s{spread}"


def table(spots: Sequence[Spot]) -> str:
    """Speed over plain decoding by workload and streams; in brackets the guesses of a sequence in a step."""
    counts = _counts(spots)
    cells = {(spot.workload, spot.streams): f"{spot.ratio:.3f} ({spot.guesses:.1f})" for spot in spots}
    head = f"{'workload':<12}" + "".join(f"{f'{count} stream' + 's' * (count > 1):>15}" for count in counts)
    names = dict.fromkeys(spot.workload for spot in spots)
    return "\n".join([head, *(f"{name:<12}" + "".join(f"{cells.get((name, count), '–'):>15}" for count in counts) for name in names)])
