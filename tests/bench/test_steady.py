"""Equal work of two closed loops: whatever they did before, wherever they were cut, and how sure it is."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.bench.errors import BenchError
from forerun.bench.records import Record
from forerun.bench.steady import Steady, compare, doubt, ratio

TOKEN, LETTER = 0.004, 0.0005


def loop(streams: int, lengths: list[int], letters: list[int], slow: float, delay: float, noise: float = 0, seed: int = 0) -> list[Record]:
    """A server that does one thing after the other: a step, which brings each stream a token and takes `TOKEN` for each, or a whole prompt.
    Its first step takes `delay` longer. A stream begins its next prompt when it has the tokens of its last, and all end with the first
    that finds none."""
    dice, now = random.Random(seed), delay
    records: list[Record] = []
    left = [0] * streams
    running: list[Record | None] = [None] * streams
    while True:
        for place in range(streams):
            if left[place]:
                continue
            if (last := running[place]) is not None:
                last.ended = now
            if len(records) == len(lengths):
                for record in filter(None, running):
                    record.ended = now
                return records
            number = len(records)
            running[place] = Record(due=now if last is not None else 0.0)
            records.append(running[place])  # type: ignore[arg-type]
            now += slow * LETTER * letters[number] * dice.lognormvariate(0.0, noise)
            running[place].arrivals.append(now)  # type: ignore[union-attr]
            left[place] = lengths[number] - 1
        now += slow * TOKEN * streams * dice.lognormvariate(0.0, noise)
        for place in range(streams):
            if left[place]:
                running[place].arrivals.append(now)  # type: ignore[union-attr]
                left[place] -= 1


def pairs(one: list[Record], other: list[Record], texts: list[str], streams: int, whole: bool = False) -> list[tuple[float, float]]:
    busy, plain = (Steady.of(records, texts, streams, whole) for records in (one, other))
    return compare(busy, plain, TOKEN)


@given(st.integers(1, 6), st.data(), st.floats(0.5, 2.0), st.floats(0.0, 2.0))
def test_how_a_match_starts_makes_no_difference(streams: int, data: st.DataObject, slow: float, delay: float) -> None:
    """A server that is so many times as fast, and stumbled at the start: the ratio is that of the speeds."""
    count = 4 * streams
    lengths = data.draw(st.lists(st.integers(20, 60), min_size=count, max_size=count))
    letters = data.draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    texts = ["x" * each for each in letters]
    one, other = loop(streams, lengths, letters, slow, delay), loop(streams, lengths, letters, 1.0, 0.0)
    found = pairs(one, other, texts, streams)
    assert ratio(found) == pytest.approx(1 / slow, rel=0.02)
    assert pairs(other, other, texts, streams)[0] == pytest.approx(pairs(other, other, texts, streams)[0][::-1])


def test_a_short_match_is_judged_from_its_first_request_on() -> None:
    texts = ["x" * 40] * 4
    one, other = (loop(4, [20] * 4, [40] * 4, 1.0, delay) for delay in (0.8, 0.0))
    assert ratio(pairs(one, other, texts, 4, whole=True)) < 0.8


def test_work_is_what_counts_not_where_a_side_was_cut() -> None:
    """The guessing side was cut 100 tokens further on, at the same time: it is faster by that."""
    plain = Record(0.0, arrivals=[0.01 * (n + 1) for n in range(200)], ended=2.0)
    further = Record(0.0, arrivals=[0.01 * (n + 1) / 1.5 for n in range(300)], ended=2.0)
    assert ratio(pairs([further], [plain], [""], 1, whole=True)) == pytest.approx(1.5, rel=0.02)


def test_the_standard_error_is_that_of_many_matches() -> None:
    found = [
        pairs(
            *(loop(4, [50] * 16, [40] * 16, 1.0, 0.0, noise=0.3, seed=2 * seed + side) for side in (0, 1)),
            ["x" * 40] * 16,
            4,
        )
        for seed in range(40)
    ]
    ratios = [ratio(one) for one in found]
    spread = math.sqrt(sum((one - 1.0) ** 2 for one in ratios) / len(ratios))
    assert 0.7 * spread < sum(map(doubt, found)) / len(found) < 1.4 * spread
    assert sum(abs(one - 1.0) < 2 * doubt(pair) for one, pair in zip(ratios, found)) > 30
    assert doubt([(1.0, 2.0)]) == 0.0


def test_no_time_in_which_all_were_busy_is_an_error() -> None:
    speaks, silent, late = Record(0.0, arrivals=[1.0], ended=2.0), Record(0.0, ended=2.0), Record(0.0, arrivals=[3.0], ended=4.0)
    for records, streams in (([], 1), ([speaks], 2), ([speaks, silent], 2), ([speaks, late], 2)):
        with pytest.raises(BenchError, match="more prompts"):
            Steady.of(records, [""] * len(records), streams)
    early, after = (Steady.of([one], [""], 1, whole=True) for one in (Record(0.0, arrivals=[1.0], ended=2.0), Record(0.0, ended=1.0)))
    with pytest.raises(BenchError, match="same place"):
        compare(early, after, 1.0)
