"""Parts of a net that goes on from features, from a checkpoint: decoder layers, rotations, embeddings, reduced vocabularies.

What families share in their files and what their configurations say alike; what they do not share stands in `eagle.py` and `mtp.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.backends.base import AttentionSpec, Ops, PoolSpec
from forerun.engine.drafters.heads import Heads
from forerun.engine.drafters.registry import Host
from forerun.engine.models.decoder import Attention, Layer, Mlp
from forerun.engine.models.rotary import make_rope, tables
from forerun.engine.models.spec import ACTIVATIONS

Embed = Callable[[Ops, Tensor], Tensor]


class Frame:
    """The decoder layers of a draft. `config`: theirs, in the words of a Llama's; `offset`: added to norm weights. A draft whose stated
    positions are fewer than the target's sees so many of the newest: distances stay those that it was trained at."""

    def __init__(self, heads: Heads, config: dict[str, Any], host: Host, offset: float = 0.0) -> None:
        self.heads = heads
        self.config = config
        self.hidden: int = config["hidden_size"]
        self.eps: float = config.get("rms_norm_eps", 1e-6)
        self._offset = offset
        self._device = host.backend.device
        count: int = config["num_attention_heads"]
        dim: int = config.get("head_dim") or self.hidden // count
        reach: int = config.get("max_position_embeddings") or host.model.max_tokens
        window = config.get("sliding_window") if config.get("use_sliding_window", True) and config.get("layer_types") else None
        sliding = window if window and "sliding_attention" in config["layer_types"] else 0
        bounds = [each for each in (sliding, reach if reach < host.model.max_tokens else 0) if each]
        self.spec = AttentionSpec(
            count,
            config.get("num_key_value_heads") or count,
            dim,
            float(config.get("query_pre_attn_scalar") or dim) ** -0.5,
            min(bounds, default=0),
        )
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        partial = {"partial_rotary_factor": config["partial_rotary_factor"]} if config.get("partial_rotary_factor") else {}
        turning = config.get("qk_rope_head_dim") or dim  # of latent attention
        rope = make_rope(partial | scaling, config.get("rope_theta", 1e4), turning, reach, config.get("original_max_position_embeddings"))
        longest = host.model.max_tokens
        cos, sin = tables(rope, longest, longest + host.backend.caps.max_nodes)
        self.rotation = heads.keep(cos), heads.keep(sin)
        heads.demand(config.get("hidden_act", "silu") in ACTIVATIONS, f"activation {config.get('hidden_act')} is not known")
        self.activation = ACTIVATIONS[config.get("hidden_act", "silu")]

    def norm(self, name: str, width: int = 0) -> Tensor:
        """float32 [width]; `width` 0 = hidden."""
        return self.heads.vector(f"{name}.weight", width or self.hidden) + self._offset

    def maybe(self, name: str, width: int = 0) -> Tensor | None:
        return self.norm(name, width) if self.heads.has(f"{name}.weight") else None

    def layer(self, at: str, width: int, before_next: Tensor | None) -> Layer:
        """`at`: what stands before its names; `width`: of what attention reads; `before_next`: the norm behind the layer."""
        return Layer(
            attention=self.attention(f"{at}self_attn.", width),
            after_attention=None,
            before_mlp=self.norm(f"{at}post_attention_layernorm"),
            mlp=self.mlp(f"{at}mlp."),
            after_mlp=None,
            before_next=before_next,
        )

    def attention(self, at: str, width: int) -> Attention:
        heads, spec = self.heads, self.spec
        heads.skip(f"{at}rotary_emb.inv_freq")
        rows = {"q": spec.heads * spec.head_dim, "k": spec.kv_heads * spec.head_dim, "v": spec.kv_heads * spec.head_dim}
        qkv = heads.together({f"{at}{part}_proj": count for part, count in rows.items()}, width)
        out = heads.linear(f"{at}o_proj", self.hidden, rows["q"])
        norms = (self.maybe(f"{at}q_norm", spec.head_dim), self.maybe(f"{at}k_norm", spec.head_dim))
        return Attention(qkv, out, *norms, *self.rotation, spec, self.eps)

    def mlp(self, at: str) -> Mlp:
        heads, inner = self.heads, self.config["intermediate_size"]
        gate_up = heads.together({f"{at}gate_proj": inner, f"{at}up_proj": inner}, self.hidden, halves=True)
        return Mlp(gate_up, heads.linear(f"{at}down_proj", self.hidden, inner), self.activation)

    def pool(self, layers: int, dtype: torch.dtype) -> PoolSpec:
        return PoolSpec(layers, self.spec.kv_heads, self.spec.head_dim, dtype)


def embedding(heads: Heads, host: Host, name: str, vocab: int) -> tuple[Embed, int]:
    """The checkpoint's own embedding, or the target's where it has none; and its width."""
    if not heads.has(name):
        shared = host.model.shared()
        return shared.embed, shared.table.shape[1]
    table = heads.table(name, vocab, -1)
    return lambda ops, tokens: ops.embed(table, tokens), table.shape[1]


def targets(heads: Heads, reduced: int, vocab: int) -> NDArray[np.int64] | None:
    """The target's id of each draft id; None where they are the same. `d2t` holds what to add to a draft id."""
    if heads.has("t2d"):
        heads.skip("t2d")
    if not heads.has("d2t"):
        return None
    found: NDArray[np.int64] = heads.tensor("d2t", (reduced,)).numpy().astype(np.int64) + np.arange(reduced)
    heads.demand(bool((found >= 0).all() and (found < vocab).all()), f"d2t names tokens outside the target's vocabulary of {vocab}")
    return found


def pool_of(heads: Heads, layers: Sequence[Layer]) -> PoolSpec:
    """KV in the type that the weights are stored in, if the device has it."""
    spec, names = layers[0].attention.spec, heads.checkpoint.names()
    stored = heads.checkpoint.read(next(name for name in names if name.startswith(heads.prefix) and name.endswith("o_proj.weight"))).dtype
    return PoolSpec(len(layers), spec.kv_heads, spec.head_dim, heads.kept(stored))
