"""The last minutes and the times of tokens, as the live page reads them."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from forerun.router.observer import Load, StepReport
from forerun.server.recent import KEPT_SECONDS, MOST_TIMES, WINDOW_SECONDS, History, Times

IDLE = Load(0, 0, 0, 0, 64, 16)
STEP = StepReport(0.01, 100, 2, 107, 5, 5, 5, 3, 100, 9000)


def test_a_sample_a_second_whatever_is_heard() -> None:
    history = History()
    for tick in range(41):
        history.load(IDLE, tick / 4)
    assert [sample.at for sample in history.since(-1)] == [float(second) for second in range(11)]


def test_whoever_has_seen_a_sample_gets_what_came_since() -> None:
    history = History()
    for second in range(10):
        history.stepped(STEP)
        history.load(dataclasses.replace(IDLE, running=second), float(second))
    later = history.since(7.0)
    assert [(sample.at, sample.running) for sample in later] == [(8.0, 8), (9.0, 9)]
    last = later[-1]
    assert (last.tokens, last.prompt, last.turns, last.drafted, last.accepted) == (50, 1000, 20, 50, 30)
    assert history.since(9.0) == []


def test_only_the_last_minutes_are_kept() -> None:
    history = History()
    for second in range(1000):
        history.load(IDLE, float(second))
    assert len(history.since(-1)) == KEPT_SECONDS
    assert history.since(-1)[0].at == 1000 - KEPT_SECONDS


@given(st.lists(st.tuples(st.floats(0.001, 10), st.integers(1, 9)), min_size=1, max_size=60))
def test_quantiles_are_those_of_all_tokens_one_by_one(heard: list[tuple[float, int]]) -> None:
    times = Times()
    for seconds, tokens in heard:
        times.observe(0.0, seconds, tokens)
    found = times.quantiles(1.0)
    each = sorted(seconds for seconds, tokens in heard for _ in range(tokens))
    assert found is not None and found.tokens == len(each)
    for share, value in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        assert value == each[max(0, math.ceil(share * len(each)) - 1)]


def test_old_tokens_do_not_count_and_memory_is_bounded() -> None:
    times = Times()
    times.observe(0.0, 9.0)
    assert times.quantiles(WINDOW_SECONDS) is not None
    assert times.quantiles(WINDOW_SECONDS + 0.1) is None
    for _ in range(2 * MOST_TIMES):
        times.observe(100.0, 1.0)
    found = times.quantiles(100.0)
    assert found is not None and found.tokens == MOST_TIMES
