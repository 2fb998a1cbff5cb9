"""What the engine asks of a target model: one forward over flat rows; and what a drafter may share of it."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import Tensor

from forerun.backends.base import Draws, Ops, Picks, Pool, PoolSpec, Weight
from forerun.engine.batch import Batch


class Head(Protocol):
    """The output head, applied to hidden states [m, H]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [m, V]."""
        ...

    def choose(self, hidden: Tensor, draws: Draws) -> Picks:
        """The choice in each row's logits (`Ops.choose`)."""
        ...


@dataclasses.dataclass(slots=True)
class Output:
    """`scores`: float32 [m, V] for `batch.logit_rows`; None until somebody asks for `logits`, where a model leaves them out and gives
    `hidden` [m, H] and its `head` instead. `taps`: hidden states of the layers asked for, [n, taps · H], or None."""

    scores: Tensor | None
    taps: Tensor | None = None
    hidden: Tensor | None = None
    head: Head | None = None

    @property
    def logits(self) -> Tensor:
        """float32 [m, V], computed once."""
        if self.scores is None:
            if self.head is None or self.hidden is None:
                raise ValueError("an output has scores, or hidden states and a head")
            self.scores = self.head.logits(self.hidden)
        return self.scores


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """The target's two ends, as a drafter may use them without a copy. `table`: [V, H] in the weight type, times `embed_scale`. `head`:
    [V, H] packed, which reads the final norm's result. `norm`: the weight of the final norm (RMSNorm with `eps`), float32 [H]; None where
    it is not known."""

    table: Tensor
    embed_scale: float
    head: Weight
    bias: Tensor | None = None
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    norm: Tensor | None = None
    eps: float = 1e-6

    def embed(self, ops: Ops, tokens: Tensor) -> Tensor:
        """int32 [n] → float32 [n, H]."""
        return ops.embed(self.table, tokens, self.embed_scale)

    def logits(self, ops: Ops, x: Tensor) -> Tensor:
        """x [m, H], normed as by the target's final norm → float32 [m, V]."""
        if self.bias is not None:
            return ops.matmul(x, self.head, self.bias)
        return ops.logits(x, self.head, self.logits_scale, self.logits_softcap)


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
        """Writes the rows' KV into their slots and returns the logits of the rows that need them. Tap i (0 … layers−1) is the residual
        stream behind decoder layer i, tap −1 what the first layer reads, tap `layers` the final norm's result."""
        ...

    def shared(self) -> Shared:
        """StartError (with its cure) where the two ends cannot be shared."""
        ...
