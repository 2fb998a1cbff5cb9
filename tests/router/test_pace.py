from __future__ import annotations

import pytest

from forerun.router.pace import Pace
from tests.router.worker_model import ready


def test_the_allowance_keeps_a_step_within_the_bound() -> None:
    pace = Pace(ready(max_step_tokens=1001, step_seconds=(0.010, 1.010)), 60.0)
    assert pace.allowance() in (49, 50)


def test_by_default_a_step_takes_a_tenth_of_a_second_or_four_plain_steps() -> None:
    assert Pace(ready(step_seconds=(0.01, 1.0)), None).bound_seconds == 0.1
    assert Pace(ready(step_seconds=(0.20, 1.0)), None).bound_seconds == 0.8


def test_a_worker_that_measured_nothing_is_not_bounded() -> None:
    assert Pace(ready(max_step_tokens=64), None).allowance() == 64


def test_prompts_always_move() -> None:
    assert Pace(ready(max_step_tokens=64, step_seconds=(0.5, 9.0)), 1.0).allowance() == 8


def test_it_follows_what_steps_take() -> None:
    pace = Pace(ready(max_step_tokens=1001, step_seconds=(0.010, 1.010)), 60.0)
    for _ in range(200):
        pace.stepped(0, 0.020)
        pace.stepped(100, 0.020 + 100 * 0.002)
    assert pace.allowance() == pytest.approx(20, abs=1)


def test_one_hiccup_changes_little() -> None:
    pace = Pace(ready(max_step_tokens=1001, step_seconds=(0.010, 1.010)), 60.0)
    pace.stepped(50, 30.0)
    assert pace.allowance() >= 40
    pace.stepped(0, 0.0)
    assert pace.allowance() >= 40
