"""The profile of a tiny model: what is measured, what is remembered, and what it leaves behind."""

from __future__ import annotations

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


def test_it_is_remembered_as_long_as_the_machine_is_as_fast(tmp_path: Path) -> None:
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
