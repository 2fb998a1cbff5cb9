"""The front end of `bare.py`: starts the bare loop as a process and asks it for step times."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec

from forerun.bench.errors import BenchError
from forerun.config import Config
from forerun.launch import start_message


class Yardstick:
    """`async with Yardstick(model, flags) as bare`: the same model, device, type and threads as a server started with these flags."""

    def __init__(self, model_id: str, flags: Sequence[str]) -> None:
        self._start = start_message(Config.parse(["--model-id", model_id, *flags]))
        self.weight_bytes = 0
        self.position_bytes = 0
        """KV of one position in all layers"""
        self.facts: dict[str, str] = {}

    async def __aenter__(self) -> Yardstick:
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "forerun.bench.bare", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        first = await self._ask({"start": msgspec.to_builtins(self._start)})
        self.weight_bytes, self.position_bytes, self.facts = first["weight_bytes"], first["position_bytes"], first["facts"]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        await self._child.wait()

    async def decode(self, rows: int, context: int, steps: int) -> list[float]:
        """Seconds of each step."""
        answer = await self._ask({"decode": rows, "context": context, "steps": steps})
        return list(answer["seconds"])

    async def prefill(self, length: int) -> list[float]:
        answer = await self._ask({"prefill": length})
        return list(answer["seconds"])

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises BenchError when the process ended; what it had to say is on stderr."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(request).encode() + b"\n")
        line = await self._child.stdout.readline()
        if not line:
            raise BenchError("the bare loop ended before it answered")
        return dict(json.loads(line))
