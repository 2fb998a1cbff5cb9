"""A decoder of random weights in a given shape, with the decoder's ops in its order, and batches for it.

What an op costs does not depend on the numbers, so layers share the values they were drawn from; each has memory of its own.
"""

from __future__ import annotations

import dataclasses

import torch

from forerun.backends.base import AttentionSpec, Backend, Draws, Picks, Pool, Weight
from forerun.engine.batch import Batch
from forerun.engine.models.model import Output


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decoder: SmolLM2-135M unless said otherwise."""

    layers: int = 30
    hidden: int = 576
    inner: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152

    def matrices(self) -> list[tuple[int, int]]:
        wide = (self.heads + 2 * self.kv_heads) * self.head_dim
        layer = [(wide, self.hidden), (self.hidden, self.heads * self.head_dim), (2 * self.inner, self.hidden), (self.hidden, self.inner)]
        return layer * self.layers

    def kinds(self) -> list[tuple[int, int]]:
        """[outputs, inputs] of the matrices of a layer, then of the output head."""
        return [*self.matrices()[:4], (self.vocab, self.hidden)]

    def layer_products(self) -> int:
        """Multiplications of a row in all layers."""
        return sum(rows * columns for rows, columns in self.matrices())


SHAPES = {
    "135m": Shape(),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128256),
    "tiny": Shape(2, 128, 256, 2, 1, 64, 1024),
}
"""SmolLM2-135M; Llama-3.2-1B, far larger than any cache; one that a core's own cache of 1 MiB holds."""


class Model:
    """`format` of all weights; with int4 the output head is int8, as --quantize int4 has it. `bytes`: of all weights."""

    def __init__(self, shape: Shape, backend: Backend, format: str, positions: int) -> None:
        self.shape, self.ops = shape, backend.ops
        self.spec = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
        drawn: dict[tuple[int, int], torch.Tensor] = {}

        def draw(rows: int, columns: int, format: str, halves: bool = False) -> Weight:
            if (rows, columns) not in drawn:
                drawn[rows, columns] = torch.randn(rows, columns) / columns**0.5
            return backend.pack(drawn[rows, columns], format, halves)

        self.weights = [draw(*matrix, format, halves=at % 4 == 2) for at, matrix in enumerate(shape.matrices())]
        self.head = draw(shape.vocab, shape.hidden, "int8" if format.startswith("int4") else format)  # as --quantize int4 has it
        self.bytes = self.head.bytes + sum(weight.bytes for weight in self.weights)
        self.table = torch.randn(1000, shape.hidden)
        self.one = torch.ones(shape.hidden)
        angle = torch.randn(positions, shape.head_dim // 2)
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, batch: Batch, pool: Pool) -> Output:
        ops, spec = self.ops, self.spec
        residual = ops.embed(self.table, batch.tokens)
        x = ops.norm(residual, self.one, 1e-5)
        for layer in range(self.shape.layers):
            qkv, out, gate_up, down = self.weights[4 * layer : 4 * layer + 4]
            y = ops.rope(ops.matmul(x, qkv), batch.positions, self.cos, self.sin, spec)
            ops.write_kv(y, pool, layer, batch.slots, spec)
            x, residual = ops.add_norm(ops.matmul(ops.attention(y, pool, layer, batch, spec), out), residual, self.one, 1e-5)
            x, residual = ops.add_norm(ops.mlp(x, gate_up, down, "silu"), residual, self.one, 1e-5)
        needed = x if batch.logit_rows.shape[0] == batch.rows else ops.take(x, batch.logit_rows)
        return Output(None, hidden=needed, head=self)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ops.logits(hidden, self.head)

    def choose(self, hidden: torch.Tensor, draws: Draws) -> Picks:
        return self.ops.choose(hidden, self.head, draws)


def batch(segments: int, known: int, context: int, logits: str) -> Batch:
    """`segments` sequences of `known` rows each behind `context` positions. `logits`: of all rows, or of each segment's last."""
    pages = -(-(context + known) // 16)
    row = torch.arange(segments).repeat_interleave(known)
    positions = torch.arange(context, context + known).repeat(segments)
    last = torch.arange(segments) * known + known - 1
    tensors = (
        torch.arange(segments * known) % 1000,
        positions,
        row * pages * 16 + positions,
        torch.full((segments * known,), -1),
        torch.arange(segments + 1) * known,
        torch.full((segments,), known),
        torch.full((segments,), context),
        torch.arange(segments * pages).view(segments, pages),
        torch.arange(segments * known) if logits == "all" else last,
    )
    return Batch(*(tensor.int() for tensor in tensors))
