"""What the target thinks while it reads: the hidden states behind some of its layers, computed anew for each batch of texts.

They are streamed: a batch's states live as long as its step. For a whole text they would take layers · hidden · 2 bytes a token (3.4 KB
for the demo model, 40 KB for one of 8 billion parameters). So many of them as `keep` bytes hold are remembered for the next epoch, in
bfloat16, as which all are handed out. The same weights, kernels and number type as in serving: a head learns from what it will be fed.

Layers are numbered as in `Model.forward`: i is the residual stream behind decoder layer i, `layers` the final norm of the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forerun.backends.base import Pool
from forerun.backends.registry import open_backend
from forerun.engine.batch import feed
from forerun.engine.kv import Table
from forerun.engine.models.load import load_model
from forerun.messages import Start
from forerun.train.shards import Record

STEP_TOKENS = 4096
"""tokens of a forward, unless one text has more"""


class Taps:
    """`layers`: which states, in the order in which they lie in the result. `keep`: bytes of them that are remembered."""

    def __init__(self, start: Start, layers: Sequence[int], keep: int = 0) -> None:
        self._backend = open_backend(start.device, start.threads, start.memory_fraction)
        self._model = load_model(start, self._backend, lambda stage, done, total: None)
        self._layers = tuple(layers)
        self._size = self._backend.caps.page_tokens
        self._pool: Pool | None = None
        self._room_left = keep
        self._kept: dict[bytes, Tensor] = {}

    def read(self, text: Sequence[Record]) -> list[Tensor]:
        """float32 [tokens, layers · hidden] for each text."""
        fresh = [record for record in text if record.tokens.tobytes() not in self._kept]
        found: list[Tensor] = []
        waiting: list[Record] = []
        for record in fresh:
            if waiting and sum(len(other.tokens) for other in waiting) + len(record.tokens) > STEP_TOKENS:
                found += self._forward(waiting)
                waiting = []
            waiting.append(record)
        states = iter(found + self._forward(waiting) if waiting else found)
        return [self._of(record, states).float() for record in text]

    def _of(self, record: Record, fresh: Iterator[Tensor]) -> Tensor:
        key = record.tokens.tobytes()
        if key in self._kept:
            return self._kept[key]
        states = next(fresh)
        if states.nbytes <= self._room_left:
            self._room_left -= states.nbytes
            self._kept[key] = states
        return states

    def _forward(self, text: Sequence[Record]) -> list[Tensor]:
        counts = [len(record.tokens) for record in text]
        pages = [-(-count // self._size) for count in counts]
        table = Table(len(text), max(counts), self._size)
        for row, count in enumerate(pages):
            first = sum(pages[:row])
            table.grant(row, range(first, first + count))
        rows = range(len(text))
        tokens = [record.tokens.tolist() for record in text]
        batch = feed(rows, [0] * len(text), tokens, [False] * len(text), table, self._backend.device)
        with torch.inference_mode():
            taps = self._model.forward(batch, self._room(sum(pages)), self._layers).taps
        assert taps is not None
        return [states.cpu().to(torch.bfloat16, copy=True) for states in torch.split(taps, counts)]

    def _room(self, pages: int) -> Pool:
        """A pool of so many pages; what it holds is of no use after the forward."""
        pool = self._pool
        if pool is None or pool.keys.shape[1] < pages:
            pool = self._pool = self._backend.pool(self._model.pool, max(pages, 2 * STEP_TOKENS // self._size))
        return pool
