"""A server, ours or another, started as users start it, watched from outside and stopped by SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from forerun.bench import process
from forerun.bench.errors import BenchError
from forerun.bench.http import Connection, Origin

START_SECONDS = 300.0
STOP_SECONDS = 120.0
POLL_SECONDS = 0.02
SETTLE_SECONDS, SETTLE_POLL_SECONDS = 120.0, 0.2


class StartFailed(BenchError):
    """The server ended, or was not ready in time; carries the end of its log."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """`words`: its command line, with PORT in place of the port. `health`: a route that answers 200 when it can generate."""

    words: Sequence[str]
    health: str = "/health"


def ours(model_id: str, flags: Sequence[str]) -> Program:
    serve = [sys.executable, "-m", "forerun.cli", "serve", "--model-id", model_id]
    return Program([*serve, "--hostname", "127.0.0.1", "--port", "PORT", *flags])


class Launched:
    """`async with Launched(program) as server`: it is ready inside. `ready_seconds`: from the start of the process to the first
    healthy answer. `exit_code`: after the end, 0 when it drained as it should."""

    def __init__(self, program: Program) -> None:
        port = _free_port()
        self.origin = Origin("127.0.0.1", port, tls=False, prefix="")
        self.ready_seconds = 0.0
        self.exit_code: int | None = None
        self._health = program.health
        self._command = [str(port) if word == "PORT" else word for word in program.words]
        self._log = Path(tempfile.gettempdir()) / f"forerun-bench-{os.getpid()}-{port}.log"
        self._child: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Launched:
        """Raises StartFailed."""
        began = time.perf_counter()
        self._spawn()
        try:
            while await self._status(self._health) != 200:
                self._check(time.perf_counter() - began)
                await asyncio.sleep(POLL_SECONDS)
        except BaseException:
            await self._stop()
            raise
        self.ready_seconds = time.perf_counter() - began
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stop()

    def _spawn(self) -> None:
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _check(self, waited: float) -> None:
        assert self._child is not None
        ended = self._child.poll() is not None
        if ended or waited > START_SECONDS:
            state = f"ended with {self._child.returncode}" if ended else "was not ready in time"
            raise StartFailed(f"the server {state}; the end of its log:\n{self._log.read_text()[-3000:]}")

    async def _status(self, path: str) -> int:
        try:
            return await self._get(path, lambda data: None)
        except OSError:
            return 0

    async def _get(self, path: str, sink: Callable[[bytes], None]) -> int:
        return await Connection(self.origin, {"Connection": "close"}).exchange("GET", path, b"", sink)

    async def settled(self) -> None:
        """Waits until the worker knows what its steps cost, which it measures in its first idle moments. Raises StartFailed when it never
        does. Ours only."""
        until = time.perf_counter() + SETTLE_SECONDS
        while any(view["controller"]["rough"] for view in json.loads(await self._text("/debug/speculation"))):
            if time.perf_counter() > until:
                raise StartFailed(f"the server did not find {SETTLE_SECONDS:.0f} idle seconds to measure its steps: the machine is busy")
            await asyncio.sleep(SETTLE_POLL_SECONDS)

    async def metrics(self) -> dict[str, float]:
        """The server's metrics by their full name, labels included as they are written. Ours only."""
        lines = (line for line in (await self._text("/metrics")).splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def info(self) -> dict[str, Any]:
        """What `/info` says. Ours only."""
        return dict(json.loads(await self._text("/info")))

    async def _text(self, path: str) -> str:
        pieces: list[bytes] = []
        await self._get(path, pieces.append)
        return b"".join(pieces).decode()

    @property
    def front(self) -> int:
        """Process id."""
        assert self._child is not None
        return self._child.pid

    @property
    def family(self) -> list[int]:
        """Process ids of the server and of what it started."""
        return process.family(self.front)

    @property
    def memory(self) -> int:
        """Bytes that the server and the processes it started hold in RAM, pages that they share counted once."""
        return process.family_bytes(self.front)

    @property
    def worker(self) -> int:
        """Process id. Raises LookupError when there is none."""
        for child in process.children(self.front):
            if "forerun.engine.worker" in process.command_line(child):
                return child
        raise LookupError("the server has no worker process")

    async def _stop(self) -> None:
        """SIGTERM, and SIGKILL when it does not go."""
        assert self._child is not None
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
        try:
            self.exit_code = await asyncio.to_thread(self._child.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self.exit_code = await asyncio.to_thread(self._child.wait)
        self._log.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
