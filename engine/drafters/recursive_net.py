"""The network of a drafter that goes on from the target's features: EAGLE-1, -2, -3 and MTP modules.

    a row = (e, g)      e: embedding of token p + 1     g: features at p, fused; behind a guess, what the net itself returned for its parent

    EAGLE-3   x = [norm(e); norm(g)]               residual = g (or its norm)       attention reads 2d
    EAGLE-1   x = W[e; g] + b                      residual = x                     no norm in front of attention
    MTP       x = W[norm(e); norm(g)]              residual = x                     norm in front of attention
              ─▶ residual += attention(x) ─▶ residual += mlp(norm(residual)) ─▶ … more layers
    logits = head(norm(residual))        carried on: the residual, or its norm

Rows come from a staging area (`Stage`), so that a forward is recorded like any other. Owns arithmetic alone: no files, no rows, no choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from forerun.backends.base import Ops, Picks, Pool
from forerun.engine.batch import Batch
from forerun.engine.models.decoder import Layer, Linear


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Where the rows of a forward are put before it: `embedded` [most, E], `carried` [most, W], float32. Never moved: a recorded forward
    reads them at these addresses."""

    embedded: Tensor
    carried: Tensor

    @classmethod
    def open(cls, most: int, width: int, carried: int, device: torch.device) -> Stage:
        return cls(torch.zeros(most, width, device=device), torch.zeros(most, carried, device=device))

    def put(self, embedded: Tensor, carried: Tensor) -> None:
        """Rows 0 … n−1 of the next forward."""
        self.embedded[: embedded.shape[0]] = embedded
        self.carried[: carried.shape[0]] = carried

    @property
    def most(self) -> int:
        return self.embedded.shape[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Fusion:
    """Features [n, taps · H] → what the net carries [n, W]. `each`: a norm for every tap; `all`: one for all together; `project`: None =
    they are taken as they are."""

    each: list[Tensor]
    all: Tensor | None
    project: Linear | None
    eps: float

    def __call__(self, ops: Ops, features: Tensor) -> Tensor:
        if self.each:
            parts = features.float().chunk(len(self.each), 1)
            features = ops.concat([ops.norm(part.contiguous(), weight, self.eps) for part, weight in zip(parts, self.each)])
        if self.all is not None:
            features = ops.norm(features, self.all, self.eps)
        return features if self.project is None else self.project(ops, features)


class Entry(Protocol):
    """From a row to what the first layer reads, and the residual stream beside it. `width`: values of a row in between."""

    @property
    def width(self) -> int: ...

    def __call__(self, ops: Ops, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """EAGLE-3. `normed`: the residual is the norm of g."""

    embed_norm: Tensor
    hidden_norm: Tensor
    normed: bool
    eps: float

    @property
    def width(self) -> int:
        return 4 * self.hidden_norm.shape[0]

    def __call__(self, ops: Ops, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        u = ops.norm(g, self.hidden_norm, self.eps)
        return ops.concat([ops.norm(e, self.embed_norm, self.eps), u]), u if self.normed else g


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """EAGLE-1 and MTP. None = no norm stands there. `first`: in front of attention; `hidden_first`: [g; e] instead of [e; g]."""

    project: Linear
    embed_norm: Tensor | None
    hidden_norm: Tensor | None
    first: Tensor | None
    hidden_first: bool
    eps: float

    @property
    def width(self) -> int:
        return 2 * self.project.weight.shape[1] + 2 * self.project.weight.shape[0]

    def __call__(self, ops: Ops, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        e = e if self.embed_norm is None else ops.norm(e, self.embed_norm, self.eps)
        g = g if self.hidden_norm is None else ops.norm(g, self.hidden_norm, self.eps)
        x = self.project(ops, ops.concat([g, e] if self.hidden_first else [e, g]))
        return x if self.first is None else ops.norm(x, self.first, self.eps), x


@dataclasses.dataclass(frozen=True, slots=True)
class Stepped:
    """Of the rows whose logits are needed: `logits` float32 [m, V'], the best of each, and what the net carries on [m, W] (`Net.through`:
    of all rows)."""

    logits: Tensor
    picks: Picks
    carried: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Net:
    """`norm`: in front of the head, None = none; `normed`: its result is what is carried on. `head`: [m, d] → float32 [m, vocab].
    `fusion`: of the target's features. `carried`: width of what is carried on. `lowest`: the pool's layer of the first layer."""

    fusion: Fusion
    entry: Entry
    layers: list[Layer]
    norm: Tensor | None
    normed: bool
    head: Callable[[Ops, Tensor], Tensor]
    vocab: int
    carried: int
    eps: float
    lowest: int = 0

    def forward(self, ops: Ops, stage: Stage, batch: Batch, pool: Pool) -> Stepped:
        """Writes the rows' entries; `batch.tokens` are their places on the stage."""
        hidden = ops.take(self.stream(ops, stage, batch, pool), batch.logit_rows)
        normed = hidden if self.norm is None else ops.norm(hidden, self.norm, self.eps)
        logits = self.head(ops, normed)
        return Stepped(logits, ops.pick(logits, None), normed if self.normed else hidden)

    def through(self, ops: Ops, stage: Stage, batch: Batch, pool: Pool) -> Stepped:
        """As `forward`, with what is carried on of every row, for a net behind this one."""
        residual = self.stream(ops, stage, batch, pool)
        normed = residual if self.norm is None else ops.norm(residual, self.norm, self.eps)
        logits = self.head(ops, ops.take(normed, batch.logit_rows))
        return Stepped(logits, ops.pick(logits, None), normed if self.normed else residual)

    def stream(self, ops: Ops, stage: Stage, batch: Batch, pool: Pool) -> Tensor:
        """The residual stream behind the last layer, of every row."""
        x, residual = self.entry(ops, ops.take(stage.embedded, batch.tokens), ops.take(stage.carried, batch.tokens))
        for index, layer in enumerate(self.layers):
            x = layer.attention(ops, x, batch, pool, self.lowest + index)
            x, residual = join(ops, x, residual, layer.before_mlp, self.eps)
            x = layer.mlp(ops, x)
            x, residual = join(ops, x, residual, layer.before_next, self.eps)
        return residual

    @property
    def width(self) -> int:
        """float32 values that a row keeps alive at once, at the most."""
        layers = max(layer.attention.width + layer.mlp.width for layer in self.layers)
        return self.entry.width + layers + 6 * self.carried


def join(ops: Ops, x: Tensor, residual: Tensor, before: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(what the next block reads, the stream) after a block's result is added."""
    if before is None:
        residual = ops.add(x, residual)
        return residual, residual
    return ops.add_norm(x, residual, before, eps)
