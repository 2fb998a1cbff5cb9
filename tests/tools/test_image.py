"""What can be checked of the image without building it; `tools/image_test.sh` does the rest."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def command(instruction: str) -> list[str]:
    """The JSON array of an instruction: the exec form, without which PID 1 would be a shell that keeps SIGTERM to itself."""
    found = re.search(rf"^{instruction}\b[^\[]*(\[.*\])$", DOCKERFILE.replace("\\\n", ""), re.MULTILINE)
    assert found, f"{instruction} is not in exec form"
    return [str(word) for word in json.loads(found[1])]


@contextmanager
def answering(status: int) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def healthy(port: int) -> bool:
    program, *words = command("HEALTHCHECK")
    assert program == "python"
    done = subprocess.run([sys.executable, *words], env=os.environ | {"PORT": str(port)}, capture_output=True)
    return done.returncode == 0


@pytest.mark.parametrize(("status", "good"), [(200, True), (503, False)])
def test_the_health_check_follows_the_port_and_the_status(status: int, good: bool) -> None:
    with answering(status) as port:
        assert healthy(port) is good


def test_nobody_listening_is_not_healthy() -> None:
    with answering(200) as port:
        pass
    assert not healthy(port)


def test_the_launcher_is_the_first_process() -> None:
    assert command("ENTRYPOINT") == ["text-generation-launcher"]
    assert "text-generation-launcher =" in (ROOT / "pyproject.toml").read_text()


def test_the_run_stage_has_no_compiler_and_no_root() -> None:
    stage = DOCKERFILE.rpartition("\nFROM ")[2]
    assert not re.search(r"g\+\+|gcc|make|apt-get", stage)
    assert re.search(r"^USER [1-9]", stage, re.MULTILINE)


def test_every_device_of_the_package_has_a_base() -> None:
    bases = set(re.findall(r" AS base-(\w+)$", DOCKERFILE, re.MULTILINE))
    assert bases == {"cpu", "cuda", "ascend"}
    extras = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{base} = \[", extras, re.MULTILINE) for base in bases)


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "tools").glob("*.sh")))
def test_scripts_parse_and_explain_themselves(script: str) -> None:
    path = ROOT / "tools" / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)
    first, second, *_ = path.read_text().splitlines()
    assert first == "#!/usr/bin/env bash"
    assert second.startswith("# ")


@pytest.mark.parametrize("words", [["--device", "tpu"], ["--nonsense"], ["--tool", "magic"]])
def test_image_sh_refuses_what_it_does_not_know(words: list[str]) -> None:
    done = subprocess.run([ROOT / "tools" / "image.sh", *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip()


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """An environment in which `buildah` writes down its arguments, builds nothing and then fails."""
    arguments = tmp_path / "arguments"
    tool = tmp_path / "buildah"
    tool.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {arguments}\n[ "$1" = build ]\n')
    tool.chmod(0o755)
    model = tmp_path / "config.json"
    model.write_text("{}")
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": str(tmp_path)}, arguments


@pytest.mark.parametrize("script", ["image.sh", "image_test.sh"])
def test_options_of_the_build_tool_reach_it(script: str, recorded: tuple[dict[str, str], Path]) -> None:
    environment, arguments = recorded
    subprocess.run(
        [ROOT / "tools" / script, "--tool", "buildah", "--", "--network", "host", "-v", "/a b:/c:ro"], env=environment, capture_output=True
    )
    words = arguments.read_text().splitlines()
    build = words[: words.index(".") + 1]
    assert build[:3] == ["build", "--format", "docker"]
    assert build[-5:] == ["--network", "host", "-v", "/a b:/c:ro", "."]
    assert "DEVICE=cpu" in build
