from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.router.pace import Pace
from tests.router.worker_model import ready

BASE, ROW = 0.009, 0.001
MEASURED = BASE + ROW, BASE + 1001 * ROW


def paced(bound_ms: float | None = 60.0) -> Pace:
    return Pace(ready(max_step_tokens=1001, step_seconds=MEASURED), bound_ms)


def test_the_allowance_keeps_a_step_within_the_bound() -> None:
    assert paced().allowance(1) in (49, 50)
    assert paced().allowance(21) in (29, 30)


def test_guesses_get_what_prompts_leave() -> None:
    pace = paced()
    assert pace.room(1 + pace.allowance(1)) == 0
    assert pace.room(1 + 20) in (29, 30)


def test_by_default_a_step_takes_a_tenth_of_a_second_or_four_plain_steps() -> None:
    assert Pace(ready(step_seconds=(0.01, 1.0)), None).bound_seconds == 0.1
    assert Pace(ready(step_seconds=(0.20, 1.0)), None).bound_seconds == 0.8


def test_a_worker_that_started_on_a_busy_machine_does_not_pause_streams_for_longer_ever_after() -> None:
    pace = Pace(ready(max_step_tokens=1001, step_seconds=(0.08, 4.0)), None)
    assert pace.bound_seconds == pytest.approx(0.32)
    for _ in range(200):
        pace.stepped(8, 0, BASE + 8 * ROW)
        pace.stepped(8, 90, BASE + 98 * ROW)
    assert pace.bound_seconds == 0.1 and pace.allowance(8) == pytest.approx(83, abs=3)


def test_contexts_that_many_streams_read_make_no_longer_pause() -> None:
    """Plain steps of many streams are the dearer the longer their contexts are; that is no reason to let them wait for longer."""
    pace = Pace(ready(max_step_tokens=1001, step_seconds=(0.03, 0.53)), None)
    before = pace.bound_seconds
    for _ in range(200):
        pace.stepped(32, 0, 0.09)
    assert pace.bound_seconds == before == pytest.approx(0.12)


def test_a_worker_that_measured_nothing_is_not_bounded() -> None:
    pace = Pace(ready(max_step_tokens=64), None)
    pace.stepped(4, 60, 9.0)
    assert pace.allowance(16) == pace.room(80) == 64


def test_prompts_always_move_and_guesses_need_not() -> None:
    pace = Pace(ready(max_step_tokens=64, step_seconds=(0.5, 9.0)), 1.0)
    assert pace.allowance(32) == 8
    assert pace.room(32) == 0


def test_it_follows_what_steps_take() -> None:
    pace = paced()
    for _ in range(300):
        pace.stepped(5, 0, 0.010 + 5 * 0.002)
        pace.stepped(5, 100, 0.010 + 105 * 0.002)
    assert pace.allowance(5) == pytest.approx(20, abs=1)


@given(st.lists(st.tuples(st.integers(1, 32), st.integers(0, 200), st.integers(0, 120)), min_size=1, max_size=300))
def test_guesses_take_nothing_from_prompts(steps: list[tuple[int, int, int]]) -> None:
    """However many there were and however rarely a step had none: where a guess takes as long as any row, the bound is used as before."""
    pace = paced()
    for streams, prompt, guesses in steps:
        pace.stepped(streams, prompt + guesses, BASE + (streams + prompt + guesses) * ROW)
    assert pace.allowance(8) in (42, 43)


def test_a_larger_batch_is_seen_without_a_plain_step() -> None:
    """Under load every step carries prompts, so that nothing else says what the streams themselves take."""
    pace = paced()
    for _ in range(100):
        pace.stepped(32, 19, BASE + 51 * ROW)
    assert pace.allowance(32) in (18, 19)


@pytest.mark.parametrize("more", [0, 50])
def test_hiccups_change_little(more: int) -> None:
    """A process that was stopped for a second, or a clock that stood still."""
    pace = paced()
    pace.stepped(1, more, 30.0)
    assert pace.allowance(1) >= 40
    for _ in range(20):
        pace.stepped(1, 50, BASE + 51 * ROW)
    pace.stepped(1, more, 1e-9)
    pace.stepped(1, more, 0.0)
    assert 40 <= pace.allowance(1) <= 60


@given(st.integers(2, 12), st.integers(0, 60))
def test_a_process_that_is_stopped_now_and_then_reads_prompts_as_fast_as_one_that_is_not(every: int, more: int) -> None:
    pace = paced()
    for number in range(200):
        pace.stepped(8, more, BASE + (8 + more) * ROW + 0.5 * (number % every == 0))
    assert pace.allowance(8) in (42, 43)


def test_it_recovers_from_hiccups_while_every_step_has_prompts() -> None:
    pace = paced()
    for _ in range(10):
        pace.stepped(1, 0, 1.0)
    assert pace.allowance(1) < 45
    for _ in range(200):
        pace.stepped(1, 40, BASE + 41 * ROW)
    assert pace.allowance(1) in range(48, 53)
