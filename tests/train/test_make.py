"""`make draft` and `make heads`, command by command, for a tiny target with little text: each ends with a draft that can be served."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from forerun.cli import main
from forerun.engine.build import build_engine
from forerun.messages import Start
from tests.engine.tiny import Front, Sequence_, params_for

ROOT = Path(__file__).parents[2]
LITTLE = shlex.split("--tokens 60 --rows 4 --longest 96 --epochs 1 --threads 1 --keep-mb 8")
NARROW = {"--vocab": "300", "--kv-heads": "4", "--inner": "48"}
"""what the tiny target has less of than the demo model; the last of equal options counts"""
SERVED = {"eagle3": "eagle"}
"""kinds that `--speculator` calls by another name"""
PROMPT = [17, 300, 45, 6, 201, 9]


def commands(folder: Path, drafts: Path) -> list[list[str]]:
    """Words of every `forerun train-drafter` that make would run."""
    made = ["make", "-n", "--no-print-directory", "draft", "heads", "BIN=bin", f"MODEL={folder}", f"DRAFTS={drafts}"]
    printed = subprocess.run(made, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [words[1:] for words in map(shlex.split, printed.splitlines()) if words[:2] == ["bin/forerun", "train-drafter"]]


def answer(folder: Path, speculator: str) -> tuple[list[int], int]:
    """Tokens of a greedy answer, and guesses that were verified for it."""
    front = Front(
        build_engine(Start(str(folder), threads=1, max_rows=2, max_total_tokens=96, speculator=speculator), lambda *progress: None)
    )
    sequence = Sequence_(PROMPT, params_for(PROMPT, max_new_tokens=24))
    front.admit(sequence)
    front.run(guess=4)
    return sequence.tokens, sequence.drafted


@pytest.mark.slow
def test_every_command_makes_a_draft_that_can_be_served(folder: Path, tmp_path: Path) -> None:
    expected, _ = answer(folder, "none")
    kinds = []
    for words in commands(folder, tmp_path / "tiny"):
        kind, out = (words[words.index(name) + 1] for name in ("--kind", "--out"))
        narrow = [word for name, value in NARROW.items() if name in words for word in (name, value)]
        small = ["--layers", "1", "--hidden", "64", "--vocab", "200"] if kind == "model" else narrow
        assert main([*words, *LITTLE, *small]) == 0
        tokens, guesses = answer(folder, f"{SERVED.get(kind, kind)}={out}")
        assert tokens == expected and guesses > 0, kind
        kinds.append(kind)
    assert kinds == ["model", "eagle3", "dspark", "dflash", "medusa"]
