"""The parts that heads are made of, as torch modules whose parameter names are those of the public checkpoints.

Attention is given its keys, values and what may be seen; which rows those are is what the kinds differ in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.train.kinds.source import Source


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight, self._eps)


def linear(inner: int, outer: int) -> nn.Linear:
    made = nn.Linear(inner, outer, bias=False)
    nn.init.normal_(made.weight, std=0.02)
    return made


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [rows, heads, D], positions [rows] → rotated, halves split: (a, b) → (a·cos − b·sin, b·cos + a·sin)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None].float() * frequency
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = torch.split(x.float(), half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Projections of `width` values to heads and back. `head_norms`: an RMSNorm of each query and key head, as Qwen3 has them."""

    def __init__(self, source: Source, width: int, head_norms: bool = False) -> None:
        super().__init__()
        self._heads, self._kv, self._dim, self._theta = source.heads, source.kv_heads, source.head_dim, source.theta
        self.q_proj = linear(width, source.heads * source.head_dim)
        self.k_proj = linear(width, source.kv_heads * source.head_dim)
        self.v_proj = linear(width, source.kv_heads * source.head_dim)
        self.o_proj = linear(source.heads * source.head_dim, source.hidden)
        self.q_norm = Norm(source.head_dim, source.eps) if head_norms else None
        self.k_norm = Norm(source.head_dim, source.eps) if head_norms else None

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[rows, width] → [rows, heads, D]."""
        q = self.q_proj(x).view(-1, self._heads, self._dim)
        return rotate(q if self.q_norm is None else self.q_norm(q), positions, self._theta)

    def entries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, width] → keys and values [rows, kv heads, D]."""
        k = self.k_proj(x).view(-1, self._kv, self._dim)
        k = rotate(k if self.k_norm is None else self.k_norm(k), positions, self._theta)
        return k, self.v_proj(x).view(-1, self._kv, self._dim).float()

    def over(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, extra: list[tuple[Tensor, Tensor]]) -> Tensor:
        """q [rows, heads, D]; keys, values [m, kv heads, D]; seen bool [rows, m]; extra: for each row one more key and value [rows, kv
        heads, D] → [rows, heads · D]."""
        rows, scale = q.shape[0], self._dim**-0.5
        grouped = q.view(rows, self._kv, self._heads // self._kv, self._dim)
        scores = torch.einsum("tgrd,sgd->grts", grouped, keys).float() * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        beside = [(grouped * key[:, :, None]).sum(-1).permute(1, 2, 0)[..., None].float() * scale for key, _ in extra]
        share = torch.softmax(torch.cat([scores, *beside], -1), -1)
        out = torch.einsum("grts,sgd->tgrd", share[..., : keys.shape[0]], values)
        for i, (_, value) in enumerate(extra):
            out = out + share[..., keys.shape[0] + i].permute(2, 0, 1)[..., None] * value[:, :, None]
        return out.reshape(rows, -1)

    def over_blocks(self, own: Sequence[Tensor], context: Sequence[Tensor], roots: Tensor, window: int = 0) -> Tensor:
        """Blocks of S rows at `roots` [a], each of which sees itself and what lies before its root, of that with a `window` so many places.
        own: queries [a, S, heads, D], keys and values [a, S, kv heads, D]; context: keys and values [t, kv heads, D] of places 0 … t−1 →
        [a · S, heads · D]."""
        (q, own_keys, own_values), (keys, values) = own, context
        count, size = q.shape[:2]
        grouped = q.view(count, size, self._kv, self._heads // self._kv, self._dim) * self._dim**-0.5
        ahead = roots[:, None] - torch.arange(len(keys))
        unseen = (ahead <= 0) | (ahead > window) if window else ahead <= 0
        before = torch.einsum("asgrd,tgd->gasrt", grouped, keys).float().masked_fill(unseen[:, None, None], float("-inf"))
        beside = torch.einsum("asgrd,akgd->gasrk", grouped, own_keys).float()
        share = torch.softmax(torch.cat([before, beside], -1), -1)
        out = torch.einsum("gasrt,tgd->asgrd", share[..., : len(keys)], values)
        out = out + torch.einsum("gasrk,akgd->asgrd", share[..., len(keys) :], own_values)
        return out.reshape(count * size, self._heads * self._dim)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(hidden, inner), linear(hidden, inner), linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
