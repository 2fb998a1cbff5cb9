"""What many records amount to."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.bench.records import Goal, Record, Shape, condense, steady_rate


def record(due: float, *arrivals: float, error: str = "") -> Record:
    return Record(due, due, list(arrivals), len(arrivals), arrivals[-1] if arrivals else due + 1, error)


def test_a_point_counts_what_happened() -> None:
    records = [record(0, 1, 2, 3), record(1, 1.5, 2.5), record(2, error="HTTP 429: full"), record(2, error="HTTP 429: full")]
    point = condense(Shape(streams=2), records, Goal(), client_cpu_seconds=0.3)
    assert (point.requests, point.errors, point.tokens) == (4, {"HTTP 429: full": 2}, 5)
    assert point.seconds == 3
    assert point.tokens_per_second == pytest.approx(5 / 3)
    assert point.requests_per_second == pytest.approx(2 / 3)
    assert point.client_cpu == pytest.approx(0.1)
    assert point.first_token_ms.count == 2
    assert (point.first_token_ms.max, point.gap_ms.max) == (1000, 1000)
    assert point.total_ms.max == 3000


def test_latency_counts_from_when_the_request_was_due() -> None:
    """A generator that could not send in time must not make the server look better."""
    late = Record(due=0, sent=5, arrivals=[6.0], tokens=1, ended=6)
    assert late.first_token_seconds == 6


@pytest.mark.parametrize(
    ("goal", "good"), [(Goal(), 2), (Goal(first_token_seconds=0.6), 1), (Goal(gap_seconds=0.4), 1), (Goal(0.1, 0.1), 0)]
)
def test_goodput(goal: Goal, good: int) -> None:
    records = [record(0, 0.5, 1.0), record(0, 1.0, 1.25), record(0, error="timeout")]
    assert condense(Shape(rate=1), records, goal, 0).goodput == pytest.approx(good / 1.25)


def test_no_records_are_no_point() -> None:
    with pytest.raises(ValueError, match="no request"):
        condense(Shape(streams=1), [], Goal(), 0)


@given(st.integers(1, 8), st.integers(20, 60), st.floats(0.001, 0.1), st.lists(st.floats(0, 0.5), min_size=8, max_size=8))
def test_steady_rate_does_not_see_how_streams_start(streams: int, count: int, gap: float, offsets: list[float]) -> None:
    """Streams with one gap, started at any time close enough to overlap: the rate is streams/gap within what the window's edges cut."""
    records = [record(0, *(offset * gap * 10 + number * gap for number in range(count))) for offset in offsets[:streams]]
    window = (count - 1) * gap - 10 * gap * (max(offsets[:streams]) - min(offsets[:streams]))
    assert steady_rate(records, streams) == pytest.approx(streams / gap, abs=2 * streams / window)


@given(st.integers(2, 5), st.integers(2, 6), st.integers(5, 20))
def test_steady_rate_leaves_out_the_tail(streams: int, rounds: int, count: int) -> None:
    """Clients that send one request after another without a pause, and one straggler at the end, alone for a long time."""
    records = [
        record(turn * count, *(turn * count + number for number in range(1, count + 1))) for turn in range(rounds) for _ in range(streams)
    ]
    straggler = record(rounds * count, *(rounds * count + 100 * number for number in range(1, 50)))
    assert steady_rate(records, streams) == pytest.approx(streams)
    assert steady_rate([*records, straggler], streams) == pytest.approx(streams)


def test_no_steady_rate() -> None:
    one, other, silent = record(0, 1, 2), record(0, 3, 4), record(0, error="timeout")
    assert steady_rate([one, other], 2) == 0, "they never overlap"
    assert steady_rate([one, silent], 2) == 0, "one never spoke"
    assert steady_rate([one], 2) == 0, "fewer requests than streams"
    assert steady_rate([one, other], 0) == 0, "an open loop has no streams"


def test_labels_name_the_load() -> None:
    shapes = [Shape(streams=1), Shape(streams=4), Shape(rate=2.5), Shape(rate=3, burstiness=0.5)]
    labels = [shape.label for shape in shapes]
    assert all(a != b for a, b in itertools.combinations(labels, 2))
    assert labels == ["1 stream", "4 streams", "2.5/s", "3/s, burstiness 0.5"]
