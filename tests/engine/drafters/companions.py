"""Draft models for the tiny target of the engine tests: in memory, and as folders with tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from forerun.backends.registry import open_backend
from forerun.engine.drafters.model import Companion
from forerun.engine.drafters.registry import Host, Setting
from forerun.engine.drafters.vocabulary import Vocabulary
from forerun.messages import Start
from tests.engine.tiny import LONGEST, ROWS, VOCAB, TinyModel

WIDTH, LAYERS = 16, 2


def identity(size: int = VOCAB) -> Vocabulary:
    return Vocabulary(np.arange(size), np.arange(size), True)


def host(folder: Path | None = None) -> Host:
    backend = open_backend("cpu", 1)
    return Host(Start(str(folder), max_rows=ROWS), backend, TinyModel(backend), lambda *progress: None)


def companion(
    seed: int = 0, most: int = 8, tree: bool = False, vocabulary: Vocabulary | None = None, dtype: torch.dtype = torch.float32
) -> Companion:
    """A draft model that is the target itself with seed 0, and a stranger otherwise."""
    around = host()
    return Companion(TinyModel(around.backend, seed, dtype), vocabulary or identity(), around, most, tree)


def word(id: int) -> str:
    return f"w{id}"


def write_tokenizer(folder: Path, words: list[str], unknown: str | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {text: id for id, text in enumerate(words)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": unknown}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": [], "pre_tokenizer": None, "decoder": None}))


def write_target(folder: Path) -> Path:
    """As much of the tiny target's folder as a draft model looks at."""
    write_tokenizer(folder, [word(id) for id in range(VOCAB)])
    return folder


def write_draft(folder: Path, words: list[str], unknown: str | None = None, seed: int = 3) -> Path:
    """A random Llama of two layers with these tokens, as its trainer would leave it."""
    write_tokenizer(folder, words, unknown)
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator) * shape[-1] ** -0.5  # noqa: E731
    tensors = {"model.embed_tokens.weight": draw(len(words), WIDTH) * WIDTH**0.5, "model.norm.weight": torch.ones(WIDTH)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}self_attn.{name}_proj.weight": draw(WIDTH, WIDTH) for name in "qkvo"}
        tensors |= {f"{at}mlp.{name}_proj.weight": draw(32, WIDTH) for name in ("gate", "up")}
        tensors |= {f"{at}mlp.down_proj.weight": draw(WIDTH, 32)}
        tensors |= {f"{at}{name}_layernorm.weight": torch.ones(WIDTH) for name in ("input", "post_attention")}
    tensors["lm_head.weight"] = draw(len(words), WIDTH)
    return _write(folder, tensors, vocab_size=len(words), hidden_size=WIDTH, intermediate_size=32, num_attention_heads=1)


def _write(folder: Path, tensors: dict[str, torch.Tensor], **sizes: int) -> Path:
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 1,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config | sizes))
    return folder


def write_tiny(folder: Path, seed: int = 0) -> Path:
    """The tiny model as a Llama folder: with seed 0 the target itself."""
    model = TinyModel(open_backend("cpu", 1), seed)
    tensors = {"model.embed_tokens.weight": model.table, "model.norm.weight": torch.ones(32), "lm_head.weight": model.raw_head}
    for layer, (qkv, out, gate_up, down) in enumerate(model.raw):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}self_attn.{name}_proj.weight": part.clone() for name, part in zip("qkv", qkv.split((32, 16, 16)))}
        tensors |= {f"{at}mlp.{name}_proj.weight": part.clone() for name, part in zip(("gate", "up"), gate_up.split(48))}
        tensors |= {f"{at}self_attn.o_proj.weight": out, f"{at}mlp.down_proj.weight": down}
        tensors |= {f"{at}{name}_layernorm.weight": torch.ones(32) for name in ("input", "post_attention")}
    write_tokenizer(folder, [word(id) for id in range(VOCAB)])
    return _write(folder, tensors, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=2)


def setting(target: Path, nodes: int = 8) -> Setting:
    return Setting(nodes, True, host(target))
