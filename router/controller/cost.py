"""What a step takes now: a profile measured at start, corrected by every step since.

    seconds = factor(rows) · factor(segments, if there are guesses)
              · (profile[rows] + (segments − 1) · share + positions read · read + positions scored · score)

`rows` of the target's forward belong to `segments`, one for each sequence: its root and its guesses. The KV of a sequence is read once
for all its rows, but each row is scored against it. The profile is a staircase (tiles, cache sizes), so it is looked up for every row
count that was measured; only between buckets it is read as a line.
"""

from __future__ import annotations

import math

import msgspec

from forerun.router.controller.beside import Beside
from forerun.router.controller.filter import KNOTS, Filter


class Costs(msgspec.Struct, frozen=True):
    """A profile. `steps`: (rows, seconds) of steps of one sequence with next to no context, ascending from one row. `segment_seconds`: what
    each further sequence adds. `contexts`: (positions, read, score), ascending: what a position read, and one scored by a row, add where
    sequences have so many; per position, attention is dearer in short contexts than in long ones."""

    steps: list[tuple[int, float]]
    segment_seconds: float = 0.0
    contexts: list[tuple[int, float, float]] = []

    def at(self, positions: float) -> tuple[float, float]:
        """Seconds that a position adds, read and scored, in such a context: on a line between those that were measured."""
        below = (0, 0.0, 0.0)
        for bucket in self.contexts:
            if positions <= bucket[0]:
                share = (positions - below[0]) / (bucket[0] - below[0]) if below[0] else 1.0
                return below[1] + share * (bucket[1] - below[1]), below[2] + share * (bucket[2] - below[2])
            below = bucket
        return below[1], below[2]


class CostTable:
    """`most`: rows of the largest step that anybody will ask about. ValueError for a profile that does not start with one row."""

    def __init__(self, costs: Costs, most: int) -> None:
        if not costs.steps or costs.steps[0][0] != 1 or min(seconds for _, seconds in costs.steps) <= 0:
            raise ValueError("a cost profile starts with one row and has no step that takes no time: profile the worker again")
        self.costs = costs
        self.surprise = 1.0
        """measured over expected seconds of the last step"""
        self._base = [costs.steps[0][1], *_dense(_rising(costs.steps), most)]
        self._knots = [_knot(rows) for rows in range(most + 1)]
        self._shares = [share for _, share in self._knots]
        self._filter = Filter()
        self._beside = Beside()
        self._segments = 1
        """of the last step"""

    @property
    def drift(self) -> float:
        """By how much the machine is slower (> 1) or faster than when it was profiled, at one row."""
        return math.exp(self._filter.value[0])

    @property
    def jump(self) -> float:
        """By how much steps with guesses take longer than steps of as many rows, beyond the profile: of as many segments as the last."""
        return math.exp(self._beside.jump(self._segments))

    @property
    def usual_surprise(self) -> float:
        """By how much steps are off as a rule, relative to what was expected."""
        return self._filter.usual

    def factor(self, rows: int, guessing: int = 0) -> float:
        """`guessing`: segments of a step with guesses; 0 = none."""
        jump = self._beside.jump(guessing) if guessing else 0.0
        return math.exp(self._filter.at(*self._knots[min(rows, len(self._knots) - 1)]) + jump)

    def profiled(self, rows: int, segments: int = 1, read: int = 0, scored: int = 0) -> float:
        """Seconds by the profile alone."""
        costs = self.costs
        read_seconds, score_seconds = costs.at(read / segments)
        base = self._base[rows] if rows < len(self._base) else self._base[-1] * rows / (len(self._base) - 1)
        return base + (segments - 1) * costs.segment_seconds + read * read_seconds + scored * score_seconds

    def seconds(self, rows: int, segments: int = 1, read: int = 0, scored: int = 0, guessing: bool = False) -> float:
        """Seconds that such a step is expected to take now."""
        return self.profiled(rows, segments, read, scored) * self.factor(rows, segments if guessing else 0)

    def table(self) -> list[tuple[int, float, float]]:
        """(rows, seconds by the profile, seconds now) of steps of one sequence with next to no context, where they were measured."""
        return [(rows, self.profiled(rows), self.seconds(rows)) for rows, _ in self.costs.steps if rows < len(self._base)]

    def entry_seconds(self, rows: int, segments: int, positions: float) -> float:
        """What a position scored by one row adds to a step of so many rows now, in such a context."""
        return self.costs.at(positions)[1] * self.factor(rows, segments)

    def climb(self, rows: int, segments: int, more: int, seconds: float, hopeful: bool = False) -> list[float]:
        """What 1, 2, … `more` guesses on top of `rows` add to a step that takes `seconds`; never less than nothing. `hopeful`: sizes that
        were not seen for long are taken to be as cheap as they may be, or nobody would ever look again."""
        last = min(rows + more, len(self._base) - 1)
        low = self._knots[rows][0]
        scale = self.factor(rows)
        rest = seconds / scale - self._base[rows]
        jump = math.exp(self._beside.jump(segments))
        added: list[float] = []
        for knot in range(low, self._knots[last][0] + 1):
            first, behind = max(rows + 1, 1 << knot), min(last, (2 << knot) - 1 if knot + 1 < KNOTS else last) + 1
            below = self._relative(knot, rows, segments, low, hopeful) * jump
            rise = self._relative(min(knot + 1, KNOTS - 1), rows, segments, low, hopeful) * jump - below
            bases, shares = self._base[first:behind], self._shares[first:behind]
            added += [(base + rest) * (below + share * rise) * scale - seconds for base, share in zip(bases, shares)]
        return [more if more > 0.0 else 0.0 for more in added]

    def _relative(self, knot: int, rows: int, segments: int, low: int, hopeful: bool) -> float:
        """Correction at a knot over that at `rows`, whose knot is `low`."""
        filter = self._filter
        hope = math.sqrt(filter.doubt(low, knot) + self._beside.doubt(segments)) if hopeful else 0.0
        return math.exp(filter.value[knot] - filter.at(*self._knots[rows]) - hope)

    def correct(
        self, measured_seconds: float, rows: int, segments: int = 1, read: int = 0, scored: int = 0, guessing: bool = False
    ) -> None:
        """Learn from a finished step."""
        if measured_seconds <= 0.0:
            return
        profiled = self.profiled(rows, segments, read, scored)
        knot, share = self._knots[min(rows, len(self._knots) - 1)]
        excess = math.log(measured_seconds / profiled)
        if mistaken := self._beside.compare(segments, guessing, excess, self._filter.noise):
            self._filter.shift(-mistaken)
        self._segments = segments
        self.surprise = math.exp(self._filter.observe(knot, share, excess - (self._beside.jump(segments) if guessing else 0.0)))

    def doubt(self, rows: int, other: int) -> float:
        """How uncertain the ratio of the costs of plain steps and of `other` rows with guesses is, as a relative standard deviation."""
        last = len(self._knots) - 1
        knots = self._filter.doubt(self._knots[min(rows, last)][0], self._knots[min(other, last)][0])
        return math.sqrt(knots + self._beside.doubt(rows))


def _rising(steps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The profile without what is most likely noise: more rows do not take less time, so neighbours that say they do share their mean (pool
    adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for _, seconds in steps:
        mean, count = seconds, 1
        while pools and pools[-1][0] >= mean:
            before, more = pools.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return [(rows, mean) for (rows, _), mean in zip(steps, means)]


def _dense(steps: list[tuple[int, float]], most: int) -> list[float]:
    """Seconds for 1 … most rows: as profiled, on a line between, in proportion to the rows beyond the last."""
    found: list[float] = []
    for (low, low_seconds), (high, high_seconds) in zip(steps, [*steps[1:], (0, 0.0)]):
        for rows in range(low, high or most + 1):
            part = (rows - low) / (high - low)
            found.append(low_seconds + part * (high_seconds - low_seconds) if high else low_seconds * rows / low)
    return found[:most]


def _knot(rows: int) -> tuple[int, float]:
    """Which knot is below so many rows, and how far it is to the next one; no share at the last."""
    place = min(math.log2(max(rows, 1)), KNOTS - 1)
    knot = int(place)
    return knot, place - knot
