"""The profile of a tiny model: what is measured, what is remembered, and what it leaves behind."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forerun.backends.base import Backend
from forerun.backends.registry import open_backend
from forerun.engine import profile
from forerun.engine.build import assemble
from forerun.engine.drafters.draft import Needs, Silent
from forerun.engine.engine import Engine
from forerun.engine.profile import Costs
from forerun.messages import Ready, Start, StepPlan, StepResult
from tests.engine.tiny import Front, Sequence_, TinyModel, params_for


class Guessing(Silent):
    """Might guess, but never does."""

    needs = Needs(most=8)


def built(start: Start, heard: list[tuple[str, int, int]] | None = None) -> Engine:
    backend: Backend = open_backend("cpu", 1)
    said = heard if heard is not None else []
    return assemble(start, backend, TinyModel(backend), Guessing(), lambda *progress: said.append(progress))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "MOST_PASSES", 2)
    monkeypatch.setattr(profile, "LEAST_PASSES", 2)


def test_every_row_count_is_measured_and_the_engine_is_as_new() -> None:
    heard: list[tuple[str, int, int]] = []
    engine = built(Start("model", max_rows=5), heard)
    ready = engine.ready
    assert [rows for rows, _ in ready.costs] == [*range(1, 33), 40]
    assert all(seconds > 0 for _, seconds in ready.costs)
    assert ready.segment_seconds >= 0 and all(read >= 0 and score >= 0 for _, read, score in ready.contexts)
    stages = [(stage, done, total) for stage, done, total in heard if stage == "profiling"]
    assert stages[-1][1] == stages[-1][2] and [done for _, done, _ in stages] == sorted(done for _, done, _ in stages)
    prompt = [1, 2, 3]
    sequence = Sequence_(prompt, params_for(prompt, max_new_tokens=5))
    front = Front(engine)
    front.admit(sequence)
    front.run()
    assert len(sequence.tokens) == 5


@pytest.mark.parametrize(
    ("start", "most"), [({"max_rows": 1}, 9), ({"max_rows": 2, "max_total_tokens": 40}, 18), ({"max_rows": 50, "max_pool_tokens": 160}, 18)]
)
def test_no_more_rows_than_there_is_room_for(start: dict[str, int], most: int) -> None:
    counts = [rows for rows, _ in built(Start("model", **start)).ready.costs]  # type: ignore[arg-type]
    assert counts == list(range(1, most + 1))


def test_where_a_step_cannot_be_measured_nothing_is_said() -> None:
    assert built(Start("model", max_rows=2, max_total_tokens=20)).ready.costs == []


def test_a_step_has_the_rows_it_is_measured_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    step = Engine.step

    def watched(self: Engine, plan: StepPlan) -> StepResult:
        result = step(self, plan)
        if plan.budget:
            seen.append((plan.budget, result.rows))
        return result

    monkeypatch.setattr(Engine, "step", watched)
    built(Start("model", max_rows=4))
    assert len(seen) > 60
    assert all(budget == rows for budget, rows in seen)


def test_a_slow_model_is_measured_at_fewer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SECONDS", 1e-6)
    assert [rows for rows, _ in built(Start("model", max_rows=5)).ready.costs] == [1, 2, 4, 8, 16, 32]


def test_it_is_remembered_as_long_as_the_machine_is_as_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "ALIKE", 1e9)
    start = Start("model", max_rows=2, hub_cache=str(tmp_path))
    built(start)
    (file,) = (tmp_path / ".forerun").iterdir()
    known = msgspec.json.decode(file.read_bytes(), type=Costs)
    plain = built(start).ready.step_seconds[0]
    marked = msgspec.structs.replace(known, steps=[(1, plain), (2, 123.0)])
    file.write_bytes(msgspec.json.encode(marked))
    ready: Ready = built(start).ready
    assert ready.costs[-1] == (2, 123.0) or not 1 / 1.6 < plain / ready.step_seconds[0] < 1.6
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, steps=[(1, 1e3), (2, 1e3)])))
    assert len(built(start).ready.costs) == 18, "another machine"
    file.write_text("nonsense")
    assert len(built(start).ready.costs) == 18
    built(msgspec.structs.replace(start, dtype="float32", model_id="other"))
    assert len(list((tmp_path / ".forerun").iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / ".forerun").write_text("in the way")
    assert built(Start("model", max_rows=2, hub_cache=str(tmp_path))).ready.costs


class Clock:
    """Steps take what `seconds` says, times a noise that is rarely large; the engine itself computes nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], seed: int = 0) -> None:
        self.now = 0.0
        self.slow = 1.0
        self.steps = 0
        self._seconds = seconds
        self._dice = random.Random(seed)
        monkeypatch.setattr(profile.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(Engine, "step", self.step)

    def step(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        rows = sum(feed.known + feed.guess for feed in plan.feed)
        outlier = 4.0 if self._dice.random() < 0.05 else 1.0
        self.now += self._seconds(rows) * self.slow * self._dice.uniform(0.97, 1.05) * outlier
        return StepResult(plan.step)


def stairs(rows: int) -> float:
    return 0.010 + 0.0001 * rows + 0.003 * (rows > 12)


def profiler(heard: list[tuple[str, int, int]] | None = None) -> profile._Profile:
    engine = built(Start("model", max_rows=8, max_total_tokens=2000))
    said = heard if heard is not None else []
    return profile._Profile(engine, lambda *progress: said.append(progress))


@pytest.mark.parametrize("seed", range(5))
def test_one_step_in_twenty_that_takes_four_times_as_long_spoils_no_count(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "LEAST_PASSES", 7)
    monkeypatch.setattr(profile, "MOST_PASSES", 9)
    profiler_ = profiler()
    Clock(monkeypatch, stairs, seed)
    costs = profiler_.run()
    off = [abs(seconds / stairs(rows) - 1) for rows, seconds in costs.steps]
    assert statistics.median(off) < 0.04 and max(off) < 0.15


def test_a_machine_that_got_slower_keeps_its_profile_and_one_that_changed_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower in all sizes alike, it is corrected for while it runs (`router/controller/cost.py`); another staircase is measured again."""
    profiler_ = profiler()
    clock = Clock(monkeypatch, stairs)
    costs = Costs([(rows, stairs(rows)) for rows in range(1, 33)], 0.0, [])
    assert profiler_.resembles(costs)
    clock.slow = 1.5
    assert profiler_.resembles(costs)
    monkeypatch.setattr(clock, "_seconds", lambda rows: 0.01 * max(1.0, rows / 6))
    assert not profiler_.resembles(costs)


def test_it_takes_as_long_as_it_should_whatever_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most ten seconds where a step takes ten milliseconds; slower models are measured at fewer counts."""
    for plain, most in ((0.001, 7.0), (0.010, 10.0), (0.1, 20.0)):
        profiler_ = profiler()
        clock = Clock(monkeypatch, lambda rows, plain=plain: plain * (1 + max(0, rows - 8) / 20))
        profiler_.run()
        assert clock.now < most, f"{plain} s a step"
        monkeypatch.undo()
