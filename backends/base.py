"""What a device must offer: a `Backend` with its `Caps` and `Ops`.

Shapes: n = rows of the flat batch, m = rows whose logits are needed, H = hidden size, D = head dimension, V = vocabulary. Activations
between ops are float32 on the CPU; another device may choose its own activation type, the engine never asks.
Every op is stated in plain torch in `kernels/reference.py`, which is its specification; a backend replaces the ones it can do
faster. Ops return fresh tensors unless they say that they work in place.

Batch invariance: a row of an op's result depends on that row's inputs alone, bit for bit, whatever the other rows, their number and
the number of threads. A backend that keeps this says so in its caps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.kernels.quant import Codes


@dataclasses.dataclass(frozen=True, slots=True)
class Caps:
    """What the engine must know of a device. `page_tokens`: positions a KV page holds. `dtypes`: weight types it can compute with, best
    first. `kv_dtypes`: what a pool can hold. `graphs`: `capture` records and replays. `device_lengths`: sequence lengths may stay on the
    device. `tree_attention`: attention follows `Batch.parents`. `max_nodes`: most guessed nodes a segment may have. `batch_invariant`: see
    the module's head. `shared_memory`: other programs use the device's memory too, so that nobody takes all of it unasked."""

    page_tokens: int
    dtypes: tuple[torch.dtype, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    graphs: bool
    device_lengths: bool
    tree_attention: bool
    max_nodes: int
    batch_invariant: bool
    shared_memory: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSpec:
    """KV of one model or draft layer set."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """int8: codes, with a float32 scale for each position and head"""

    @property
    def position_bytes(self) -> int:
        """What the keys and values of one position take in all layers."""
        return 2 * self.layers * self.kv_heads * (self.head_dim * self.dtype.itemsize + (4 if self.dtype == torch.int8 else 0))


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """KV storage. `keys` and `values`: [layers, pages, kv_heads, page_tokens, head_dim]. Slot s of a layer is
    [s // page_tokens, :, s % page_tokens]. Where they are int8 an entry is scale · codes, scales float32 [layers, pages, kv_heads,
    page_tokens]; else there are none."""

    spec: PoolSpec
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def page_tokens(self) -> int:
        return self.keys.shape[3]


class Rows(Protocol):
    """The part of a flat batch that ops read (`engine/batch.py` explains every field). All int32."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    parents: Tensor
    starts: Tensor
    known: Tensor
    context: Tensor
    pages: Tensor
    logit_rows: Tensor
    sight: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """A packed matrix that computes x @ W.T. `shape`: (out, in) before packing; `format`: bf16, f32, or one of `kernels/quant.py`;
    `data`: the backend's own. `halves`: packed for `mlp`, and for nothing else."""

    shape: tuple[int, int]
    format: str
    data: Any
    bytes: int
    halves: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Per-layer constants. `window`: a row at position p sees positions > p − window (0 = all). `softcap`: scores become
    cap · tanh(score / cap) (0 = off). `sinks`: [heads] float32, a learned logit that joins the softmax's denominator, or None."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Picks:
    """What `pick` chose for m rows. `tokens`: int64 [m]; `logprobs`: float32 [m] = log-softmax of the scores at the token."""

    tokens: Tensor
    logprobs: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Draws:
    """How m rows are drawn. `temperatures`: float32 [m], what scores are divided by; `sampled`: int32 [m], 0 = the argmax, without noise;
    `seeds` (the bits of an unsigned number), `indices`: int64 [m], the dice of a sampled row."""

    temperatures: Tensor
    sampled: Tensor
    seeds: Tensor
    indices: Tensor

    @classmethod
    def greedy(cls, rows: int) -> Draws:
        """The likeliest token of each row."""
        zeros = torch.zeros(rows, dtype=torch.int64)
        return cls(torch.ones(rows), zeros.int(), zeros, zeros)


class Ops(Protocol):
    """The arithmetic of a step."""

    def embed(self, table: Tensor, tokens: Tensor, scale: float = 1.0) -> Tensor:
        """table [V, H] of the weight type, tokens int32 [n] → float32 [n, H]."""
        ...

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [n, H], rows int32 [m] → [m, H]."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm in float32: x / sqrt(mean(x²) + eps) · weight. x [n, H], weight float32 [H]."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """residual' = residual + scale · x; returns (norm(residual'), residual')."""
        ...

    def add(self, x: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
        """residual + scale · x."""
        ...

    def concat(self, parts: list[Tensor]) -> Tensor:
        """[n, a], [n, b], … → [n, a + b + …]."""
        ...

    def matmul(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x float32 [n, in] → float32 [n, out]; x is rounded to the weight's compute type (for codes to `quant.round_rows`),
        accumulation is float32."""
        ...

    def rope(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        spec: AttentionSpec,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """In place on qkv [n, (heads + 2·kv_heads)·D], laid out q, k, v: optional RMSNorm of each q and k head (weights [D], or
        [heads·D] / [kv_heads·D] for a norm over all heads together), then rotation of the first R of D dimensions, half-split: (a, b) =
        (x[i], x[i+R/2]) → (a·cos − b·sin, b·cos + a·sin). cos, sin: float32 [positions, R/2]; R = 0 columns means no rotation."""
        ...

    def write_kv(self, qkv: Tensor, pool: Pool, layer: int, slots: Tensor, spec: AttentionSpec) -> None:
        """Writes each row's keys and values, rounded to the pool's type (`quant.entries` where it is int8), into its slot. slots int32
        [n]."""
        ...

    def attention(self, qkv: Tensor, pool: Pool, layer: int, rows: Rows, spec: AttentionSpec) -> Tensor:
        """Attention of every row over what it sees (`engine/batch.py`), KV of this step included → [n, heads·D]."""
        ...

    def keep_kv(self, pool: Pool, source: Tensor, target: Tensor) -> None:
        """In every layer, copy the entries of slots `source` to slots `target` (int32 [k] each), as if all were read first."""
        ...

    def gate(self, x: Tensor, activation: str) -> Tensor:
        """x [n, 2F] = (gate, up) → act(gate) · up [n, F]. activation: silu, gelu, gelu_tanh, relu, relu2."""
        ...

    def mlp(
        self,
        x: Tensor,
        gate_up: Weight,
        down: Weight,
        activation: str,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """matmul(gate(matmul(x, gate_up, gate_up_bias), activation), down, down_bias), bit for bit: x [n, in] → [n, out]. gate_up [2F, in]
        may be packed with `halves`, so that what stands between the two products need never be in memory as a whole."""
        ...

    def moe(
        self, x: Tensor, router: Weight, gate_up: list[Weight], down: list[Weight], top_k: int, activation: str, normalize: bool
    ) -> Tensor:
        """Mixture of experts: softmax of router logits over experts, the top_k of them (renormalised to sum 1 if `normalize`; ties to the
        lower index), weighted sum of down(gate(gate_up(x))) in ascending expert order. x [n, H] → [n, H]."""
        ...

    def logits(self, x: Tensor, head: Weight, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        """float32 [m, V] = cap(scale · x @ head.T)."""
        ...

    def noise(self, seed: int, index: int, vocab: int) -> Tensor:
        """The dice: Gumbel noise float32 [vocab] of (seed, token index), bit by bit as in forerun/dice.md."""
        ...

    def noise_at(self, seeds: Tensor, indices: Tensor, tokens: Tensor) -> Tensor:
        """The same dice at k places only: int64 [k] each (seeds hold the bits of an unsigned number) → float32 [k]."""
        ...

    def pick(self, scores: Tensor, noise: Tensor | None) -> Picks:
        """scores float32 [m, V] (processed; −inf = impossible), noise float32 [m, V] or None → argmax of scores + noise (ties to the
        lowest id), and the log-probability log-softmax(scores)[token]."""
        ...

    def choose(self, x: Tensor, head: Weight, draws: Draws, scale: float = 1.0, softcap: float = 0.0) -> Picks:
        """x [m, H] → `logits`, divided by each row's temperature, then `pick` with its noise: the same bits, but no [m, V] need ever
        exist."""
        ...


class Backend(Protocol):
    """A device. `name`: cpu, …; `device`: for torch tensors that ops take."""

    name: str
    device: torch.device
    caps: Caps
    ops: Ops

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes that this process may still take, and may take in all (cgroup limits included)."""
        ...

    def pool(self, spec: PoolSpec, pages: int) -> Pool: ...

    def pack(self, weight: Tensor, format: str, halves: bool = False) -> Weight:
        """weight [out, in] of any floating type → the layout the device multiplies with. format: bf16, f32, or one of
        `kernels/quant.py`; a ValueError that names the ones it has otherwise. `halves`: gate and up, one below the other, for `mlp`."""
        ...

    def pack_codes(self, codes: Codes, halves: bool = False) -> Weight:
        """A matrix that is quantised already, in its own format and without loss."""
        ...

    def capture(self, function: Callable[..., Any], example: Any) -> Callable[..., Any]:
        """A function of a batch that does the same work, recorded and replayed where the device can; else `function` itself. A
        recording is made when the function is first called with a kind of batch (`example`, if not None, is such a first call); what it
        calls between ops must not depend on the batch's values. Results are the caller's to keep."""
        ...

    def synchronize(self) -> None: ...

    def facts(self) -> dict[str, str]:
        """What was chosen and why (threads, instruction set, …), for the log and `forerun doctor`."""
        ...
