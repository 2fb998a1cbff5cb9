"""Block drafters from their checkpoints: what a configuration says, in every public spelling, and the tensors that belong to it.

    z-lab         `dflash_config` (target_layer_ids, mask_token_id, block_size …), Qwen3's words for the layers; no embedding and no head
    DeepSpec      the target's configuration with block_size, target_layer_ids, mask_token_id, markov_rank … beside; copies of the target's
                  embedding and head
    speculators   `speculators_model_type`, layers in `transformer_layer_config`, aux_hidden_state_layer_ids; a reduced vocabulary (d2t)

What is guessed by which row of the block: DFlash's masks guess the token at their own position, DSpark's rows the one behind it (`anchor`:
the root's row guesses too). It goes by what the file says of it, then by the architecture and the heads that are there, never by its name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.backends.base import Ops, Weight
from forerun.engine.drafters.dflash_net import BlockLayer, BlockNet, Sight
from forerun.engine.drafters.heads import Heads
from forerun.engine.drafters.recursive_load import Frame, targets
from forerun.engine.drafters.registry import Host

Config = dict[str, Any]
SAMPLE = 32
"""rows that are compared to tell a copy of the target's matrix from another one"""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPlan:
    """`size`: rows of a block. `taps`: target layers. `anchor`: the root's row guesses too. `output_scale`, `softcap`: of logits.
    `layout`: whose spelling it is, for the log."""

    size: int
    taps: tuple[int, ...]
    mask: int
    anchor: bool
    input_scale: float
    output_scale: float
    softcap: float
    layout: str

    @property
    def places(self) -> int:
        """Guesses of a block."""
        return self.size if self.anchor else self.size - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The head that reads the block's rows. `vocab`: its rows; `ids`: the target's id of each, None = the same."""

    weight: Weight
    bias: torch.Tensor | None
    scale: float
    softcap: float
    vocab: int
    ids: NDArray[np.int64] | None

    def __call__(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return ops.matmul(x, self.weight, self.bias) * self.scale
        return ops.logits(x, self.weight, self.scale, self.softcap)


def merged(heads: Heads) -> Config:
    """All that the configuration says, at one level: of the layers, then of the draft, then of the block."""
    config = heads.config
    return (
        (config.get("transformer_layer_config") or {}) | config | (config.get("dflash_config") or {}) | (config.get("dspark_config") or {})
    )


def read_plan(heads: Heads, config: Config, host: Host) -> BlockPlan:
    """StartError for what is no block drafter, or not this target's."""
    layout = "speculators'" if "speculators_model_type" in heads.config else "z-lab's" if "dflash_config" in heads.config else "DeepSpec's"
    known = "fc.weight" in heads.names() and config.get("mask_token_id") is not None
    heads.demand(
        known, "it has no fc.weight or no mask_token_id, so it is no block drafter", "see docs/drafters.md for each drafter's layouts"
    )
    convolved = any(".attention_conv." in name or name.startswith("candidate_selector") for name in heads.names())
    heads.demand(not convolved, "DFlash2 (convolutions and a selector) is not read", "use a DFlash or DSpark checkpoint")
    named = [name for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size") if not config.get(name)]
    heads.demand(not named, f"config.json does not say its {', '.join(named)}", "fetch config.json of these heads again")
    gemma = "full_attention" in (config.get("rope_parameters") or {}) or any(
        ".pre_feedforward_layernorm." in name for name in heads.names()
    )
    heads.demand(
        not gemma, "Gemma's variant (norms on both sides, a rotation for each kind of layer) is not read", "use heads in Qwen3's form"
    )
    model = host.model
    layers = config.get("num_target_layers") or model.layers
    heads.demand(layers == model.layers, f"it was made for a target of {layers} layers, this one has {model.layers}")
    hidden = config.get("hidden_size")
    heads.demand(hidden == model.hidden, f"its rows are {hidden} wide, the target's are {model.hidden}: it was made for another target")
    size, mask = int(config.get("block_size") or 16), int(config["mask_token_id"])
    most = host.backend.caps.max_nodes
    heads.demand(1 < size <= most, f"its block has {size} rows, it may have 2 to {most}", "fetch config.json of these heads again")
    table = model.shared().table.shape[0]
    heads.demand(0 <= mask < table, f"its mask token {mask} is outside the target's embedding of {table} rows")
    return BlockPlan(
        size=size,
        taps=read_taps(heads, config, model.layers),
        mask=mask,
        anchor=anchored(heads, config),
        input_scale=float(config.get("input_embedding_scale", 1.0)),
        output_scale=float(config.get("output_multiplier", 1.0)),
        softcap=float(config.get("final_logit_softcapping") or 0.0),
        layout=layout,
    )


def read_taps(heads: Heads, config: Config, layers: int) -> tuple[int, ...]:
    """Ids count decoder layers from 0, −1 is the embedding's result; speculators' count what a layer reads, so they are one more. Behind
    the last layer, Hugging Face's list of states has the final norm's result."""
    ids = config.get("target_layer_ids")
    if ids is None:
        aux = config.get("aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
        ids = [each - 1 for each in aux] if aux else None
    count = heads.checkpoint.shape(f"{heads.prefix}fc.weight")[-1] // config["hidden_size"]
    if ids is None:
        ids = [layers // 2] if count == 1 else [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    heads.demand(len(ids) == count, f"it names {len(ids)} layers of the target, fc reads {count}", "fetch config.json of these heads again")
    heads.demand(
        all(-1 <= each < layers for each in ids), f"it reads layers {ids} of a target that has {layers}: it was made for another target"
    )
    last = layers if "speculators_model_type" not in heads.config else layers - 1
    return tuple(last if each == layers - 1 else each for each in ids)


def anchored(heads: Heads, config: Config) -> bool:
    for name in ("sample_from_anchor", "shift_label"):
        if config.get(name) is not None:
            return bool(config[name])
    architecture = str((heads.config.get("architectures") or [""])[0])
    if "speculators_model_type" in heads.config:
        return bool(config["speculators_model_type"] == "dspark")
    return "DSpark" in architecture or "dflash_config" not in heads.config


def read_net(heads: Heads, config: Config, plan: BlockPlan, host: Host) -> BlockNet:
    frame = Frame(heads, config | {"layer_types": None}, host)
    count, hidden = int(config["num_hidden_layers"]), host.model.hidden
    layers = []
    for i in range(count):
        at = f"layers.{i}."
        attention = frame.attention(f"{at}self_attn.", hidden)
        rows = frame.spec.kv_heads * frame.spec.head_dim
        context = heads.together({f"{at}self_attn.{part}_proj": rows for part in "kv"}, hidden)
        norms = frame.norm(f"{at}input_layernorm"), frame.norm(f"{at}post_attention_layernorm")
        sight = read_sight(heads, config, i, frame.spec.window)
        layers.append(BlockLayer(attention, context, *norms, frame.mlp(f"{at}mlp."), sight))
    fuse = heads.linear("fc", hidden, len(plan.taps) * hidden)
    return BlockNet(fuse, frame.norm("hidden_norm"), layers, frame.norm("norm"), frame.eps)


def read_sight(heads: Heads, config: Config, layer: int, reach: int) -> Sight:
    """`reach`: positions that the draft was made for, if the target has more; it sees the newest of them."""
    types = config.get("layer_types") or []
    sliding = layer < len(types) and types[layer] == "sliding_attention"
    window = int(config.get("sliding_window") or 0) if sliding else 0
    bounds = [each for each in (window, reach) if each]
    if "speculators_model_type" in heads.config:
        causal = sliding and not config.get("sliding_window_non_causal", False)
        return Sight(min(bounds, default=0), causal, rooted=True)
    asked = config.get("is_causal", config.get("causal"))
    causal = bool(asked) if asked is not None else sliding and "dflash_config" in heads.config
    return Sight(min(bounds, default=0), causal)


def read_output(heads: Heads, plan: BlockPlan, host: Host) -> Output:
    """The target's head, or the checkpoint's own where that is another. Copies of the target's ends are not kept."""
    shared, ops = host.model.shared(), host.backend.ops
    hidden, vocab = host.model.hidden, host.model.vocab
    heads.skip("verifier_lm_head.weight", "verifier_norm.weight")
    if heads.has("embed_tokens.weight"):
        stored = heads.tensor("embed_tokens.weight", (-1, hidden))[:SAMPLE].float()
        same = torch.allclose(stored, shared.table[:SAMPLE].float().cpu(), rtol=1e-2, atol=1e-2)
        heads.demand(same, "its embedding is not the target's: it was made for another target")
    if not heads.has("lm_head.weight"):
        heads.demand(not heads.has("d2t"), "it has a reduced vocabulary (d2t) and no lm_head.weight for it", "fetch the heads again")
        return Output(shared.head, shared.bias, plan.output_scale, plan.softcap, vocab, None)
    rows = heads.checkpoint.shape(f"{heads.prefix}lm_head.weight")[0]
    ids = targets(heads, rows, vocab)
    heads.demand(rows == vocab or ids is not None, f"its head has {rows} tokens and no d2t, the target has {vocab}")
    stored = heads.tensor("lm_head.weight", (rows, hidden))
    if ids is None and shared.bias is None:
        probe = torch.eye(hidden)[:SAMPLE].to(host.backend.device)
        if torch.allclose(ops.matmul(probe, shared.head).cpu(), stored[:, :SAMPLE].float().T, rtol=1e-2, atol=1e-2):
            return Output(shared.head, None, plan.output_scale, plan.softcap, vocab, None)
    return Output(heads.pack(stored), None, plan.output_scale, plan.softcap, rows, ids)
