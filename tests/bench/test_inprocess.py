"""Loops that answer JSON lines, and what is made of their step times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forerun.bench.errors import BenchError
from forerun.bench.inprocess import Indoors, bars, files, table
from forerun.bench.yardstick import Loop

ECHO = """
import json, sys
start = json.loads(sys.stdin.readline()) if {wants} else {{}}
print(json.dumps({{"heard": start}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({{"seconds": [0.5] * request.get("steps", 1)}}), flush=True)
"""


@pytest.mark.parametrize("start", [None, {"start": {"model": "m"}}])
async def test_a_loop_answers_line_by_line(start: dict[str, object] | None) -> None:
    async with Loop("echo", [sys.executable, "-c", ECHO.format(wants=start is not None)], start) as loop:
        assert loop.first == {"heard": start or {}}
        assert await loop.decode(2, 8, 3) == [0.5] * 3
        assert await loop.prefill(8) == [0.5]


async def test_a_loop_that_ends_is_named() -> None:
    with pytest.raises(BenchError, match="quitter ended"):
        async with Loop("quitter", [sys.executable, "-c", "pass"]):
            pass


def round_of(weights: str, number: int, slow: float = 1.0) -> Indoors:
    return Indoors(weights, number, {1: (100, 90), 8: (400, 500), 16: (800 * slow, 400)}, {57: (20, 30), 512: (200 * slow, 100)})


def test_bars_are_of_bf16_and_of_ratios_within_a_round() -> None:
    found = {bar.name: (bar.measured, bar.passed) for bar in bars([round_of("bf16", 0), round_of("bf16", 1), round_of("4 bits", 0, 9.0)])}
    assert found == {
        "in-process, 16 rows: ours / OpenVINO": (2.0, True),
        "in-process, prompt of 512: ours / OpenVINO": (0.5, False),
        "in-process, first token of 57": (20, True),
    }
    assert bars([round_of("4 bits", 0)]) == []


def test_a_line_for_each_kind_of_weights() -> None:
    lines = table([round_of("bf16", 0), round_of("4 bits", 0)]).splitlines()
    assert len(lines) == 3 and "800 / 400" in lines[1] and lines[2].startswith("4 bits")
    assert table([]) == ""


def test_only_what_is_installed(tmp_path: Path) -> None:
    assert files(tmp_path)[1] == {}
    for name in ("openvino/venv/bin/python", "llama.cpp/models/q8_0.gguf"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
    assert files(tmp_path)[1] == {}, "an environment without what belongs into it"
    (tmp_path / "openvino/ready").touch()
    assert list(files(tmp_path)[1]) == ["8 bits"]
