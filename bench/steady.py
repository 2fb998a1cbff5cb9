"""What a closed loop did while all of its streams were busy, and how two such loops compare for equal work. Pure arithmetic.

    first requests       all streams have their first token         a stream finds no more work
    ──┬──────────────────┬──────────────────────────────────────────┬──────────────▶ seconds of one clock
      │  left out        │  steady                                   │  left out

Two servers with the same requests are at other places of their answers at both ends, and one may have read a prompt or two more. So
it is not times that are cut alike, but work: tokens that came and letters of prompts that were read, at what they take on one of the two.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

from forerun.bench.errors import BenchError
from forerun.bench.records import Record

BLOCKS = 8
"""parts of equal work that are compared with each other"""


@dataclasses.dataclass(frozen=True, slots=True)
class Steady:
    """By `times[i]`, ascending, `tokens[i]` had come since the first request and `letters[i]` of prompts were read. `start`, `end`:
    between these all streams were busy."""

    times: list[float]
    tokens: list[float]
    letters: list[float]
    start: float
    end: float

    @classmethod
    def of(cls, records: Sequence[Record], asked: Sequence[str], streams: int, whole: bool = False) -> Steady:
        """`records` of the prompts `asked`, in the order they were due. `whole`: it starts with the first request. Raises BenchError when
        there was no time in which all streams were busy."""
        last_due = max((record.due for record in records), default=math.inf)
        end = min((record.ended for record in records if record.ended >= last_due), default=-math.inf)
        first = records[:streams]
        if whole and records:
            start = records[0].due
        else:
            spoke = len(first) == streams and all(record.arrivals for record in first)
            start = max(record.arrivals[0] for record in first) if spoke else math.inf
        if end <= start:
            raise BenchError("there was no time in which all streams were busy: give more prompts, or longer answers")
        times = sorted({record.due for record in records} | {time for record in records for time in record.arrivals})
        tokens, letters, place = [0.0] * len(times), [0.0] * len(times), {time: number for number, time in enumerate(times)}
        for record, text in zip(records, asked, strict=True):
            for time in record.arrivals:
                tokens[place[time]] += 1
            if record.arrivals:
                due, came = place[record.due], place[record.arrivals[0]]
                for number in range(due + 1, came + 1):  # a prompt is read all the while
                    letters[number] += len(text) * (times[number] - times[number - 1]) / (times[came] - times[due])
        return cls(times, list(itertools.accumulate(tokens)), list(itertools.accumulate(letters)), start, end)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def gained(self, counted: list[float]) -> float:
        """Of `tokens` or `letters`, while all streams were busy."""
        return _between(self.times, counted, self.end) - _between(self.times, counted, self.start)


def compare(one: Steady, other: Steady, token_seconds: float) -> list[tuple[float, float]]:
    """Seconds that the two took for parts of equal work, as much of it as both did while all of their streams were busy. `token_seconds`:
    what a token takes on the other one; what that leaves of its time, prompts took. Raises BenchError when there was no such work."""
    prompts = max(0.0, other.seconds - token_seconds * other.gained(other.tokens))
    letters = other.gained(other.letters)
    letter_seconds = prompts / letters if letters else 0.0
    sides = [(side, [token_seconds * a + letter_seconds * b for a, b in zip(side.tokens, side.letters)]) for side in (one, other)]
    begin = max(_between(side.times, work, side.start) for side, work in sides)
    finish = min(_between(side.times, work, side.end) for side, work in sides)
    if finish <= begin:
        raise BenchError("two servers were never at the same place of their work: give more prompts, or longer answers")
    marks = [begin + (finish - begin) * part / BLOCKS for part in range(BLOCKS + 1)]
    reached = [[_between(work, side.times, mark) for mark in marks] for side, work in sides]
    return list(zip(*([later - earlier for earlier, later in itertools.pairwise(times)] for times in reached)))


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """How many times as long the others took, all in all."""
    return sum(other for _, other in pairs) / sum(one for one, _ in pairs)


def doubt(pairs: Sequence[tuple[float, float]]) -> float:
    """Standard error of the ratio: each pair is left out once (the jackknife; Miller, 1974)."""
    count = len(pairs)
    if count < 2:
        return 0.0
    left = [ratio([*pairs[:place], *pairs[place + 1 :]]) for place in range(count)]
    mean = sum(left) / count
    return math.sqrt((count - 1) / count * sum((each - mean) ** 2 for each in left))


def _between(known: list[float], values: list[float], at: float) -> float:
    """The value where `known`, ascending, is `at`: on a line between two of them."""
    above = bisect.bisect_left(known, at)
    if above == 0:
        return values[0]
    if above == len(known):
        return values[-1]
    share = (at - known[above - 1]) / (known[above] - known[above - 1])
    return values[above - 1] + share * (values[above] - values[above - 1])
