"""What is said while one waits: seldom, with speed and what is left."""

from __future__ import annotations

from forerun.train.progress import EVERY_SECONDS, Stage


def test_a_stage_speaks_seldom_and_says_what_is_left() -> None:
    now = [100.0]
    said: list[str] = []
    stage = Stage("writing", "tokens", 1000, 200, said.append, lambda: now[0])
    stage.reached(210)
    assert said == []
    now[0] += EVERY_SECONDS
    stage.reached(400, ", loss 2")
    stage.reached(410)
    assert said == ["writing: 40 %, 400 of 1,000 tokens, 20 tokens/s, 30 s left, loss 2"]


def test_slow_stages_have_fractions_and_hours() -> None:
    now = [0.0]
    stage = Stage("training", "steps", 10_000, 0, print, lambda: now[0])
    stage.reached(5)
    assert stage.line(10.0) == "training: 0 %, 5 of 10,000 steps, 0.50 steps/s, 5 h 33 min left"
    stage.reached(10_000)
    assert "left" not in stage.line(20.0)
