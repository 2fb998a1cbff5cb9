"""Guessing costs a step little beside the forward, and not guessing costs nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "time_drafting.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("time_drafting", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drafting_stays_within_a_few_yardsticks(tool: Any) -> None:
    """Measured: about 7 for one row and 50 for sixteen, on text that can be guessed far ahead. The best of three, since others may be at
    work on this machine."""
    for rows, most in ((1, 15.0), (16, 110.0)):
        found = min(tool.measure("suffix", rows, 60) for _ in range(3))
        assert found[1] < most and found[2] > 1.0


def test_without_guesses_no_row_is_looked_at(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = tool.Bench("suffix", 16)
    for verb in ("absorb", "propose"):
        monkeypatch.setattr(bench._speculator._drafter, verb, lambda *told: pytest.fail("the drafter was called"))
    bench.step(guess=0)
    assert bench.nodes == 0
