"""A whole server in processes of its own, with the echo worker, and what a test wants to do to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.server import tiny

READY = re.compile(r"ready on (http://\S+)")
LISTENING = re.compile(r"address=(http://\S+)")


def write_folder(folder: Path, positions: int = 16384) -> Path:
    """What an echo server needs of a model folder."""
    tokenizer = tiny.byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab, "max_position_embeddings": positions}))
    return folder


class Served:
    """A server process. Its log is in `log()`."""

    def __init__(self, folder: Path, *flags: str, echo: bool = True, port: int = 0, model: str = "") -> None:
        self.log_file = folder / f"log-{time.monotonic_ns()}"
        mode = ["--echo", "--test-faults"] if echo else []
        command = [sys.executable, "-m", "forerun.cli", "serve", "--model-id", model or str(folder)]
        command += ["--hostname", "127.0.0.1", "--port", str(port)]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen([*command, *mode, *flags], stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    async def listening(self) -> str:
        return await self._address(LISTENING)

    async def ready(self) -> str:
        return await self._address(READY)

    async def exit_code(self, seconds: float = 20.0) -> int:
        await until(lambda: self.process.poll() is not None, seconds)
        return self.process.returncode

    def workers(self) -> list[int]:
        """Process ids of the workers that are there now."""
        with contextlib.suppress(FileNotFoundError):
            pids = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            return [int(pid) for pid in pids if "forerun.engine.worker" in Path(f"/proc/{pid}/cmdline").read_text()]
        return []

    async def worker(self, but_not: int = 0) -> int:
        """The worker, once there is one (and not the one that was there before)."""
        await until(lambda: any(pid != but_not for pid in self.workers()))
        return next(pid for pid in self.workers() if pid != but_not)

    async def _address(self, pattern: re.Pattern[str]) -> str:
        await until(lambda: pattern.search(self.log()) or self.process.poll() is not None, 90)
        found = pattern.search(self.log())
        assert found, self.log()
        return found.group(1)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def served(folder: Path, *flags: str, echo: bool = True, port: int = 0, model: str = "") -> Iterator[Served]:
    """`model`: another than the folder; it stays the place of the log."""
    server = Served(folder, *flags, echo=echo, port=port, model=model)
    try:
        yield server
    finally:
        server.end()


async def until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def client(address: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(address, timeout=aiohttp.ClientTimeout(total=60), connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


class Stream:
    """A streaming request: its events as they come."""

    def __init__(self, session: aiohttp.ClientSession, prompt: str, new: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.status = 0
        body = {"inputs": prompt, "parameters": {"max_new_tokens": new}}
        self.task = asyncio.create_task(self._read(session, body))

    @property
    def tokens(self) -> list[int]:
        return [event["token"]["id"] for event in self.events if "token" in event]

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event for event in self.events if "error" in event), None)

    async def _read(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post("/generate_stream", json=body) as response:
            self.status = response.status
            async for line in response.content:
                if line.startswith(b"data:"):
                    self.events.append(json.loads(line[5:]))


async def health(session: aiohttp.ClientSession, path: str = "/health") -> int:
    async with session.get(path) as response:
        return response.status


def is_gone(pid: int) -> bool:
    """No such process, or a zombie that nobody has buried yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


def maps(pid: int, library: str) -> bool:
    """Has it loaded this library?"""
    return library in Path(f"/proc/{pid}/maps").read_text()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
