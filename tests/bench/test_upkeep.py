"""The bench of what a drafter costs while nobody asks it: both engines run, and no guess is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.bench import upkeep
from forerun.engine.drafters.recursive import Recursive
from forerun.engine.testmodel import write_model
from forerun.messages import Start
from tests.train.kinds import asked, setting


def test_both_engines_take_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.train.kinds.registry import open_kind

    target, head = tmp_path / "target", tmp_path / "head"
    write_model("llama", 0, target, num_hidden_layers=2)
    open_kind("eagle3", asked("eagle3", ["--vocab", "400"]), setting(target)).save(head)
    told: list[int] = []
    absorb = Recursive.absorb
    monkeypatch.setattr(Recursive, "absorb", lambda self, commit: told.append(len(commit.rows)) or absorb(self, commit))
    monkeypatch.setattr(Recursive, "propose", lambda *given: pytest.fail("somebody asked"))
    start = Start(str(target), device="cpu", threads=1, max_rows=3, max_total_tokens=96)
    found = upkeep.measure(start, f"eagle={head}", [1, 3], steps=4, context=8)
    assert [one.rows for one in found] == [1, 3] and all(one.plain > 0 and one.closed > 0 for one in found)
    assert told[-3:] == [3, 3, 3] and len([rows for rows in told if rows == 3]) >= 4 + upkeep.WARM
    assert upkeep.table(found).count("\n") == 3
