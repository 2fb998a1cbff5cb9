"""What the target thinks while it reads: the hidden states behind some of its layers, computed for each batch of texts.

They are streamed: a batch's states live as long as its step. For a whole text they would take layers · hidden · 2 bytes a token (3.4 KB
for the demo model, 40 KB for one of 8 billion parameters). So many of them as the shelf has room for are remembered (`states.py`), in
bfloat16, as which all are handed out. The same weights, kernels and number type as in serving: a head learns from what it will be fed.

There are none of a text's last token: nothing was written behind it, and the target never read it.

Layers are numbered as in `Model.forward`: i is the residual stream behind decoder layer i, `layers` the final norm of the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.backends.base import Pool
from forerun.backends.registry import open_backend
from forerun.engine.batch import feed
from forerun.engine.kv import Table
from forerun.engine.models.load import load_model
from forerun.messages import Start
from forerun.train.shards import Record
from forerun.train.states import Keeper, Shelf

STEP_TOKENS = 4096
"""tokens of a forward, unless one text has more"""


class Taps:
    """`layers`: which states, in the order in which they lie in the result. `shelf`: where they are remembered, None = nowhere."""

    def __init__(self, start: Start, layers: Sequence[int], shelf: Shelf | None = None) -> None:
        self._backend = open_backend(start.device, start.threads, start.memory_fraction)
        self._model = load_model(start, self._backend, lambda stage, done, total: None)
        self._layers = tuple(layers)
        self._size = self._backend.caps.page_tokens
        self._pool: Pool | None = None
        self._keeper = None if shelf is None else Keeper(shelf, self._layers)

    def read(self, text: Sequence[Record]) -> list[Tensor]:
        """float32 [tokens − 1, layers · hidden] for each text."""
        kept = [self._kept(record) for record in text]
        missing = iter(self._computed([record for record, states in zip(text, kept) if states is None]))
        return [(next(missing) if states is None else states).float() for states in kept]

    def _kept(self, record: Record) -> Tensor | None:
        return None if self._keeper is None else self._keeper.kept(record, self._model.hidden)

    def _computed(self, text: Sequence[Record]) -> list[Tensor]:
        """In forwards of as many whole texts as have room in one."""
        found: list[Tensor] = []
        waiting: list[Record] = []
        for record in text:
            if waiting and sum(len(other.tokens) for other in waiting) + len(record.tokens) > STEP_TOKENS:
                found += self._forward(waiting)
                waiting = []
            waiting.append(record)
        found += self._forward(waiting) if waiting else []
        if self._keeper is not None:
            for record, states in zip(text, found):
                self._keeper.keep(record, states)
        return found

    def _forward(self, text: Sequence[Record]) -> list[Tensor]:
        counts = [len(record.tokens) - 1 for record in text]
        pages = [-(-count // self._size) for count in counts]
        table = Table(len(text), max(counts), self._size)
        for row, count in enumerate(pages):
            first = sum(pages[:row])
            table.grant(row, range(first, first + count))
        rows = range(len(text))
        tokens = [record.tokens[:-1].tolist() for record in text]
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
