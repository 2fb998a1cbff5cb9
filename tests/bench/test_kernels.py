"""The kernel benchmark measures what it says, at the smallest size, and its verdicts follow from the figures."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from forerun.bench import kernels, kernels_torch, plots
from forerun.bench.clock import Rounds, Work, in_turns, median
from forerun.bench.kernels_torch import Pair, present
from forerun.bench.limits import SET_ON, Limits, Load, allowed_rows, multiples
from forerun.bench.random_model import SHAPES


def test_a_small_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels.json"
    monkeypatch.setattr(sys, "argv", ["kernels", "--only", "sizes", "--quick", "--seconds", "0.01", "--out", str(out)])
    kernels.main()
    result = json.loads(out.read_text())
    took = result["details"]["tiny"]
    assert all(value > 0 for value in took.values()) and took["decode of 1"] < took["decode of 16"]
    assert "tiny" in capsys.readouterr().out and result["facts"]["kernels"].startswith("native")


def test_an_unknown_part_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", "--only", "step,speed"])
    with pytest.raises(SystemExit):
        kernels.main()
    assert "no such part: speed" in capsys.readouterr().err


def test_works_are_measured_in_turns() -> None:
    order: list[str] = []
    took = in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 0.0)
    assert order == ["a", "b"] * 6 and {name: len(seconds) for name, seconds in took.seconds.items()} == {"a": 5, "b": 5}
    assert median(lambda: None, 0.0) >= 0


def test_a_ratio_is_taken_round_by_round() -> None:
    """The machine slows down to half its speed: one work always takes twice as long as the other, whatever their medians say."""
    took = Rounds({"one": [1.0, 1.0, 2.0, 2.0, 2.0], "two": [2.0, 2.0, 4.0, 4.0, 4.2]})
    assert took.ratio("two", "one") == 2.0 and took.ratio("one", "two") == 0.5 and took.median("two") == 4.0


def test_a_bar_and_a_figure_are_multiples_of_their_own_machines_limits() -> None:
    """By hand: 57 tokens are 12.2 GFLOP; there 889 a second, here 400."""
    shape = SHAPES["135m"]
    load = Load(269_000_000, 57 * shape.layer_products() + shape.vocab * shape.hidden)
    assert SET_ON.seconds(load) == pytest.approx(13.7e-3, rel=0.01)
    here = Limits(30e9, 200e9)
    assert multiples(load, 36e-3, here, 25e-3) == "1.18 × the machine's limit, where the bar is 1.83 ×"
    assert here.seconds(Load(269_000_000, 1)) == pytest.approx(8.97e-3, rel=0.01), "one row is read, not multiplied"
    assert allowed_rows(load, 1.6) == pytest.approx(11.25e-3, rel=0.01)


def test_the_least_of_several_medians_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn that was interrupted says nothing about the product."""
    asked: list[str] = []
    works: dict[str, Work] = {name: partial(asked.append, name) for name in "ab"}
    figures = iter([9.0, 5.0, 2.0, 6.0, 3.0, 5.5, 8.0, 7.0])

    def spoilt(work: Work, budget: float) -> float:
        assert budget == 0.25
        work()
        return next(figures)

    monkeypatch.setattr(kernels_torch, "median", spoilt)
    monkeypatch.setattr(kernels_torch, "PAUSE", 0.0)
    assert kernels_torch.least_median(works, 1.0) == {"a": 2.0, "b": 5.0}
    assert asked == ["a", "b"] * kernels_torch.TURNS


def test_the_verdict_is_against_the_best_of_torch() -> None:
    pairs = [
        Pair("quick", 1, ours=1e-3, linear=3e-3, packed=2e-3),
        Pair("slow", 1, ours=3e-3, linear=9e-3, packed=2e-3),
        Pair("level", 1, ours=2.02e-3, linear=2e-3, packed=None),
    ]
    assert [pair.ratio for pair in pairs] == pytest.approx([0.5, 1.5, 1.01])
    lines = present(pairs).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith(("quick", "slow ", "level"))] == ["faster", "SLOWER", "equal"]
    assert lines[-1] == "slower than torch: 1 of 3 products"


def test_of_several_passes_the_least_of_each_side_counts() -> None:
    first = [Pair("a", 1, 3.0, 9.0, 4.0), Pair("b", 8, 1.0, 1.0, None)]
    second = [Pair("a", 1, 2.0, 8.0, 5.0), Pair("b", 8, 2.0, 0.5, None)]
    assert kernels_torch.best([first, second]) == [Pair("a", 1, 2.0, 8.0, 4.0), Pair("b", 8, 1.0, 0.5, None)]


def test_shapes_are_of_the_size_they_are_there_for() -> None:
    def bytes_of(name: str) -> int:
        shape = SHAPES[name]
        return 2 * (shape.layer_products() + shape.vocab * shape.hidden)

    assert bytes_of("tiny") < 1 << 20 < 200_000_000 < bytes_of("135m") < 2_000_000_000 < bytes_of("1b")


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    plots.roofline({"rows": [1, 8], "seconds": [0.01, 0.012], "memory": 0.009, "arithmetic": [0.001, 0.008]}, path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
