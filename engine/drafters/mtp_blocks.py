"""Blocks of an MTP module that no other draft has: DeepSeek's latent attention, and mixtures with a sigmoid router and shared experts.

Latent attention as one ordinary product: with the latents side by side, every query, key and value is a linear function of them.

    c = [norm(Wqa x) ; norm(Wkv x) ; Wpe x]        qkv = M c        M holds q_b, the halves of kv_b, and an identity that hands the one
                                                                    rotated part of the keys to every head

A head is [rotated ; not rotated], because the first dimensions are those that `ops.rope` turns; DeepSeek stores them behind and turns
neighbours, so the rows of M are in another order than those of the file. Values are padded with zeros to the size of a head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from forerun.backends.base import AttentionSpec, Ops, Pool, Weight
from forerun.engine.batch import Batch
from forerun.engine.drafters.heads import Heads
from forerun.engine.models.decoder import Linear, Mlp


@dataclasses.dataclass(frozen=True, slots=True)
class Latent:
    """`down`: x → a query latent, None = queries are made of x itself; `latent`, `rotated`: x → the latent of keys and values, the rotated
    part of keys. `whole`: [(3 · heads) · D, …], see the module's head. `out`: reads all heads, padding included."""

    down: Weight | None
    down_norm: Tensor | None
    latent: Weight
    latent_norm: Tensor
    rotated: Weight
    whole: Weight
    out: Linear
    cos: Tensor
    sin: Tensor
    spec: AttentionSpec
    eps: float

    def __call__(self, ops: Ops, x: Tensor, batch: Batch, pool: Pool, layer: int) -> Tensor:
        query = x
        if self.down is not None and self.down_norm is not None:
            query = ops.norm(ops.matmul(x, self.down), self.down_norm, self.eps)
        latent = ops.norm(ops.matmul(x, self.latent), self.latent_norm, self.eps)
        qkv = ops.matmul(ops.concat([query, latent, ops.matmul(x, self.rotated)]), self.whole)
        ops.rope(qkv, batch.positions, self.cos, self.sin, self.spec)
        ops.write_kv(qkv, pool, layer, batch.slots, self.spec)
        return self.out(ops, ops.attention(qkv, pool, layer, batch, self.spec))

    @property
    def width(self) -> int:
        return self.whole.shape[0] + 3 * self.whole.shape[1] + self.out.weight.shape[1]


def latent_attention(heads: Heads, at: str, config: dict[str, Any], hidden: int, rotation: tuple[Tensor, Tensor], eps: float) -> Latent:
    """From a file's `…self_attn.`; `rotation`: tables of the rotated dimensions."""
    count, turn, still, value = (config[name] for name in ("num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    rank, down = config["kv_lora_rank"], config.get("q_lora_rank")
    size = turn + still
    heads.demand(value <= size, f"its values have {value} dimensions and its keys {size}", "use --speculator suffix")
    neighbours = [*range(0, turn, 2), *range(1, turn, 2)] if config.get("rope_interleave", True) else list(range(turn))
    order = torch.tensor([still + i for i in neighbours] + list(range(still)))
    asks = heads.tensor(f"{at}{'q_b_proj' if down else 'q_proj'}.weight", (count * size, down or hidden)).float()
    tells = heads.tensor(f"{at}kv_b_proj.weight", (count * (still + value), rank)).float().view(count, still + value, rank)
    both = heads.tensor(f"{at}kv_a_proj_with_mqa.weight", (rank + turn, hidden))
    first = down or hidden
    whole = torch.zeros(3, count, size, first + rank + turn)
    whole[0, :, :, :first] = asks.view(count, size, first)[:, order]
    whole[1, :, :turn, first + rank :] = torch.eye(turn)[neighbours]
    whole[1, :, turn:, first : first + rank] = tells[:, :still]
    whole[2, :, :value, first : first + rank] = tells[:, still:]
    out = torch.zeros(hidden, count, size)
    out[:, :, :value] = heads.tensor(f"{at}o_proj.weight", (hidden, count * value)).float().view(hidden, count, value)
    stored = both.dtype
    return Latent(
        down=heads.weight(f"{at}q_a_proj.weight", down, hidden) if down else None,
        down_norm=heads.vector(f"{at}q_a_layernorm.weight", down) if down else None,
        latent=heads.pack(both[:rank].clone()),
        latent_norm=heads.vector(f"{at}kv_a_layernorm.weight", rank),
        rotated=heads.pack(both[rank:].clone()),
        whole=heads.pack(whole.flatten(0, 2).to(stored)),
        out=Linear(heads.pack(out.flatten(1).to(stored)), None),
        cos=rotation[0],
        sin=rotation[1],
        spec=AttentionSpec(count, count, size, size**-0.5),
        eps=eps,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """DeepSeek's mixture: sigmoid scores, chosen with `bias` added and group by group, weighed without it. Written in plain torch between
    products, so a forward with it is not recorded."""

    router: Weight
    bias: Tensor
    gate_up: list[Weight]
    down: list[Weight]
    shared: Mlp | None
    top_k: int
    groups: int
    top_groups: int
    normalize: bool
    scale: float
    activation: str

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        scores = ops.matmul(x, self.router).sigmoid()
        choice = scores + self.bias
        if self.groups > 1:
            grouped = choice.view(x.shape[0], self.groups, -1)
            best = grouped.topk(2, -1).values.sum(-1).topk(self.top_groups, -1).indices
            kept = torch.zeros(x.shape[0], self.groups, dtype=torch.bool, device=x.device).scatter_(1, best, True)
            choice = grouped.masked_fill(~kept.unsqueeze(2), 0.0).flatten(1)
        experts = choice.topk(self.top_k, -1).indices
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        out = torch.zeros_like(x) if self.shared is None else self.shared(ops, x)
        for expert in sorted(set(experts.flatten().tolist())):
            row, place = (experts == expert).nonzero(as_tuple=True)
            made = ops.matmul(ops.gate(ops.matmul(x[row], self.gate_up[expert]), self.activation), self.down[expert])
            out[row] += self.scale * weights[row, place].unsqueeze(1) * made
        return out

    @property
    def width(self) -> int:
        hidden, inner = self.down[0].shape
        return 3 * self.router.shape[0] + 4 * hidden + 3 * inner


def routed(heads: Heads, at: str, config: dict[str, Any], hidden: int, activation: str) -> Routed:
    """From a file's `…mlp.` with a `gate.weight`."""
    count, inner = config["n_routed_experts"], config["moe_intermediate_size"]

    def pair(block: str, width: int) -> Weight:
        names = [f"{block}{part}_proj.weight" for part in ("gate", "up")]
        return heads.pack(torch.cat([heads.tensor(name, (width, hidden)) for name in names]))

    experts = [f"{at}experts.{i}." for i in range(count)]
    shared, common = inner * (config.get("n_shared_experts") or 0), f"{at}shared_experts."
    together = Mlp(Linear(pair(common, shared), None), heads.linear(f"{common}down_proj", hidden, shared), activation) if shared else None
    name = f"{at}gate.e_score_correction_bias"
    return Routed(
        router=heads.weight(f"{at}gate.weight", count, hidden),
        bias=heads.vector(name, count) if heads.has(name) else torch.zeros(count, device=heads.backend.device),
        gate_up=[pair(expert, inner) for expert in experts],
        down=[heads.weight(f"{expert}down_proj.weight", hidden, inner) for expert in experts],
        shared=together,
        top_k=config["num_experts_per_tok"],
        groups=config.get("n_group") or 1,
        top_groups=config.get("topk_group") or 1,
        normalize=config.get("norm_topk_prob", True),
        scale=config.get("routed_scaling_factor") or 1.0,
        activation=activation,
    )
