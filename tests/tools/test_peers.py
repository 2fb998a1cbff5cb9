"""The installation of peers, as far as it goes without installing any."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools/peers.sh"


def run(root: Path, *names: str) -> int:
    """In a copy of the tree that has nothing else, with a Python that fails at everything."""
    (root / "tools").mkdir()
    script = shutil.copy(SCRIPT, root / "tools")
    return subprocess.run([script, *names], env={**os.environ, "PYTHON": "false"}, capture_output=True).returncode


@pytest.mark.parametrize("name", ["llama.cpp", "openvino", "vllm"])
def test_a_peer_whose_installation_broke_off_is_not_ready_even_if_it_was(tmp_path: Path, name: str) -> None:
    ready = tmp_path / ".peers" / name / "ready"
    ready.parent.mkdir(parents=True)
    ready.touch()
    assert run(tmp_path, name) == 1
    assert not ready.exists()


@pytest.mark.parametrize("names", [[], ["another"]])
def test_who_is_not_known_is_told_so(tmp_path: Path, names: list[str]) -> None:
    assert run(tmp_path, *names) == 2
    assert not (tmp_path / ".peers").exists()
