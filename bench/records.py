"""What happened to each request, and what many of them amount to. Pure arithmetic over recorded times."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from forerun.bench.stats import Summary, summarize


@dataclasses.dataclass(slots=True)
class Record:
    """One request. All times in seconds of one monotonic clock.

    `due`: when it ought to have been sent. In an open loop that may be before `sent`; latencies count from `due`, so that a client that
    falls behind cannot make the server look better. `arrivals`: when each event with tokens came. `error`: empty when all went well.
    `ids`: the tokens, and `guesses`: (drafted, accepted, steps), where the server tells. `cut`: the client hung up before the end."""

    due: float
    sent: float = 0.0
    arrivals: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    ended: float = 0.0
    error: str = ""
    ids: list[int] = dataclasses.field(default_factory=list)
    guesses: tuple[int, int, int] | None = None
    cut: bool = False

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0] - self.due

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:])]


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """A request is good when its first token came within `first_token_seconds` and its mean gap is within `gap_seconds`."""

    first_token_seconds: float = math.inf
    gap_seconds: float = math.inf

    def met(self, record: Record) -> bool:
        if record.error or not record.arrivals:
            return False
        gaps = record.gaps
        mean = sum(gaps) / len(gaps) if gaps else 0.0
        return record.first_token_seconds <= self.first_token_seconds and mean <= self.gap_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One load and its outcome. `seconds`: from the first request due to the last one ended. `goodput`: requests a second that met
    the goal. `steady_tokens_per_second`: while all streams of a closed loop were busy (0 when there was no such time).
    `client_cpu`: processor seconds of the load generator a second."""

    label: str
    streams: int
    rate: float
    burstiness: float
    requests: int
    errors: dict[str, int]
    seconds: float
    tokens: int
    tokens_per_second: float
    steady_tokens_per_second: float
    requests_per_second: float
    goodput: float
    first_token_ms: Summary
    gap_ms: Summary
    total_ms: Summary
    client_cpu: float


def steady_rate(records: Sequence[Record], streams: int) -> float:
    """Token events a second of a closed loop while all of its streams were busy: from when each had its first token to when the first
    found no more work. 0 when there was no such time, or a stream began with an error. `records` are in the order they were due."""
    first = records[:streams]
    if len(first) < streams or not streams or not all(record.arrivals for record in first):
        return 0.0
    start = max(record.arrivals[0] for record in first)
    last_due = max(record.due for record in records)
    end = min(record.ended for record in records if record.ended >= last_due)
    if end <= start:
        return 0.0
    return sum(sum(start < time <= end for time in record.arrivals) for record in records) / (end - start)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The load that was asked for: `streams` clients at once (closed loop), or `rate` requests a second (open loop)."""

    streams: int = 0
    rate: float = 0.0
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if self.streams <= 0 and (self.rate <= 0 or self.burstiness <= 0):
            raise ValueError("a load has a positive number of streams, or a positive rate and burstiness")

    @property
    def label(self) -> str:
        if self.streams:
            return f"{self.streams} stream" + ("s" if self.streams > 1 else "")
        return f"{self.rate:g}/s" + ("" if self.burstiness == 1 else f", burstiness {self.burstiness:g}")


def condense(shape: Shape, records: Sequence[Record], goal: Goal, client_cpu_seconds: float) -> Point:
    """Raises ValueError when there are no records."""
    if not records:
        raise ValueError("no request was sent")
    good = [record for record in records if not record.error]
    seconds = max(record.ended for record in records) - min(record.due for record in records)
    tokens = sum(record.tokens for record in records)
    spoke = [record for record in good if record.arrivals]
    return Point(
        label=shape.label,
        streams=shape.streams,
        rate=shape.rate,
        burstiness=shape.burstiness,
        requests=len(records),
        errors=dict(collections.Counter(record.error for record in records if record.error)),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        steady_tokens_per_second=steady_rate(records, shape.streams),
        requests_per_second=len(good) / seconds,
        goodput=sum(map(goal.met, records)) / seconds,
        first_token_ms=summarize((record.first_token_seconds for record in spoke), 1000),
        gap_ms=summarize((gap for record in spoke for gap in record.gaps), 1000),
        total_ms=summarize((record.ended - record.due for record in good), 1000),
        client_cpu=client_cpu_seconds / seconds,
    )
