"""`make draft` and `make heads`, whole, for a tiny target with little text: each ends with drafts that can be served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forerun.engine.build import build_engine
from forerun.messages import Start
from tests.engine.tiny import Front, Sequence_, params_for

ROOT = Path(__file__).parents[2]
LITTLE = "--tokens 60 --rows 4 --longest 96 --epochs 1 --threads 1 --keep-mb 8"
NARROW = ["WORDS=300", "KEEP=--keep-layers 0,1,2", "BLOCKS=--reduced --vocab 300 --roots 48 --inner 48 --kv-heads 4 --window 1"]
"""as in the Makefile, but for sizes that the tiny target has not"""
MADE = {
    "draft": ("--layers 1 --hidden 64 --vocab 200", {"model": ""}),
    "heads": ("", {"grams": "-grams", "eagle": "-eagle3", "dspark": "-dspark", "dflash": "-dflash", "medusa": "-medusa"}),
}
"""by target of make: what else is small, and how the folders end that it leaves, by what `--speculator` calls them"""
PROMPT = [17, 300, 45, 6, 201, 9]


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
@pytest.mark.parametrize("target", MADE)
def test_what_make_leaves_can_be_served(folder: Path, tmp_path: Path, target: str) -> None:
    expected, _ = answer(folder, "none")
    small, made = MADE[target]
    drafts = tmp_path / "tiny"
    given = [f"BIN={Path(sys.executable).parent}", f"MODEL={folder}", f"DRAFTS={drafts}", *NARROW, f"MORE={LITTLE} {small}"]
    ran = subprocess.run(["make", "-o", "setup", "-o", "model", target, *given], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for name, end in made.items():
        tokens, guesses = answer(folder, f"{name}={drafts}{end}")
        assert tokens == expected and (guesses > 0 or name == "grams"), name  # sixty tokens of text repeat nothing
