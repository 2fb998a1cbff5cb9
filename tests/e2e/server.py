"""A real server process for tests: `python -m forerun.cli serve` on a free port, with a tiny model or with the echo worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.server import tiny

START_SECONDS = 90.0
NAP_SECONDS = 0.05


def echo_folder(folder: Path, positions: int = 2048) -> Path:
    """What the echo worker and the front need of a model: a tokenizer that speaks broken UTF-8, and the size of its vocabulary."""
    tokenizer = tiny.byte_level()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": positions}))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("</s>")}))
    return folder


def tiny_model(folder: Path) -> Path:
    """A random two-layer Llama."""
    command = [sys.executable, "-m", "forerun.cli", "make-test-model", "--arch", "llama", "--seed", "0", "--out", str(folder)]
    subprocess.run(command, check=True, timeout=START_SECONDS)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def patience() -> Iterator[None]:
    """Looks at something that starts, with naps between them. They are counted instead of seconds: where all processes were put aside for a
    minute, nothing that starts is late."""
    for _ in range(int(START_SECONDS / NAP_SECONDS)):
        yield
        time.sleep(NAP_SECONDS)


class Server:
    """A running server. `log` holds what it wrote."""

    def __init__(self, folder: Path, log: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "forerun.cli", "serve", "--model-id", str(folder), "--hostname", "127.0.0.1"]
        with log.open("wb") as out:
            self.process = subprocess.Popen([*command, "--port", str(self.port), *flags], stdout=out, stderr=out, env=environment())

    def ask(self, path: str, body: Any = None, timeout: float = 30.0) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metric(self, name: str) -> float:
        lines = self.ask("/metrics")[1].decode().splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))

    def wait(self) -> None:
        """Until it is healthy."""
        for _ in patience():
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError):
                if self.ask("/health")[0] == 200:
                    return
        raise AssertionError("not ready: " + self.log.read_text())

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 30.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def environment() -> dict[str, str]:
    """The caller's, without what would configure the server."""
    names = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")
    return {name: os.environ[name] for name in names if name in os.environ} | {"OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def running(folder: Path, log: Path, *flags: str) -> Iterator[Server]:
    server = Server(folder, log, *flags)
    try:
        server.wait()
        yield server
    finally:
        server.stop()
