"""Blocks of an MTP module that no other draft has: DeepSeek's latent attention and its mixture (a sigmoid router, shared experts), and
those of Qwen3-Next and Qwen3.5 (attention with a gate on its result, a mixture whose shared expert has one).

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
from forerun.engine.drafters.recursive_load import Frame
from forerun.engine.models.decoder import Attention, Linear, Mixture, Mlp


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


@dataclasses.dataclass(frozen=True, slots=True)
class Gated:
    """Attention whose result goes through a gate made of what it reads: out(attended · sigmoid(gate x)), with a value for each of the
    heads' dimensions. The gate is plain torch, so a forward with it is not recorded."""

    inner: Attention
    gate: Linear

    def __call__(self, ops: Ops, x: Tensor, batch: Batch, pool: Pool, layer: int) -> Tensor:
        return self.inner.out(ops, self.inner.attend(ops, x, batch, pool, layer) * self.gate(ops, x).sigmoid())

    @property
    def spec(self) -> AttentionSpec:
        return self.inner.spec

    @property
    def width(self) -> int:
        return self.inner.width + 3 * self.gate.weight.shape[0]


def is_gated(frame: Frame, at: str) -> bool:
    """Whether the projection of queries brings a gate of their size."""
    spec, name = frame.spec, f"{at}q_proj.weight"
    return frame.heads.has(name) and frame.heads.checkpoint.shape(frame.heads.prefix + name)[0] == 2 * spec.heads * spec.head_dim


def gated_attention(frame: Frame, at: str) -> Gated:
    """From a file's `…self_attn.`, whose `q_proj` holds each head's query and behind it the head's gate."""
    heads, spec, hidden = frame.heads, frame.spec, frame.hidden
    wide, narrow = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def both(tensor: Tensor) -> tuple[Tensor, Tensor]:
        query, gate = tensor.view(spec.heads, 2, spec.head_dim, -1).unbind(1)
        return query.flatten(0, 1), gate.flatten(0, 1).contiguous()

    query, gate = both(heads.tensor(f"{at}q_proj.weight", (2 * wide, hidden)))
    others = [heads.tensor(f"{at}{part}_proj.weight", (narrow, hidden)) for part in "kv"]
    bias = gate_bias = None
    if heads.has(f"{at}q_proj.bias"):
        first, last = both(heads.vector(f"{at}q_proj.bias", 2 * wide))
        bias, gate_bias = torch.cat([first.flatten(), *(heads.vector(f"{at}{part}_proj.bias", narrow) for part in "kv")]), last.flatten()
    qkv, out = Linear(heads.pack(torch.cat([query, *others])), bias), heads.linear(f"{at}o_proj", hidden, wide)
    norms = frame.maybe(f"{at}q_norm", spec.head_dim), frame.maybe(f"{at}k_norm", spec.head_dim)
    return Gated(Attention(qkv, out, *norms, *frame.rotation, spec, frame.eps), Linear(heads.pack(gate), gate_bias))


@dataclasses.dataclass(frozen=True, slots=True)
class Accompanied:
    """A mixture beside one MLP that every row goes through: mixture(x) + sigmoid(gate · x) · beside(x). `gate`: float32 [H]."""

    mixture: Mixture
    beside: Mlp
    gate: Tensor

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        weight = (x * self.gate).sum(1, keepdim=True).sigmoid()
        return self.mixture(ops, x) + weight * self.beside(ops, x)

    @property
    def width(self) -> int:
        return self.mixture.width + self.beside.width + 3 * self.gate.shape[0]


def accompanied(frame: Frame, at: str) -> Accompanied:
    """From a file's `…mlp.` with a `shared_expert_gate`: experts one by one, or all in one tensor (Qwen3.5)."""
    heads, config, hidden, activation = frame.heads, frame.config, frame.hidden, frame.activation
    count, inner, common = config["num_experts"], config["moe_intermediate_size"], config["shared_expert_intermediate_size"]

    def pair(block: str, width: int) -> Weight:
        return heads.pack(torch.cat([heads.tensor(f"{block}{part}_proj.weight", (width, hidden)) for part in ("gate", "up")]))

    if heads.has(f"{at}experts.gate_up_proj"):
        gate_up = [heads.pack(each.clone()) for each in heads.tensor(f"{at}experts.gate_up_proj", (count, 2 * inner, hidden))]
        down = [heads.pack(each.clone()) for each in heads.tensor(f"{at}experts.down_proj", (count, hidden, inner))]
    else:
        gate_up = [pair(f"{at}experts.{i}.", inner) for i in range(count)]
        down = [heads.weight(f"{at}experts.{i}.down_proj.weight", hidden, inner) for i in range(count)]
    router = heads.weight(f"{at}gate.weight", count, hidden)
    mixture = Mixture(router, gate_up, down, config["num_experts_per_tok"], activation, config.get("norm_topk_prob", True))
    beside = Mlp(
        Linear(pair(f"{at}shared_expert.", common), None), heads.linear(f"{at}shared_expert.down_proj", hidden, common), activation
    )
    return Accompanied(mixture, beside, heads.keep(heads.tensor(f"{at}shared_expert_gate.weight", (1, hidden)).float()[0]))
