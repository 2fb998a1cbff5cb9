"""What the README and the docs tell people to paste does work."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import Server

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "http://127.0.0.1:8080"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for block in found if ADDRESS in block]


@pytest.mark.parametrize("block", blocks("python"))
def test_python(server: Server, block: str) -> None:
    script = block.replace(ADDRESS, server.url)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
@pytest.mark.parametrize("block", blocks("sh"))
def test_curl(server: Server, block: str) -> None:
    words = shlex.split(block.replace("\\\n", " ").replace(ADDRESS, server.url))
    done = subprocess.run([*words, "-sS", "--fail-with-body"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(b'data: {"index":1,')


def test_there_is_something_to_paste() -> None:
    assert len(blocks("python")) >= 1 and len(blocks("sh")) >= 1
