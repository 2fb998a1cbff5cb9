"""Model loops in processes of their own, without a server, that are asked for step times: ours (`bare.py`) and OpenVINO's."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from forerun.bench.errors import BenchError
from forerun.config import Config
from forerun.launch import start_message


class Loop:
    """`async with Loop(name, words) as loop`: a program that answers JSON lines, one each. `first`: what it said when it was ready.
    `start`: its first request, if it wants one."""

    def __init__(self, name: str, words: Sequence[str], start: dict[str, Any] | None = None) -> None:
        self.name = name
        self._words = words
        self._start = start
        self.first: dict[str, Any] = {}

    async def __aenter__(self) -> Loop:
        """Raises BenchError when it ends before it is ready."""
        pipe = asyncio.subprocess.PIPE
        self._child = await asyncio.create_subprocess_exec(*self._words, stdin=pipe, stdout=pipe)
        try:
            self.first = await self._ask(self._start)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._close()

    async def _close(self) -> None:
        """The end of its input ends it."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        await self._child.communicate()

    async def decode(self, rows: int, context: int, steps: int) -> list[float]:
        """Seconds of each step."""
        answer = await self._ask({"decode": rows, "context": context, "steps": steps})
        return list(answer["seconds"])

    async def prefill(self, length: int) -> list[float]:
        answer = await self._ask({"prefill": length})
        return list(answer["seconds"])

    async def _ask(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """Raises BenchError when the process ended; what it had to say is on stderr."""
        assert self._child.stdin is not None and self._child.stdout is not None
        if request is not None:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
        line = await self._child.stdout.readline()
        if not line:
            raise BenchError(f"{self.name} ended before it answered")
        return dict(json.loads(line))


def bare(model_id: str, flags: Sequence[str]) -> Loop:
    """The same model, device, type and threads as a server started with these flags. `first` has `weight_bytes`, `position_bytes` (KV of
    one position in all layers) and `facts`."""
    start = start_message(Config.parse(["--model-id", model_id, *flags]))
    return Loop("the bare loop", [sys.executable, "-m", "forerun.bench.bare"], {"start": msgspec.to_builtins(start)})


def openvino(python: Path, model: Path) -> Loop:
    """OpenVINO GenAI on a GGUF file, in the environment that has it."""
    return Loop("OpenVINO", [str(python), str(Path(__file__).with_name("openvino_loop.py")), str(model)])
