"""What is said of confidences: by hand where that can be done, and of a real drafter of a tiny target."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from forerun.bench import confidence
from forerun.bench.confidence import Chain, calibration_error, counted, likeliest, wasted
from forerun.engine.drafters.draft import Draft
from forerun.engine.testmodel import write_model
from forerun.messages import Start
from forerun.train.kinds.registry import open_kind
from tests.train.kinds import asked, setting, texts


def test_the_likeliest_path_of_a_tree() -> None:
    draft = Draft([5, 6, 7, 8, 9], [-1, -1, 1, 1, 0], [0.4, 0.6, 0.1, 0.9, 1.0], [False] * 5)
    assert likeliest(draft) == ([6, 8], [0.6, 0.9]) and likeliest(Draft.none()) == ([], [])


def test_calibration_error_by_hand() -> None:
    """Only guesses behind which all held count: 0.9 held, 0.3 did not, 0.9 did not; the last one of the first draft was never reached."""
    chains = [Chain(0, [0.9, 0.3, 0.5], 1), Chain(1, [0.9], 0)]
    assert calibration_error(chains) == pytest.approx((abs(0.9 + 0.9 - 1.0) + 0.3) / 3)


def test_wasted_rows_by_hand() -> None:
    """Survivals 0.9 (held), 0.45 (held), 0.8 (did not), 0.1: two that hold cost one that does not."""
    chains = [Chain(0, [0.9, 0.5], 2), Chain(1, [0.8, 0.125], 0)]
    assert wasted(chains, 0.5) == 0.0 and wasted(chains, 1.0) == pytest.approx(0.5)


def test_who_knows_wastes_less_than_who_counts() -> None:
    """Guesses are easy or hard, and only the confidences know which: counters of a place see the mean."""
    dice = random.Random(1)
    chains = []
    for number in range(4000):
        rate = dice.choice([0.9, 0.2])
        held = next((place for place in range(4) if dice.random() >= rate), 4)
        chains.append(Chain(number % 50, [rate] * 4, held))
    most = sum(chain.held for chain in chains) / len(chains)
    assert calibration_error(chains) < 0.03 and calibration_error(counted(chains)) < 0.05
    assert wasted(chains, 0.7 * most) < 0.6 * wasted(counted(chains), 0.7 * most)


def test_drafts_of_a_real_drafter_are_followed(tmp_path: Path) -> None:
    target, head = tmp_path / "target", tmp_path / "head"
    write_model("llama", 0, target, num_hidden_layers=2)
    words = ["--block", "4", "--draft-layers", "1", "--states", "2", "--rank", "8", "--reduced", "--vocab", "400"]
    open_kind("dspark", asked("dspark", words), setting(target)).save(head)
    start = Start(str(target), device="cpu", threads=1, dtype="float32", max_rows=2, max_total_tokens=64, max_pool_tokens=192)
    prompts = [record.tokens[: record.prompt].tolist() for record in texts(3)]
    chains = confidence.measure(start, f"dspark={head},tree=chain", prompts, 12)
    assert {chain.text for chain in chains} == {0, 1, 2}
    assert all(0 <= chain.held <= len(chain.confidence) <= 4 for chain in chains) and len(chains) >= 12
    assert "calibration error" in confidence.table(chains)
