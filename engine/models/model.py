"""What the engine asks of a target model: one forward over flat rows."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import Tensor

from forerun.backends.base import Pool, PoolSpec
from forerun.engine.batch import Batch


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """`logits`: float32 [m, V] for `batch.logit_rows`. `taps`: hidden states of the layers asked for, [n, taps · H], or None."""

    logits: Tensor
    taps: Tensor | None = None


class Model(Protocol):
    """`vocab`: rows of the output head. `width`: float32 values that one row of a forward keeps alive at once, at the most.
    `max_tokens`: longest sequence the positions allow. `weight_bytes`: memory that the packed weights take. `pool`: the KV it needs.
    `facts`: what was chosen in loading it, for the log."""

    vocab: int
    hidden: int
    width: int
    layers: int
    max_tokens: int
    weight_bytes: int
    dtype: str
    pool: PoolSpec
    facts: dict[str, str]

    def forward(self, batch: Batch, pool: Pool, taps: tuple[int, ...] = ()) -> Output:
        """Writes the rows' KV into their slots and returns the logits of the rows that need them."""
        ...
