"""Tiny block drafters in their public layouts, and what plain torch says of them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.engine.drafters.registry import Setting
from tests.engine.drafters.companions import host
from tests.engine.drafters.golden import HIDDEN, draw, write
from tests.engine.drafters.plain import block_hidden, spark_levels
from tests.engine.tiny import VOCAB, TinyModel

LAYERS, HEADS, KV, DIM, INNER, RANK, REDUCED = 3, 4, 2, 16, 48, 8, 40
EPS, THETA = 1e-6, 1e4
WINDOW = 24
TYPES = ["full_attention", "sliding_attention", "sliding_attention"]
LONGEST = 1200


@dataclasses.dataclass(frozen=True)
class Layout:
    """`anchor`: the root's row guesses; `sights`: (window, causal, rooted) of every layer; `taps`: what the drafter must declare."""

    size: int
    anchor: bool
    sights: list[tuple[int, bool, bool]]
    config: dict[str, Any]
    taps: tuple[int, ...] = (0, 2)
    markov: str = ""
    sure: bool = False
    reduced: bool = False
    copies: bool = False
    norms: bool = True


FULL = [(0, False, False)] * LAYERS
LAYER_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "max_position_embeddings": LONGEST,
    "rope_theta": THETA,
    "vocab_size": VOCAB,
}
Z_LAB = LAYER_CONFIG | {
    "architectures": ["DFlashDraftModel"],
    "num_target_layers": 2,
    "block_size": 16,
    "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 90},
}
DEEPSPEC = LAYER_CONFIG | {
    "architectures": ["Qwen3DSparkModel"],
    "num_target_layers": 2,
    "block_size": 7,
    "target_layer_ids": [0, 1],
    "mask_token_id": 90,
    "num_anchors": 512,
    "markov_rank": 0,
    "enable_confidence_head": False,
    "layer_types": ["full_attention"] * LAYERS,
    "tie_word_embeddings": False,
}
SPARK = {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "speculators_version": "0.3.0",
    "architectures": ["DFlashSpeculator"],
    "transformer_layer_config": LAYER_CONFIG,
    "aux_hidden_state_layer_ids": [0, 2],
    "block_size": 8,
    "mask_token_id": 90,
    "draft_vocab_size": VOCAB,
}
SLIDING = {"layer_types": TYPES, "sliding_window": WINDOW}
LAYOUTS = {
    "z-lab": Layout(16, False, FULL, Z_LAB),
    "z-lab, windows": Layout(16, False, [FULL[0], (WINDOW, True, False), (WINDOW, True, False)], Z_LAB | SLIDING),
    "z-lab, windows both ways": Layout(
        16, False, [FULL[0], (WINDOW, False, False), (WINDOW, False, False)], Z_LAB | SLIDING | {"is_causal": False}
    ),
    "z-lab, block of 7": Layout(
        7, False, FULL, Z_LAB | {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 90, "block_size": 7}}
    ),
    "z-lab, no norms of heads": Layout(16, False, FULL, Z_LAB | {"model_type": "llama"}, norms=False),
    "DeepSpec's DFlash": Layout(7, True, FULL, DEEPSPEC, copies=True),
    "DSpark, vanilla": Layout(7, True, FULL, DEEPSPEC | SPARK | {"markov_head_type": "vanilla"}, markov="vanilla", sure=True, copies=True),
    "DSpark, gated": Layout(7, True, FULL, DEEPSPEC | SPARK | {"markov_head_type": "gated"}, markov="gated", sure=True, copies=True),
    "DSpark, recurrent": Layout(7, True, FULL, DEEPSPEC | SPARK | {"markov_head_type": "rnn"}, markov="rnn", sure=True, copies=True),
    "DSpark, confidence of the state alone": Layout(
        7, True, FULL, DEEPSPEC | SPARK | {"markov_rank": 0, "confidence_head_with_markov": False}, sure=True, copies=True
    ),
    "speculators": Layout(
        8,
        False,
        [FULL[0], (WINDOW, True, True), (WINDOW, True, True)],
        SPECULATORS | {"transformer_layer_config": LAYER_CONFIG | SLIDING, "draft_vocab_size": REDUCED},
        taps=(-1, 1),
        reduced=True,
    ),
    "speculators, DSpark": Layout(
        8,
        True,
        [FULL[0], (WINDOW, False, True), (WINDOW, False, True)],
        SPECULATORS
        | SPARK
        | {
            "speculators_model_type": "dspark",
            "transformer_layer_config": LAYER_CONFIG | SLIDING,
            "sliding_window_non_causal": True,
            "draft_vocab_size": REDUCED,
            "sample_from_anchor": True,
        },
        taps=(-1, 1),
        markov="vanilla",
        sure=True,
        reduced=True,
    ),
    "speculators, DSpark in DFlash's places": Layout(
        8,
        False,
        FULL,
        SPECULATORS | SPARK | {"speculators_model_type": "dspark", "sample_from_anchor": False},
        taps=(-1, 1),
        markov="vanilla",
        sure=True,
    ),
}


@functools.cache
def target() -> TinyModel:
    return host().model  # type: ignore[return-value]


def tensors_of(layout: Layout, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    seeds = iter(range(1000 * seed, 1000 * seed + 1000))
    make = lambda *shape, scale=None: draw(next(seeds), *shape, scale=scale, dtype=dtype)  # noqa: E731
    norm = lambda size: (1 + make(size, scale=0.3).float()).to(dtype)  # noqa: E731
    tensors = {"fc.weight": make(HIDDEN, 2 * HIDDEN), "hidden_norm.weight": norm(HIDDEN), "norm.weight": norm(HIDDEN)}
    for i in range(LAYERS):
        at = f"layers.{i}."
        widths = {"q": HEADS * DIM, "k": KV * DIM, "v": KV * DIM}
        tensors |= {f"{at}self_attn.{part}_proj.weight": make(rows, HIDDEN) for part, rows in widths.items()}
        tensors |= {f"{at}self_attn.o_proj.weight": make(HIDDEN, HEADS * DIM)}
        if layout.norms:
            tensors |= {f"{at}self_attn.{part}_norm.weight": norm(DIM) for part in "qk"}
        tensors |= {f"{at}mlp.{part}_proj.weight": make(INNER, HIDDEN) for part in ("gate", "up")}
        tensors |= {f"{at}mlp.down_proj.weight": make(HIDDEN, INNER)}
        tensors |= {f"{at}{part}_layernorm.weight": norm(HIDDEN) for part in ("input", "post_attention")}
    vocab = REDUCED if layout.reduced else VOCAB
    if layout.copies:
        model = target()
        tensors |= {"embed_tokens.weight": model.table.to(dtype), "lm_head.weight": model.raw_head.to(dtype)}
    if layout.reduced:
        tensors |= {"lm_head.weight": make(REDUCED, HIDDEN), "d2t": torch.arange(REDUCED), "t2d": torch.arange(VOCAB) % 2 == 0}
        tensors["t2d"][2 * REDUCED :] = False
    if layout.markov:
        tensors |= {"markov_head.markov_w1.weight": make(VOCAB, RANK), "markov_head.markov_w2.weight": make(vocab, RANK, scale=1.0)}
    if layout.markov == "gated":
        tensors |= {"markov_head.gate_proj.weight": make(RANK, HIDDEN + RANK), "markov_head.gate_proj.bias": make(RANK)}
    if layout.markov == "rnn":
        tensors |= {"markov_head.joint_proj.weight": make(3 * RANK, HIDDEN + 2 * RANK), "markov_head.joint_proj.bias": make(3 * RANK)}
    if layout.sure:
        width = HIDDEN + (RANK if layout.config.get("confidence_head_with_markov") else 0)
        tensors |= {"confidence_head.proj.weight": make(1, width), "confidence_head.proj.bias": make(1)}
    return tensors


def write_block(folder: Path, layout: Layout, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    tensors = tensors_of(layout, dtype, seed)
    write(folder, tensors, layout.config)
    return tensors


def long_setting(nodes: int = 0, tree: bool = True) -> Setting:
    """A worker whose sequences may be as long as the tests'."""
    around = host()
    around.model.max_tokens = LONGEST
    return Setting(nodes, tree, around)


def plain_config(layout: Layout) -> dict[str, Any]:
    sizes = {"layers": LAYERS, "heads": HEADS, "kv_heads": KV, "dim": DIM, "theta": THETA, "eps": EPS, "mask": 90, "taps": 2}
    return sizes | {"size": layout.size, "sights": layout.sights}


def golden(
    layout: Layout, tensors: dict[str, Tensor], features: Tensor, root: int, chosen: list[int], mutant: str = ""
) -> tuple[list[Tensor], list[float]]:
    """(logits of every place, confidences). `chosen`: what was chosen at each place."""
    model = target()
    hidden = block_hidden(tensors, plain_config(layout), features, root, model.table, mutant)
    hidden = hidden[0 if layout.anchor != (mutant == "anchor") else 1 :][: layout.size - (not layout.anchor)]
    head = tensors["lm_head.weight"] if layout.reduced else model.raw_head
    return spark_levels(tensors, layout.markov, hidden, head, [root, *chosen], mutant)
