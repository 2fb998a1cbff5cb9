"""GGUF files: reader, and translation to the Hugging Face layout.

    magic "GGUF" · u32 version · u64 tensors · u64 entries
    entries:  string key · u32 type · value                      (string = u64 length, bytes; array = u32 type, u64 count, values)
    tensors:  string name · u32 dimensions · u64 sizes (innermost first) · u32 type · u64 offset from the start of the data
    data:     aligned to `general.alignment` (32)

Follows the format's description in the ggml repository (docs/gguf.md). Does not know what a tensor is for, beyond its name, and leaves
quantised tensors to `gguf_blocks.py`.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.engine.errors import StartError
from forerun.engine.gguf_blocks import BLOCKS, OTHER, PLAIN, to_codes
from forerun.engine.weights import MappedFile
from forerun.kernels.quant import Codes

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies. `shape` outermost first."""

    shape: tuple[int, ...]
    type: int
    offset: int


class Cursor:
    """Reads the head of a file from front to back."""

    def __init__(self, file: MappedFile) -> None:
        self.memory = file.memory
        self.path = file.path
        self.at = 0

    def scalar(self, form: str) -> Any:
        value = struct.unpack_from(form, self.memory, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        self.at += length
        return self.memory[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            of, count = self.scalar("<I"), self.scalar("<Q")
            if of in SCALARS:
                form = f"<{count}{SCALARS[of][1]}"
                values = list(struct.unpack_from(form, self.memory, self.at))
                self.at += struct.calcsize(form)
                return values
            return [self.value(of) for _ in range(count)]
        if kind not in SCALARS:
            raise StartError(f"{self.path} has an entry of unknown type {kind}", "convert the model again with a current converter")
        return self.scalar(SCALARS[kind])


class Reader:
    """The file as it is: `fields` (its entries) and tensors by their own names."""

    def __init__(self, path: Path) -> None:
        self.file = MappedFile(path)
        cursor = Cursor(self.file)
        if self.file.memory[:4] != b"GGUF":
            raise StartError(f"{path} is not a GGUF file", "fetch the model again")
        try:
            self.fields, self.entries, self.start = self.head(cursor)
        except (struct.error, MemoryError) as error:
            raise StartError(f"{path} is cut short or broken", "fetch the model again") from error

    def head(self, cursor: Cursor) -> tuple[dict[str, Any], dict[str, Entry], int]:
        cursor.at = 4
        version, tensors, count = cursor.scalar("<I"), cursor.scalar("<Q"), cursor.scalar("<Q")
        if version not in (2, 3):
            raise StartError(f"{cursor.path} is GGUF version {version}", "convert it to version 3")
        fields: dict[str, Any] = {}
        for _ in range(count):
            key = cursor.string()
            fields[key] = cursor.value(cursor.scalar("<I"))
        entries: dict[str, Entry] = {}
        for _ in range(tensors):
            name = cursor.string()
            sizes = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
            entries[name] = Entry(tuple(reversed(sizes)), cursor.scalar("<I"), cursor.scalar("<Q"))
        alignment = fields.get("general.alignment", 32)
        return fields, entries, -(-cursor.at // alignment) * alignment

    def read(self, name: str) -> Tensor:
        """The tensor in its own type, or de-quantised to float32."""
        entry = self.entries[name]
        if entry.type in PLAIN:
            return self.file.view(PLAIN[entry.type], entry.shape, self.start + entry.offset)
        blocks = self.blocks(name)
        return BLOCKS[entry.type].expand(blocks).view(entry.shape)

    def blocks(self, name: str) -> Tensor:
        """A quantised tensor as it is: uint8 [blocks, bytes of a block]."""
        entry = self.entries[name]
        block = BLOCKS.get(entry.type)
        if block is None:
            known = ", ".join(block.name for block in BLOCKS.values())
            raise StartError(
                f"{self.file.path}: {name} is stored as {OTHER.get(entry.type, f'type {entry.type}')}",
                f"use a file in F32, F16, BF16, {known}",
            )
        count = math.prod(entry.shape) // block.weights
        return self.file.view(torch.uint8, (count, block.bytes), self.start + entry.offset)


NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NAMES = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """How a GGUF architecture differs from the Hugging Face layout. `interleaved`: rows of Q and K were reordered from half-split to
    interleaved pairs. `norm_offset`: added to norm weights by the converter. `names`: more tensors of a layer."""

    family: str
    interleaved: bool = False
    norm_offset: float = 0.0
    names: dict[str, str] = dataclasses.field(default_factory=lambda: {"ffn_norm.weight": "post_attention_layernorm.weight"})


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "gemma3": Architecture("Gemma3ForCausalLM", norm_offset=1.0, names=GEMMA_NAMES),
}


class GGUF:
    """A GGUF file as a `Checkpoint`: Hugging Face names and row order, `config` made from its entries."""

    def __init__(self, path: Path) -> None:
        self.reader = Reader(path)
        self.kind = self.reader.fields.get("general.architecture", "")
        if self.reader.fields.get("split.count", 1) > 1:
            raise StartError(f"{path} is one of several parts of a model", "join them with `llama-gguf-split --merge`, and give the result")
        if self.kind not in ARCHITECTURES or self.field("expert_count", 0):
            raise StartError(
                f"{path} holds the architecture {self.kind}", f"GGUF is read for {', '.join(ARCHITECTURES)}; use safetensors for others"
            )
        self.architecture = ARCHITECTURES[self.kind]
        self.own = {theirs: ours for ours in self.reader.entries if (theirs := self.translate(ours))}
        self.config: dict[str, Any] = self.make_config()

    def translate(self, name: str) -> str | None:
        whole = {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight",
        }
        if name in whole or not name.startswith("blk."):
            return whole.get(name)
        _, layer, rest = name.split(".", 2)
        part, _, kind = rest.rpartition(".")
        names = NAMES | self.architecture.names
        theirs = names.get(rest) or (f"{names[part]}.{kind}" if part in names else None)
        if theirs is None:
            raise StartError(f"{self.reader.file.path} has a tensor {name} that no {self.kind} model has", "use the safetensors checkpoint")
        return f"model.layers.{layer}.{theirs}"

    def field(self, name: str, default: Any = None) -> Any:
        return self.reader.fields.get(f"{self.kind}.{name}", default)

    def make_config(self) -> dict[str, Any]:
        heads, hidden = self.field("attention.head_count"), self.field("embedding_length")
        config = {
            "architectures": [self.architecture.family],
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_size": hidden,
            "intermediate_size": self.field("feed_forward_length"),
            "num_hidden_layers": self.field("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.field("attention.head_count_kv", heads),
            "head_dim": self.field("attention.key_length", hidden // heads),
            "max_position_embeddings": self.field("context_length"),
            "rms_norm_eps": float(f"{self.field('attention.layer_norm_rms_epsilon', 1e-6):.6g}"),
            "rope_theta": self.field("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in self.reader.entries,
            "dtype": self.stored_type(),
        }
        if window := self.field("attention.sliding_window"):
            config["sliding_window"] = window
        if self.kind == "gemma3":  # not in the file; the 27B model, known by its 62 layers, divides by the width of the stream per head
            config["query_pre_attn_scalar"] = hidden // heads if config["num_hidden_layers"] == 62 else config["head_dim"]
        if scaling := self.rope_scaling():
            config["rope_scaling"] = scaling
        return config

    def stored_type(self) -> str:
        plain = PLAIN.get(self.reader.entries["blk.0.attn_q.weight"].type, torch.bfloat16)
        return str(plain).removeprefix("torch.")

    def rope_scaling(self) -> dict[str, Any] | None:
        kind, factor = self.field("rope.scaling.type", "none"), self.field("rope.scaling.factor")
        original = self.field("rope.scaling.original_context_length", self.field("context_length"))
        if "rope_freqs.weight" in self.reader.entries:
            # Llama 3.1: the file holds one divisor for each frequency instead of the parameters they came from.
            divisors = self.reader.read("rope_freqs.weight").tolist()
            return {
                "rope_type": "longrope",
                "short_factor": divisors,
                "long_factor": divisors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": original,
            }
        if kind == "none" or factor is None:
            return None
        return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}

    def names(self) -> set[str]:
        return set(self.own)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.reader.entries[self.own[name]].shape

    def read(self, name: str) -> Tensor:
        tensor = self.reader.read(self.own[name])
        if name.endswith("norm.weight"):
            return tensor - self.architecture.norm_offset
        if self.architecture.interleaved and ".q_proj." in name:
            return half_split(tensor, self.config["num_attention_heads"])
        if self.architecture.interleaved and ".k_proj." in name:
            return half_split(tensor, self.config["num_key_value_heads"])
        return tensor

    def codes(self, name: str) -> Codes | None:
        entry = self.reader.entries[self.own[name]]
        if entry.type in PLAIN:
            return None
        codes = to_codes(BLOCKS[entry.type], self.reader.blocks(self.own[name]), (entry.shape[0], entry.shape[1]))
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if self.architecture.interleaved and f".{part}." in name:
                return codes.rows(half_split(torch.arange(entry.shape[0]), self.config[heads]))
        return codes

    def release(self) -> None:
        self.reader.file.release()


def half_split(rows: Tensor, heads: int) -> Tensor:
    """Rows of every head from pairs (0, 0'), (1, 1'), … back to 0, 1, …, 0', 1', …: what rotation by halves expects."""
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
