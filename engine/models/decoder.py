"""The one decoder: a stack of attention and MLP blocks over a residual stream, described by a `ModelSpec`.

    residual = embed(tokens)                       [n, H]
    for every layer:   x = attention(norm(residual));   residual += x
                       x = mlp(norm(residual));         residual += x
    logits = head(norm(residual)) of the rows that need them, when somebody asks for them: most choices need none

Families differ in where the norms stand, in the constants, and in whether the MLP is a mixture of experts; never in this loop.
A block's result, the addition and the norm of the next block are one op. Everything is done by `backend.ops`; activations are float32
between them. What is done never depends on how many rows there are, so that a backend may record it once and replay it with any batch.
Knows nothing of files.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import Tensor

from forerun.backends.base import AttentionSpec, Backend, Draws, Ops, Picks, Pool, PoolSpec, Weight
from forerun.engine.batch import Batch
from forerun.engine.models.model import Output, Shared


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """x @ W.T + bias. `bias`: float32 [out] or None."""

    weight: Weight
    bias: Tensor | None

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.matmul(x, self.weight, self.bias)


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """`qkv`: [(heads + 2·kv_heads)·D, H], rows q, k, v. `cos`, `sin`: float32 [positions, R/2]; no columns = no rotation."""

    qkv: Linear
    out: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor
    sin: Tensor
    spec: AttentionSpec
    eps: float

    def __call__(self, ops: Ops, x: Tensor, batch: Batch, pool: Pool, layer: int) -> Tensor:
        return self.out(ops, self.attend(ops, x, batch, pool, layer))

    def attend(self, ops: Ops, x: Tensor, batch: Batch, pool: Pool, layer: int) -> Tensor:
        """What all heads found, [n, heads · D], in front of the projection."""
        qkv = self.qkv(ops, x)
        ops.rope(qkv, batch.positions, self.cos, self.sin, self.spec, self.q_norm, self.k_norm, self.eps)
        ops.write_kv(qkv, pool, layer, batch.slots, self.spec)
        return ops.attention(qkv, pool, layer, batch, self.spec)

    @property
    def width(self) -> int:
        """Values of a row between `x` and the result."""
        return self.qkv.weight.shape[0] + self.out.weight.shape[1]


class Attends(Protocol):
    """What a layer asks of its attention: [n, H] → [n, H], entries written on the way. `width`: values of a row in between."""

    @property
    def width(self) -> int: ...

    @property
    def spec(self) -> AttentionSpec: ...

    def __call__(self, ops: Ops, x: Tensor, batch: Batch, pool: Pool, layer: int) -> Tensor: ...


class Block(Protocol):
    """What stands between two norms: [n, H] → [n, H]. `width`: values of a row in between."""

    @property
    def width(self) -> int: ...

    def __call__(self, ops: Ops, x: Tensor) -> Tensor: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Mlp:
    """`gate_up`: [2F, H], rows gate, up. `down`: [H, F]."""

    gate_up: Linear
    down: Linear
    activation: str

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.mlp(x, self.gate_up.weight, self.down.weight, self.activation, self.gate_up.bias, self.down.bias)

    @property
    def width(self) -> int:
        return self.gate_up.weight.shape[0] + self.down.weight.shape[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """The `top_k` of several MLPs that a router chooses for each row."""

    router: Weight
    gate_up: list[Weight]
    down: list[Weight]
    top_k: int
    activation: str
    normalize: bool

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.moe(x, self.router, self.gate_up, self.down, self.top_k, self.activation, self.normalize)

    @property
    def width(self) -> int:
        """Routing, and one expert that every row may have chosen: its rows gathered, gate and up, their product, its result."""
        hidden, inner = self.down[0].shape
        return self.router.shape[0] + 2 * self.top_k + 2 * hidden + 3 * inner


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """`after_attention`, `after_mlp`: norms of a block's result before it is added. `before_mlp`, `before_next`: norms of the sum that
    the MLP and the next layer (or the head) read. None = none stands there. All float32 [H]."""

    attention: Attends
    after_attention: Tensor | None
    before_mlp: Tensor | None
    mlp: Block
    after_mlp: Tensor | None
    before_next: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """All weights of a decoder. `table`: [V, H]; `head`: [V, H] packed; `first`: the norm that the first layer reads through."""

    table: Tensor
    embed_scale: float
    first: Tensor | None
    layers: list[Layer]
    head: Weight
    logits_scale: float
    logits_softcap: float
    residual_scale: float
    eps: float


class OutputHead:
    """The `Head` of a stack."""

    def __init__(self, ops: Ops, stack: Stack) -> None:
        self._ops = ops
        self._stack = stack

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ops.logits(hidden, self._stack.head, self._stack.logits_scale, self._stack.logits_softcap)

    def choose(self, hidden: Tensor, draws: Draws) -> Picks:
        return self._ops.choose(hidden, self._stack.head, draws, self._stack.logits_scale, self._stack.logits_softcap)


class Decoder:
    """A `Model` (engine/models/model.py)."""

    def __init__(
        self, stack: Stack, backend: Backend, pool: PoolSpec, max_tokens: int, weight_bytes: int, dtype: str, facts: dict[str, str]
    ) -> None:
        self.stack = stack
        self.ops = backend.ops
        self.head = OutputHead(backend.ops, stack)
        self.vocab, self.hidden = stack.table.shape[0], stack.table.shape[1]
        self.layers = len(stack.layers)
        # The residual stream and what a norm made of it, each before and after an addition, a block's result and its norm.
        self.width = 6 * self.hidden + max(layer.attention.width for layer in stack.layers) + max(layer.mlp.width for layer in stack.layers)
        self.pool = pool
        self.max_tokens = max_tokens
        self.weight_bytes = weight_bytes
        self.dtype = dtype
        self.facts = facts

    def forward(self, batch: Batch, pool: Pool, taps: tuple[int, ...] = ()) -> Output:
        ops, stack = self.ops, self.stack
        residual = ops.embed(stack.table, batch.tokens, stack.embed_scale)
        tapped = {-1: residual} if -1 in taps else {}
        x = residual if stack.first is None else ops.norm(residual, stack.first, stack.eps)
        for index, layer in enumerate(stack.layers):
            x = layer.attention(ops, x, batch, pool, index)
            x, residual = self.join(x, layer.after_attention, residual, layer.before_mlp)
            x = layer.mlp(ops, x)
            x, residual = self.join(x, layer.after_mlp, residual, layer.before_next)
            if index in taps:
                tapped[index] = residual
        tapped[self.layers] = x
        hidden = ops.take(x, batch.logit_rows)
        return Output(None, ops.concat([tapped[tap] for tap in taps]) if taps else None, hidden, self.head)

    def shared(self) -> Shared:
        stack = self.stack
        norm, scales = stack.layers[-1].before_next, (stack.logits_scale, stack.logits_softcap)
        return Shared(stack.table, stack.embed_scale, stack.head, None, *scales, norm, stack.eps)

    def join(self, x: Tensor, after: Tensor | None, residual: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds a block's result to the residual stream: (what the next block reads, the stream)."""
        ops, stack = self.ops, self.stack
        if after is not None:
            x = ops.norm(x, after, stack.eps)
        if before is None:
            residual = ops.add(x, residual, stack.residual_scale)
            return residual, residual
        return ops.add_norm(x, residual, before, stack.eps, stack.residual_scale)
