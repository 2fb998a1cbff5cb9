"""Tiny random heads for the tiny target of the engine tests, in the layouts in which such heads are published, and rows that are told of
by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.engine.drafters.draft import Commit, Draft, Drafter, Place
from forerun.engine.drafters.registry import Host, Setting, open_drafter
from forerun.engine.kv import Table
from forerun.messages import SamplingParams
from tests.engine.drafters.companions import host
from tests.engine.tiny import VOCAB, TinyModel

HIDDEN = TinyModel.hidden
DRAFT_VOCAB = 40
INNER = 48


def config_of(**changes: Any) -> dict[str, Any]:
    """Of a decoder layer: two query heads over one of keys and values."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 4096,
        "vocab_size": VOCAB,
    } | changes


class Draw:
    """Random tensors, one after the other."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * 1.5 * shape[-1] ** -0.5

    def norm(self, width: int) -> Tensor:
        return 1.0 + 0.3 * torch.randn(width, generator=self._generator)

    def layer(self, at: str, width: int, norms: Sequence[str], head_norms: bool = False, biases: bool = False) -> dict[str, Tensor]:
        """A Llama layer whose attention reads `width` values."""
        sizes = {"q": 32, "k": 16, "v": 16}
        made = {f"{at}self_attn.{part}_proj.weight": self.matrix(rows, width) for part, rows in sizes.items()}
        if biases:
            made |= {f"{at}self_attn.{part}_proj.bias": self.matrix(rows) for part, rows in sizes.items()}
        if head_norms:
            made |= {f"{at}self_attn.{part}_norm.weight": self.norm(16) for part in "qk"}
        made |= {f"{at}self_attn.o_proj.weight": self.matrix(HIDDEN, 32), f"{at}mlp.down_proj.weight": self.matrix(HIDDEN, INNER)}
        made |= {f"{at}mlp.{part}_proj.weight": self.matrix(INNER, HIDDEN) for part in ("gate", "up")}
        return made | {f"{at}{name}.weight": self.norm(HIDDEN) for name in ("post_attention_layernorm", *norms)}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reduced(draw: Draw, vocab: int) -> dict[str, Tensor]:
    """A draft vocabulary of every other token, and more of the last ones."""
    ids = torch.tensor(sorted({*range(1, VOCAB, 2)} - {*range(1, 2 * (len(range(1, VOCAB, 2)) - vocab), 2)}))
    assert len(ids) == vocab
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    return {"lm_head.weight": draw.matrix(vocab, HIDDEN), "d2t": ids - torch.arange(vocab), "t2d": known}


def write_eagle3(folder: Path, variant: str = "plain", seed: int = 5) -> Path:
    """`variant`: parallel, parallel behind fc (P-EAGLE: speculators' with a mask, of three layers' width or of the head's), plain
    (SafeAILab's layout), speculators (with the norms that it names), deepspec (its own names, two layers, norms of
    heads, all tokens), biased (biases, q and k normed)."""
    draw = Draw(seed)
    if variant == "speculators" or variant.startswith("parallel"):
        settings = {
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
            "eagle_aux_hidden_state_layer_ids": [1, 0, 2],
        }
        tensors = {"fc.weight": draw.matrix(HIDDEN, 3 * HIDDEN), "input_norm.weight": draw.norm(3 * HIDDEN)}
        tensors |= draw.layer("layers.0.", 2 * HIDDEN, ("hidden_norm", "input_layernorm")) | reduced(draw, DRAFT_VOCAB)
        tensors |= {"norm.weight": draw.norm(HIDDEN), "embed_tokens.weight": draw.matrix(VOCAB, HIDDEN) * 3}
        if variant.startswith("parallel"):
            settings |= {"speculators_model_type": "peagle", "mask_token_id": 90}
            settings |= {"speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]}}
            tensors["mask_hidden"] = draw.matrix(1, 1, HIDDEN if variant.endswith("fc") else 3 * HIDDEN) * 20
        nested = {"speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB, "transformer_layer_config": config_of()}
        return write(folder, nested | settings, tensors)
    if variant == "deepspec":
        tensors = {"fc.weight": draw.matrix(HIDDEN, 2 * HIDDEN), "norm.weight": draw.norm(HIDDEN)}
        tensors |= draw.layer("layers.0.", 2 * HIDDEN, ("hidden_norm", "input_layernorm"), head_norms=True)
        tensors |= draw.layer("layers.1.", HIDDEN, ("input_layernorm",), head_norms=True)
        tensors |= {"lm_head.weight": draw.matrix(VOCAB, HIDDEN), "embed_tokens.weight": draw.matrix(VOCAB, HIDDEN) * 3}
        return write(folder, config_of(target_layer_ids=[0, 1], num_hidden_layers=2), tensors)
    tensors = {"fc.weight": draw.matrix(HIDDEN, 3 * HIDDEN), "norm.weight": draw.norm(HIDDEN)}
    tensors |= draw.layer("midlayer.", 2 * HIDDEN, ("hidden_norm", "input_layernorm"), variant == "biased", variant == "biased")
    tensors |= reduced(draw, DRAFT_VOCAB)
    more: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}}
    if variant == "biased":
        tensors |= {f"fc_norm.{i}.weight": draw.norm(HIDDEN) for i in range(3)}
        more |= {"fc_norm": True}
    return write(folder, config_of(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFT_VOCAB, **more), tensors)


def write_eagle1(folder: Path, bias: bool = True, seed: int = 6) -> Path:
    draw = Draw(seed)
    tensors = {"fc.weight": draw.matrix(HIDDEN, 2 * HIDDEN)} | ({"fc.bias": draw.matrix(HIDDEN)} if bias else {})
    tensors |= draw.layer("layers.0.", HIDDEN, ())
    return write(folder, config_of(architectures=["LlamaForCausalLM"], bias=bias), tensors)


LATENT = {"q_lora_rank": 24, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
MIXTURE = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24}
MTP = {
    "deepseek": ("model.layers.{}.", "", "eh_proj", ("enorm", "hnorm", "shared_head.norm")),
    "mimo": ("model.mtp_layers.{}.", "", "input_proj", ("token_layernorm", "hidden_layernorm", "final_layernorm")),
    "qwen": ("mtp.", "layers.{}.", "fc", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
}
"""family → what stands before its names (with the module's number), before those of its layer, the projection, the norms"""
KIN = {"latent": "deepseek", "gated": "qwen", "accompanied": "qwen", "fused": "qwen"}
"""DeepSeek's with its attention and its mixture; Qwen3-Next's attention, with an MLP, with its mixture, with that as Qwen3.5 stores it"""


def layout_of(family: str, place: int = 0) -> tuple[str, str, str, tuple[str, str, str]]:
    """As `MTP`, for module `place`."""
    kin = KIN.get(family, family)
    prefix, layer, project, norms = MTP[kin]
    return prefix.format(place + 2 if kin == "deepseek" else place), layer.format(place), project, norms


def write_mtp(folder: Path, family: str = "deepseek", seed: int = 8, modules: int = 1, **changes: Any) -> Path:
    """`family`: of `MTP` or of `KIN`. A module has an output head of its own where its layout knows one."""
    draw = Draw(seed)
    config = config_of(num_nextn_predict_layers=modules, model_type=family, num_hidden_layers=2) | changes
    config |= {"latent": LATENT | MIXTURE | {"num_key_value_heads": 2}}.get(family, {})
    if KIN.get(family) == "qwen":
        config |= SPARSE | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    tensors = {"model.embed_tokens.weight": draw.matrix(VOCAB, HIDDEN), "model.layers.0.input_layernorm.weight": draw.norm(HIDDEN)}
    for place in range(modules):
        prefix = layout_of(family, place)[0]
        tensors |= {f"{prefix}{name}": tensor for name, tensor in module(draw, family, place).items()}
    return write(folder, config, tensors)


def module(draw: Draw, family: str, place: int) -> dict[str, Tensor]:
    _, layer, project, norms = layout_of(family, place)
    kin = KIN.get(family, family)
    made = {f"{project}.weight": draw.matrix(HIDDEN, 2 * HIDDEN)} | {f"{name}.weight": draw.norm(HIDDEN) for name in norms}
    if family == "latent":
        made |= latent(draw) | mixture(draw)
    else:
        made |= draw.layer(layer, HIDDEN, ("input_layernorm",), head_norms=kin == "qwen", biases=family == "mimo")
    if family != "qwen" and kin == "qwen":
        made[f"{layer}self_attn.q_proj.weight"] = draw.matrix(64, HIDDEN)
    if family in ("accompanied", "fused"):
        made = {name: tensor for name, tensor in made.items() if ".mlp." not in name} | sparse(draw, f"{layer}mlp.", family == "fused")
    if kin == "deepseek":
        made["shared_head.head.weight"] = draw.matrix(VOCAB, HIDDEN)
    return {name: tensor - 1.0 if "norm" in name and kin == "qwen" else tensor for name, tensor in made.items()}


def sparse(draw: Draw, at: str, fused: bool) -> dict[str, Tensor]:
    """Qwen's mixture of four experts of 20 and a shared one of 24."""
    made = {"gate.weight": draw.matrix(4, HIDDEN), "shared_expert_gate.weight": draw.matrix(1, HIDDEN)}
    made |= {f"shared_expert.{part}_proj.weight": draw.matrix(24, HIDDEN) for part in ("gate", "up")}
    made["shared_expert.down_proj.weight"] = draw.matrix(HIDDEN, 24)
    if fused:
        made |= {"experts.gate_up_proj": draw.matrix(4, 40, HIDDEN), "experts.down_proj": draw.matrix(4, HIDDEN, 20)}
    for i in range(0 if fused else 4):
        made |= {f"experts.{i}.{part}_proj.weight": draw.matrix(20, HIDDEN) for part in ("gate", "up")}
        made[f"experts.{i}.down_proj.weight"] = draw.matrix(HIDDEN, 20)
    return {f"{at}{name}": tensor for name, tensor in made.items()}


def latent(draw: Draw) -> dict[str, Tensor]:
    """DeepSeek's attention: two heads of 8 rotated and 12 other dimensions, values of 10."""
    at = "self_attn."
    made = {f"{at}q_a_proj": draw.matrix(24, HIDDEN), f"{at}q_b_proj": draw.matrix(40, 24), f"{at}o_proj": draw.matrix(HIDDEN, 20)}
    made |= {f"{at}kv_a_proj_with_mqa": draw.matrix(20, HIDDEN), f"{at}kv_b_proj": draw.matrix(44, 12)}
    made |= {f"{at}q_a_layernorm": draw.norm(24), f"{at}kv_a_layernorm": draw.norm(12)}
    made |= {name: draw.norm(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"{name}.weight": tensor for name, tensor in made.items()}


def mixture(draw: Draw) -> dict[str, Tensor]:
    blocks = [*(f"mlp.experts.{i}." for i in range(4)), "mlp.shared_experts."]
    made = {f"{block}{part}_proj.weight": draw.matrix(20, HIDDEN) for block in blocks for part in ("gate", "up")}
    made |= {f"{block}down_proj.weight": draw.matrix(HIDDEN, 20) for block in blocks}
    return made | {"mlp.gate.weight": draw.matrix(4, HIDDEN), "mlp.gate.e_score_correction_bias": 0.1 * draw.matrix(4)}


@dataclasses.dataclass
class Told:
    """A drafter and one row of it that is told of by hand: `tokens` with the newest at the end, and the features of all but that."""

    drafter: Drafter
    table: Table
    tokens: list[int]
    features: Tensor
    row: int = 2
    known: int = 0

    def tell(self, count: int, ends: bool | None = None, lacking: int = 0) -> None:
        """The next `count` tokens became true; the root is the one behind them, if `ends` (as a rule: at the last). The first `lacking`
        of them were found in a prefix cache and have no features."""
        last = self.known + count
        ends = last == len(self.tokens) - 1 if ends is None else ends
        part, features = self.tokens[self.known : last], self.features[self.known + lacking : last]
        params = SamplingParams(seed=0, prompt_tokens=len(self.tokens) - 1, max_new_tokens=1 << 30)
        newest = self.tokens[last] if ends else None
        self.drafter.absorb(Commit([self.row], [self.known], [part], [newest], [features], [len(self.tokens)], [""], [params]))
        self.known = last

    def draft(self, most: int) -> Draft:
        return self.drafter.propose([self.row], [most])[0]


def around(longest: int = 1200) -> Host:
    """A worker whose target may have sequences of this length."""
    made = host()
    made.model.max_tokens = longest
    return made


def opened(spec: str, nodes: int, tree: bool = True, longest: int = 1200, within: Host | None = None) -> tuple[Drafter, Table]:
    """A drafter in a place of its own: scattered pages for four rows."""
    within = within or around(longest)
    drafter = open_drafter(spec, Setting(nodes, tree, within))
    size = within.backend.caps.page_tokens
    table = Table(16, longest + 64, size)
    count = -(-(longest + 64) // size)
    pages = np.random.default_rng(0).permutation(4 * count + 8)
    for row in range(4):
        table.grant(row, pages[row * count : (row + 1) * count].tolist())
    pools = tuple(within.backend.pool(each, len(pages)) for each in drafter.needs.pools)
    drafter.needs.attach(Place(pools, table, 16, longest))
    return drafter, table


def told(spec: str, length: int, nodes: int, tree: bool = True, seed: int = 0, **more: Any) -> Told:
    """`length`: tokens that have features."""
    drafter, table = opened(spec, nodes, tree, **more)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (length + 1,), generator=generator).tolist()
    return Told(drafter, table, tokens, torch.randn(length, len(drafter.needs.layers) * HIDDEN, generator=generator))
