"""The bench of what a drafter costs that brings nothing: all engines take the same steps, one drafter is asked, and no guess is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.bench import upkeep
from forerun.engine.drafters.draft import Draft, Terms
from forerun.engine.drafters.recursive import Recursive
from forerun.engine.engine import Engine
from forerun.engine.testmodel import write_model
from forerun.messages import Start
from tests.train.kinds import asked, setting


def test_all_engines_take_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.train.kinds.registry import open_kind

    target, head = tmp_path / "target", tmp_path / "head"
    write_model("llama", 0, target, num_hidden_layers=2)
    open_kind("eagle3", asked("eagle3", ["--vocab", "400"]), setting(target)).save(head)
    told: list[int] = []
    questions: dict[int, list[int]] = {}
    kept: list[int] = []
    absorb, propose, step = Recursive.absorb, Recursive.propose, Engine.step

    def proposes(self: Recursive, rows: list[int], budget: list[int], terms: Terms) -> list[Draft]:
        questions.setdefault(id(self), []).append(len(rows))
        return propose(self, rows, budget, terms)

    monkeypatch.setattr(Recursive, "absorb", lambda self, commit: told.append(len(commit.rows)) or absorb(self, commit))
    monkeypatch.setattr(Recursive, "propose", proposes)
    start = Start(str(target), device="cpu", threads=1, max_rows=3, max_total_tokens=96)
    monkeypatch.setattr(Engine, "step", lambda self, plan: (result := step(self, plan), kept.append(result.nodes))[0])
    found = upkeep.measure(start, f"eagle={head}", [1, 3], steps=4, context=8)
    assert [one.rows for one in found] == [1, 3] and all(min(one.plain, one.closed, one.asked) > 0 for one in found)
    assert told[-3:] == [3, 3, 3] and len([rows for rows in told if rows == 3]) >= 2 * (4 + upkeep.WARM)
    steps = 4 + upkeep.WARM
    assert list(questions.values()) == [[1] * steps + [3] * steps], "one of the two drafters, in every step"
    assert not any(kept[-6 * steps :])
    assert upkeep.table(found).count("\n") == 3
