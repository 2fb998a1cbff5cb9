"""Clients that cannot share our environment: LangChain, llama-index, huggingface_hub before 1.0, and those of Node.

Their scenarios are scripts (`clients/`, `node/`), run once each against a server whose answers never end by themselves; every scenario is a
test here. `make test` installs them first, pinned. Where Node is missing or npm cannot, its tests are skipped.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server import Server

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / "build" / "clients" / "bin" / "python"
NODE = shutil.which("node")
SECONDS = 100
_WHY_NO_NODE = HERE.parents[1] / "build" / "node-clients.txt"


def why_no_node() -> str:
    """Why the scripts of Node cannot run here; empty = they can."""
    if NODE is not None and (HERE / "node" / "node_modules" / ".package-lock.json").exists():
        return ""
    return (
        _WHY_NO_NODE.read_text(encoding="utf-8").strip() if _WHY_NO_NODE.exists() else "the clients of Node are not installed: make clients"
    )


def scenarios(path: str, pattern: str) -> list[object]:
    """A parameter for each scenario of a script, by what its text calls them."""
    names = re.findall(pattern, (HERE / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert names
    return [pytest.param(path, name, id=f"{Path(path).stem}-{name}") for name in names]


PYTHONS = [
    scenario
    for path in ("clients/langchain_client.py", "clients/llama_index_client.py", "clients/older_hub_client.py")
    for scenario in scenarios(path, r"^def (check_\w+)")
]
NODES = scenarios("node/clients.mjs", r"^  async (\w+)\(\) \{")


@functools.cache
def outcomes(url: str, *command: str) -> dict[str, str | None]:
    """By scenario: what went wrong, or None."""
    asked = {"HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONWARNINGS": "ignore", "HOME": os.environ.get("HOME", "/")}
    path = {"PATH": os.environ.get("PATH", "")}
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=SECONDS, check=False, env=asked | path)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert done.returncode == 0 and told, done.stderr
    return {one["name"]: one["error"] for one in told}


@pytest.mark.skipif(not PYTHON.exists(), reason="the other clients are not installed: make clients")
@pytest.mark.parametrize(("script", "scenario"), PYTHONS)
def test_python(endless: Server, script: str, scenario: str) -> None:
    wrong = outcomes(endless.url, str(PYTHON), str(HERE / script))[scenario]
    assert wrong is None, wrong


@pytest.mark.skipif(bool(why_no_node()), reason=why_no_node())
@pytest.mark.parametrize(("script", "scenario"), NODES)
def test_node(endless: Server, script: str, scenario: str) -> None:
    assert NODE is not None
    wrong = outcomes(endless.url, NODE, str(HERE / script))[scenario]
    assert wrong is None, wrong
