"""Every block of docs/clients.md runs as it is: each with the Python or the Node that has its libraries."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.e2e.test_other_clients import HERE, NODE, PYTHON, why_no_node

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
ADDRESS = "http://127.0.0.1:8080"
BLOCKS = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
ELSEWHERE = ("langchain", "llama_index")


@pytest.mark.parametrize(("title", "language", "block"), BLOCKS, ids=[title for title, *_ in BLOCKS])
def test_a_block_runs(echo: Server, title: str, language: str, block: str, tmp_path: Path) -> None:
    assert ADDRESS in block
    done = subprocess.run(command(language, block.replace(ADDRESS, echo.url), tmp_path), capture_output=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.strip()


def command(language: str, block: str, folder: Path) -> list[str]:
    if language == "sh":
        if shutil.which("curl") is None:
            pytest.skip("no curl here")
        return [*shlex.split(block.replace("\\\n", " ")), "-sS", "--fail-with-body"]
    if language == "js":
        if NODE is None or why_no_node():
            pytest.skip(why_no_node())
        script = folder / "block.mjs"
        script.write_text(block, encoding="utf-8")
        (folder / "node_modules").symlink_to(HERE / "node" / "node_modules")
        return [NODE, str(script)]
    python = sys.executable
    if any(name in block for name in ELSEWHERE):
        if not PYTHON.exists():
            pytest.skip("the other clients are not installed: make clients")
        python = str(PYTHON)
    return [python, "-W", "ignore", "-c", block]


def test_there_is_a_block_for_each_client() -> None:
    assert [title for title, *_ in BLOCKS] == ["curl", "huggingface_hub", "openai", "text-generation", "LangChain", "llama-index", "Node"]
