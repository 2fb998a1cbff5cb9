"""The ops of the CPU without a compiler: `kernels.reference`, row by row. Slow, exact, batch-invariant by construction."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.backends.base import AttentionSpec, Draws, Picks, Pool, Rows, Weight
from forerun.kernels import reference


class TorchOps:
    """`Ops` by the specification itself. A packed weight is the plain tensor in the weight's type."""

    embed = staticmethod(reference.embed)
    take = staticmethod(reference.take)
    norm = staticmethod(reference.norm)
    add = staticmethod(reference.add)
    add_norm = staticmethod(reference.add_norm)
    gate = staticmethod(reference.gate)
    concat = staticmethod(reference.concat)
    noise = staticmethod(reference.noise)
    noise_at = staticmethod(reference.noise_at)
    rope = staticmethod(reference.rope)

    def matmul(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return reference.matmul(x, weight.data, bias)

    def mlp(
        self,
        x: Tensor,
        gate_up: Weight,
        down: Weight,
        activation: str,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        return reference.mlp(x, gate_up.data, down.data, activation, gate_up_bias, down_bias)

    def write_kv(self, qkv: Tensor, pool: Pool, layer: int, slots: Tensor, spec: AttentionSpec) -> None:
        reference.write_kv(qkv, pool, layer, slots, spec)

    def attention(self, qkv: Tensor, pool: Pool, layer: int, rows: Rows, spec: AttentionSpec) -> Tensor:
        return reference.attention(qkv, pool, layer, rows, spec)

    def keep_kv(self, pool: Pool, source: Tensor, target: Tensor) -> None:
        reference.keep_kv(pool, source, target)

    def moe(
        self, x: Tensor, router: Weight, gate_up: list[Weight], down: list[Weight], top_k: int, activation: str, normalize: bool
    ) -> Tensor:
        return reference.moe(x, router.data, [w.data for w in gate_up], [w.data for w in down], top_k, activation, normalize)

    def logits(self, x: Tensor, head: Weight, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        return reference.logits(x, head.data, scale, softcap)

    def pick(self, scores: Tensor, noise: Tensor | None) -> Picks:
        return Picks(*reference.pick(scores, noise))

    def choose(self, x: Tensor, head: Weight, draws: Draws, scale: float = 1.0, softcap: float = 0.0) -> Picks:
        return Picks(*reference.choose(x, head.data, draws.temperatures, draws.sampled, draws.seeds, draws.indices, scale, softcap))


def pack(weight: Tensor, dtype: torch.dtype, format: str, halves: bool) -> Weight:
    """weight [out, in] → the same matrix in `dtype`."""
    data = weight.detach().to(dtype).contiguous()
    return Weight((weight.shape[0], weight.shape[1]), format, data, data.nbytes, halves)
