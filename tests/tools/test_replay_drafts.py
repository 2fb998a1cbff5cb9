"""The replay counts what an engine would have accepted."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Terms
from forerun.engine.drafters.ngram import Ngram
from tests.engine.test_identity import fresh, truth
from tests.engine.tiny import Front, tiny_engine

SCRIPT = Path(__file__).parents[2] / "tools" / "replay_drafts.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("replay_drafts", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["replay_drafts"] = module
    spec.loader.exec_module(module)
    return module


class Always:
    """Guesses 1, then 2, each with the same confidence."""

    needs = Needs(most=2)

    def absorb(self, commit: Commit) -> None:
        pass

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        return [Draft.chain([1, 2], [0.75, 0.75]) for _ in rows]

    def forget(self, rows: list[int]) -> None:
        pass


def test_counts(tool: Any) -> None:
    """After the first token: 1 holds, 2 does not (5 is picked); nothing of the second draft; then 1 and 2, the last token is the pick's."""
    tallies, seconds = tool.replay(Always(), [tool.Text([9], [0, 1, 5, 7, 1, 2, 8], "w")], nodes=2)
    tally = tallies["w"]
    assert (tally.steps, tally.nodes, tally.accepted, len(seconds)) == (3, 6, 3, 3)
    assert tally.scored == [(0.75, True), (0.75, False), (0.75, False), (0.75, True), (0.75, True)]
    assert tally.calibration_error == pytest.approx(abs(0.75 - 3 / 5))
    assert tally.speedup(0.0) == 2.0 and tally.speedup(0.5) == 1.0


def test_the_same_as_an_engine(tool: Any) -> None:
    """Steps, guesses and acceptances of a real run, told from its text alone."""
    answers = [truth("greedy", seed, 21) for seed in (1, 2)]
    for answer in answers:
        front = Front(tiny_engine(Ngram(8)))
        sequence = fresh(answer)
        front.admit(sequence)
        front.step()
        front.run(guess=8)
        tallies, seconds = tool.replay(Ngram(8), [tool.Text(answer.prompt, answer.tokens)], nodes=8)
        assert (tallies[""].accepted, len(seconds)) == (sequence.accepted, next(front.steps) - 2)


def test_from_the_shell(tmp_path: Path) -> None:
    file = tmp_path / "outputs.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": [1, 2, 3], "output": [4, 5, 1, 2, 3, 4, 5, 6], "workload": "x"}) + "\n" for _ in range(5))
    )
    done = subprocess.run([sys.executable, str(SCRIPT), str(file), "--rows", "2"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("x ") and "drafting: median" in done.stdout


def test_no_look_up_in_the_text_itself_passes_the_bound(tool: Any) -> None:
    for seed in range(20):
        dice = random.Random(seed)
        phrases = [[dice.randrange(9) for _ in range(dice.randrange(1, 6))] for _ in range(4)]
        tokens = [token for _ in range(30) for token in dice.choice(phrases)]
        text = tool.Text(tokens[:20], tokens[20:])
        nodes = dice.choice([1, 4, 8])
        behind, anywhere = (sum(tool.bound(text, context, nodes)) for context in (1, 0))
        tallies, _ = tool.replay(Ngram(nodes), [text], nodes)
        assert tallies[""].accepted <= behind <= anywhere
        assert all(0 <= run <= nodes for run in tool.bound(text, 1, nodes))
        assert sum(1 + run for run in tool.bound(text, 0, nodes)) == len(text.output) - 1, "every token once"
