"""A head that begins as one that exists: a published one, or an earlier one of ours, that is to learn more text.

What `save` would write is read instead, so whatever can be saved can be gone on from. Sizes and options are the caller's, and must be
those that the head was made with: its tensors are compared by name and shape, and what its config.json says of it with what ours would.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.engine.weights import Checkpoint, open_checkpoint, read_config
from forerun.train.kinds.registry import Draft
from forerun.train.kinds.source import Source

SAID = (
    *("sample_from_anchor", "tokenizer_fingerprint", "vocab_size", "draft_vocab_size", "num_target_layers", "hidden_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rope_theta", "intermediate_size", "num_hidden_layers"),
    *("block_size", "mask_token_id", "sliding_window_non_causal", "markov_head_type", "medusa_num_heads", "medusa_num_layers"),
    "num_nextn_predict_layers",
)
"""what tensors do not show, or show as a shape only"""
FLAGS = ("norm_before_residual", "norm_output")
"""of published EAGLE-3 heads whose layer is another one: false where nothing is said"""
OPTIONS = {
    "block_size": "block",
    "mask_token_id": "mask_token",
    "medusa_num_heads": "heads",
    "num_hidden_layers": "draft_layers",
    "windows": "window",
}
ANEW = "train one anew, without --from"


def go_on(draft: Draft, asked: argparse.Namespace, target: Path, folder: Path) -> None:
    """Each tensor of the draft becomes the one of its name in `folder`; one that is no weight (but of a vocabulary) must be the same there.
    ValueError, with the cure, for a head of another kind, target or options."""
    checkpoint, tensors = open_checkpoint(folder), draft.tensors()
    names = checkpoint.names()
    for name, value in tensors.items():
        shape = list(checkpoint.shape(name)) if name in names else None
        if shape != list(value.shape):
            what = "is not there" if shape is None else f"is {shape}, not {list(value.shape)}"
            raise ValueError(f"--from {folder}: {name} {what}: give the --kind and the options that this head was made with")
    _compare(described(read_config(folder) or {}), described(draft.config()), asked, folder)
    lost = _lost(checkpoint, names - tensors.keys(), Source.open(target), folder)
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        cure = f"give the --kind and the options that this head was made with, or {ANEW}"
        raise ValueError(f"--from {folder}: {', '.join(lost[:3])}{more} would be dropped: {cure}")
    for name, value in tensors.items():
        found = checkpoint.read(name)
        if value.is_floating_point():
            with torch.no_grad():
                value.copy_(found)
        elif not torch.equal(found, value):
            raise ValueError(f"--from {folder}: {name} is of another target or vocabulary")


def described(config: dict[str, Any]) -> dict[str, Any]:
    """What a config.json, of whatever layout, says of what a head is and reads. `target_layer_ids`: the layers behind which it reads, as
    z-lab and DeepSpec count them; speculators and SafeAILab count what enters a layer. `windows`: of its layers, 0 where none has one."""
    layer: dict[str, Any] = config.get("transformer_layer_config") or {}
    nested = (config.get(f"{kind}_config") for kind in ("eagle", "dflash", "dspark"))
    parts = (layer.get("rope_parameters"), layer, config.get("rope_parameters"), config, *nested)
    whole: dict[str, Any] = {name: value for part in parts if part for name, value in part.items()}
    said = {name: whole[name] for name in SAID if whole.get(name) is not None} | {name: bool(whole.get(name)) for name in FLAGS}
    windows = [whole.get("sliding_window") or 0 if kind == "sliding_attention" else 0 for kind in whole.get("layer_types") or []]
    said["windows"] = windows if any(windows) else 0
    entered = whole.get("aux_hidden_state_layer_ids") or whole.get("eagle_aux_hidden_state_layer_ids") or []
    layers = whole.get("target_layer_ids") or [number - 1 for number in entered]
    return said | ({"target_layer_ids": layers} if layers else {})


def _compare(theirs: dict[str, Any], ours: dict[str, Any], asked: argparse.Namespace, folder: Path) -> None:
    """ValueError for what both say, and not alike. What one of them does not say is not known to differ."""
    for name, value in ours.items():
        if name not in theirs or theirs[name] == value:
            continue
        option, given = OPTIONS.get(name, ""), theirs[name]
        if name == "windows" and given and not any(given[1:]):
            given = given[0]
        cure = f"it is of another kind or target than asked for: give its own, or {ANEW}"
        if option in vars(asked) and str(given).isdigit():
            cure = f"give --{option.replace('_', '-')} {given}"
        raise ValueError(f"--from {folder}: its config.json says {name} {theirs[name]}, here it would be {value}: {cure}")


def _lost(checkpoint: Checkpoint, spare: Iterable[str], source: Source, folder: Path) -> list[str]:
    """Of the tensors that the draft does not have those that are not the target's: neither of its own files, where the head lies in them,
    nor a copy of its embedding or output head."""
    if folder.samefile(source.folder):
        return []
    ends = {"embed_tokens.weight": source.embedding, "lm_head.weight": source.head}
    return sorted(name for name in spare if name not in ends or not _same(checkpoint.read(name), ends[name]()))


def _same(found: Tensor, end: Tensor) -> bool:
    """Copies are written in bfloat16, whatever the target is stored in."""
    return torch.equal(found.to(torch.bfloat16), end.to(torch.bfloat16))
