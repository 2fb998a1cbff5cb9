"""The yardstick: the same model's forward in a plain loop, in a process of its own, without engine, rings, front and HTTP.

`python -m forerun.bench.bare` reads requests from stdin and answers on stdout, one JSON object a line:

    {"start": <Start>}                          → {"weight_bytes": …, "position_bytes": …, "facts": {…}}   once, first
    {"decode": 16, "context": 64, "steps": 128} → {"seconds": […]}   one for each step of 16 rows that feed one token each
    {"prefill": 64}                             → {"seconds": […]}   one prompt of 64 tokens up to its first token

Token ids are greedy picks, so a step is the forward, recorded and replayed as in the engine, and the pick: what no server can do without.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import msgspec
import torch

from forerun.backends.base import Backend, Draws, Pool
from forerun.backends.registry import open_backend
from forerun.engine.batch import Batch
from forerun.engine.models.load import load_model
from forerun.engine.models.model import Model, Output
from forerun.messages import Start

ROWS = 16
POSITIONS = 1024
"""most rows, and positions a row"""


class Bare:
    """The model and a pool in which row r owns a run of pages of its own."""

    def __init__(self, start: Start) -> None:
        self._backend: Backend = open_backend(start.device, start.threads, start.memory_fraction)
        self._model: Model = load_model(start, self._backend, lambda stage, done, total: None)
        self._page_tokens = self._backend.caps.page_tokens
        self._pages = -(-POSITIONS // self._page_tokens)
        pool: Pool = self._backend.pool(self._model.pool, ROWS * self._pages)
        self._run = self._backend.capture(lambda batch: self._model.forward(batch, pool), None)

    def facts(self) -> dict[str, Any]:
        """`position_bytes`: KV of one position in all layers."""
        spec = self._model.pool
        position = 2 * spec.layers * spec.kv_heads * spec.head_dim * spec.dtype.itemsize
        return {"weight_bytes": self._model.weight_bytes, "position_bytes": position, "facts": self._backend.facts()}

    def decode(self, rows: int, context: int, steps: int) -> list[float]:
        """Seconds of each step. Rows start behind `context` positions, whose KV is whatever the pool holds: that costs the same."""
        if rows > ROWS or context + steps > POSITIONS:
            raise ValueError(f"at most {ROWS} rows and {POSITIONS} positions")
        tokens = torch.arange(rows, dtype=torch.int32)
        batches = [self._batch(tokens, [position] * rows, known=[1] * rows) for position in range(context, context + steps)]
        seconds = []
        for batch in batches:
            began = time.perf_counter()
            batch.tokens = tokens
            tokens = self._pick(batch)
            seconds.append(time.perf_counter() - began)
        return seconds

    def prefill(self, length: int) -> float:
        """Seconds of one prompt's forward and the pick of its first token."""
        batch = self._batch(torch.randint(0, self._model.vocab, (length,), dtype=torch.int32), [0], known=[length])
        began = time.perf_counter()
        self._pick(batch)
        return time.perf_counter() - began

    def _pick(self, batch: Batch) -> torch.Tensor:
        """One forward; the picked ids, one a row."""
        output: Output = self._run(batch)
        if output.head is None or output.hidden is None:
            return self._backend.ops.pick(output.logits, None).tokens.to(torch.int32)
        return output.head.choose(output.hidden, Draws.greedy(len(output.hidden))).tokens.to(torch.int32)

    def _batch(self, tokens: torch.Tensor, context: list[int], known: list[int]) -> Batch:
        """Rows that feed `known` tokens behind `context` positions."""
        rows = len(known)
        first = torch.tensor(context, dtype=torch.int32)
        count = torch.tensor(known, dtype=torch.int32)
        starts = torch.zeros(rows + 1, dtype=torch.int32)
        starts[1:] = count.cumsum(0)
        row = torch.repeat_interleave(torch.arange(rows, dtype=torch.int32), count)
        positions = torch.arange(len(tokens), dtype=torch.int32) - starts[row] + first[row]
        return Batch(
            tokens=tokens,
            positions=positions,
            slots=row * (self._pages * self._page_tokens) + positions,
            parents=torch.full_like(positions, -1),
            starts=starts,
            known=count,
            context=first,
            pages=(torch.arange(rows, dtype=torch.int32) * self._pages)[:, None] + torch.arange(self._pages, dtype=torch.int32),
            logit_rows=starts[1:] - 1,
        )


def answer(bare: Bare, request: dict[str, Any]) -> dict[str, Any]:
    if "decode" in request:
        return {"seconds": bare.decode(request["decode"], request["context"], request["steps"])}
    return {"seconds": [bare.prefill(request["prefill"])]}


def main() -> None:
    results = sys.stdout
    sys.stdout = sys.stderr
    bare = Bare(msgspec.convert(json.loads(sys.stdin.readline())["start"], Start))
    print(json.dumps(bare.facts()), file=results, flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            print(json.dumps(answer(bare, json.loads(line))), file=results, flush=True)


if __name__ == "__main__":
    main()
