"""Guessing costs a step little beside the forward, and not guessing costs nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.drafters import registry
from forerun.engine.drafters.draft import Drafter
from forerun.engine.drafters.registry import Setting

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


@pytest.mark.parametrize("options, kind", [([], "Lookups"), (["--python"], "Suffix")])
def test_both_forms_of_look_ups_can_be_timed(
    tool: Any, options: list[str], kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def open_drafter(spec: str, setting: Setting) -> Drafter:
        drafter = registry.open_drafter(spec, setting)
        opened.append(type(drafter).__name__)
        return drafter

    monkeypatch.setattr(tool, "open_drafter", open_drafter)
    monkeypatch.setattr(sys, "argv", ["time_drafting", "--rows", "1", *options])
    tool.main()
    assert opened == [kind] and "1 rows:" in capsys.readouterr().out
