"""GGUF: every block type against the reference package, whole models against the models they were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from forerun.backends.registry import open_backend
from forerun.engine import testmodel
from forerun.engine.errors import StartError
from forerun.engine.gguf import GGUF, Reader, half_split
from forerun.engine.gguf_blocks import BLOCKS, to_codes
from forerun.engine.models.load import load_model
from forerun.engine.weights import open_checkpoint
from forerun.kernels import quant
from forerun.messages import Start
from tests.engine.paging import Feeder, random_sequences


def writer(path: Path, arch: str = "llama") -> gguf.GGUFWriter:
    return gguf.GGUFWriter(str(path), arch)


def finish(out: gguf.GGUFWriter) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: BLOCKS[kind].name)
def test_blocks_equal_the_reference(kind: int, tmp_path: Path) -> None:
    """Random bits in every field (scales finite), so every nibble, bit pair and packed scale is hit."""
    block = BLOCKS[kind]
    noise = np.random.default_rng(0)
    data = noise.integers(0, 256, (24, 512 // block.weights * block.bytes), dtype=np.uint8)
    rows = data.reshape(-1, block.bytes)
    for start in {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(block.name, (0,)):
        scale = noise.normal(size=len(rows)).astype(np.float16).view(np.uint8).reshape(-1, 2)
        rows[:, start : start + 2] = scale
    out = writer(tmp_path / "x.gguf")
    out.add_tensor("x", data, raw_dtype=gguf.GGMLQuantizationType(kind))
    finish(out)
    got = Reader(tmp_path / "x.gguf").read("x")
    want = torch.from_numpy(dequantize(data, gguf.GGMLQuantizationType(kind)))
    assert got.shape == (24, 512) and torch.equal(got, want.view(24, 512))


def test_fields_of_every_type(tmp_path: Path) -> None:
    out = writer(tmp_path / "x.gguf")
    fields: dict[str, Any] = {
        "u8": (out.add_uint8, 200),
        "i8": (out.add_int8, -5),
        "u16": (out.add_uint16, 60000),
        "i16": (out.add_int16, -300),
        "u32": (out.add_uint32, 4_000_000_000),
        "i32": (out.add_int32, -7),
        "u64": (out.add_uint64, 1 << 60),
        "i64": (out.add_int64, -(1 << 60)),
        "f32": (out.add_float32, 0.5),
        "f64": (out.add_float64, 0.1),
        "bool": (out.add_bool, True),
        "string": (out.add_string, "čaj 🙂"),
        "words": (out.add_array, ["a", "", "ccc"]),
        "numbers": (out.add_array, [1, 2, 3]),
    }
    for name, (add, value) in fields.items():
        add(name, value)
    out.add_tensor("odd", np.arange(3, dtype=np.float32))
    out.add_tensor("f16", np.arange(6, dtype=np.float16).reshape(2, 3))
    finish(out)
    reader = Reader(tmp_path / "x.gguf")
    assert {name: reader.fields[name] for name in fields} == {name: value for name, (_, value) in fields.items()}
    assert reader.read("odd").tolist() == [0, 1, 2] and reader.read("f16").shape == (2, 3)


@pytest.mark.parametrize("keep", [3, 20, 200, -100])
def test_a_file_cut_short_is_named(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    out = writer(path)
    out.add_array("words", ["word"] * 50)
    out.add_tensor("x", np.zeros((64, 64), dtype=np.float32))
    finish(out)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StartError, match="fetch the model again"):
        Reader(path).read("x")


def test_a_block_type_that_is_not_read_names_those_that_are(tmp_path: Path) -> None:
    out = writer(tmp_path / "x.gguf")
    out.add_tensor("x", np.zeros((1, 84), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    finish(out)
    with pytest.raises(StartError, match=r"stored as Q2_K; use a file in F32, F16, BF16, Q4_0"):
        Reader(tmp_path / "x.gguf").read("x")


def test_architectures_that_are_not_read(tmp_path: Path) -> None:
    out = writer(tmp_path / "x.gguf", "mamba")
    finish(out)
    with pytest.raises(StartError, match="architecture mamba; GGUF is read for llama"):
        GGUF(tmp_path / "x.gguf")


def test_parts_and_mixtures_are_refused(tmp_path: Path) -> None:
    for place, (field, value, message) in enumerate(
        [("split.count", 3, "one of several parts.*--merge"), ("llama.expert_count", 8, "use safetensors for others")]
    ):
        out = writer(tmp_path / f"{place}.gguf")
        out.add_uint32(field, value)
        finish(out)
        with pytest.raises(StartError, match=message):
            GGUF(tmp_path / f"{place}.gguf")


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to Q and K."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def test_rows_of_heads_come_back_in_order() -> None:
    rows = torch.arange(24.0).view(24, 1).repeat(1, 3)
    assert torch.equal(half_split(interleaved(rows, 3), 3), rows)


NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


def write_gguf(path: Path, arch: str, model: Any, kind: gguf.GGMLQuantizationType = F32, divisors: torch.Tensor | None = None) -> None:
    """A transformers model as llama.cpp's converter would write it."""
    config, out = model.config, writer(path, arch)
    if divisors is not None:
        out.add_tensor("rope_freqs.weight", divisors.numpy())
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_expert_count(0)
    out.add_rope_freq_base(1e6 if arch == "gemma3" else config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        out.add_key_length(config.head_dim)
    if arch == "gemma3":
        out.add_sliding_window(config.sliding_window)
    names = NAMES | (GEMMA if arch == "gemma3" else {})
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            if not config.tie_word_embeddings:
                out.add_tensor("output.weight", tensor.numpy())
            continue
        stem, _, suffix = name.removeprefix("model.").rpartition(".")
        layer = stem.split(".")[1] if stem.startswith("layers.") else None
        theirs = names[stem.split(".", 2)[2] if layer else stem]
        if arch == "llama" and theirs in ("attn_q", "attn_k"):
            tensor = interleaved(tensor, config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads)
        if arch == "gemma3" and theirs.endswith("norm"):
            tensor = tensor + 1
        full = f"blk.{layer}.{theirs}.{suffix}" if layer else f"{theirs}.{suffix}"
        if tensor.ndim == 2 and kind != F32:
            out.add_tensor(full, quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            out.add_tensor(full, tensor.contiguous().numpy())
    finish(out)


@pytest.mark.parametrize(("arch", "kind"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma3", "gemma3_text")])
def test_a_model_from_gguf_has_the_logits_it_was_written_from(arch: str, kind: str, tmp_path: Path) -> None:
    changes = {"sliding_window": 24, "query_pre_attn_scalar": 32} if arch == "gemma3" else {}
    reference = testmodel.make_model(kind, 0, **changes)
    reference.config._attn_implementation = "eager"
    write_gguf(tmp_path / "model.gguf", arch, reference)
    backend = open_backend("cpu", 1, 1.0)
    sequences = random_sequences(512, (40,))
    with torch.no_grad():
        want = reference(torch.tensor(sequences)).logits[0]
    for place in (tmp_path, tmp_path / "model.gguf"):
        model = load_model(Start(model_id=str(place)), backend, lambda *_: None)
        assert model.dtype == "float32"
        got = Feeder(model, backend, sequences).run()[0]
        assert (got - want).abs().max().item() < 1e-4


def test_quantised_weights_are_near(tmp_path: Path) -> None:
    reference = testmodel.make_model("llama", 0, hidden_size=128, intermediate_size=256)
    write_gguf(tmp_path / "model.gguf", "llama", reference, Q8_0)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config is not None and checkpoint.config["dtype"] == "bfloat16"
    want = reference.state_dict()
    for name in checkpoint.names():
        got = checkpoint.read(name)
        assert got.shape == checkpoint.shape(name) == want[name].shape
        assert (got - want[name]).abs().max() < 0.01 * want[name].abs().max()


def test_llama_3_1_carries_its_frequencies_as_divisors(tmp_path: Path) -> None:
    """llama.cpp writes `rope_freqs.weight` in place of the scaling's parameters."""
    parameters = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = parameters | {"rope_theta": 5e5, "original_max_position_embeddings": 64}
    reference = testmodel.make_model("llama", 0, rope_parameters=scaling)
    inverse = 1.0 / 5e5 ** (torch.arange(0, 16, 2).float() / 16)
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", reference, divisors=inverse / reference.model.rotary_emb.inv_freq)
    backend = open_backend("cpu", 1, 1.0)
    model = load_model(Start(model_id=str(path)), backend, lambda *_: None)
    sequences = random_sequences(512, (40,))
    with torch.no_grad():
        want = reference(torch.tensor(sequences)).logits[0]
    assert (Feeder(model, backend, sequences).run()[0] - want).abs().max().item() < 1e-4


@pytest.mark.parametrize("kind", BLOCKS)
def test_codes_are_the_numbers_of_their_blocks(kind: int, tmp_path: Path) -> None:
    """Exactly, where the type has a format of its own; scales of Q4_K within 2⁻¹¹, other types within a step of 8 bits."""
    block = BLOCKS[kind]
    noise = np.random.default_rng(kind)
    numbers = noise.standard_normal((24, 512)).astype(np.float32)
    blocks = noise.integers(0, 256, (24 * 512 // block.weights, block.bytes), dtype=np.uint8)
    if block.name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        blocks = quantize(numbers, gguf.GGMLQuantizationType(kind)).reshape(-1, block.bytes)
    else:  # the package reads these and does not write them: any bits, with scales that are numbers
        at = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[block.name]
        for start in at:
            blocks[:, start : start + 2] = noise.uniform(1e-4, 1e-3, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    raw = torch.from_numpy(blocks.copy())
    want, codes = block.expand(raw).view(24, 512), to_codes(block, raw, (24, 512))
    away = (quant.expand(codes) - want).abs().view(24, -1, 32).amax(2)
    peak = want.abs().view(24, -1, 32).amax(2)
    limit = {"Q8_0": 0.0, "Q4_0": 0.0, "Q4_1": 0.0, "Q4_K": 3e-3}.get(block.name, 1 / 250)
    assert codes.format == {"Q4_0": "int4-symmetric", "Q4_1": "int4", "Q4_K": "int4"}.get(block.name, "int8-groups")
    assert (away <= limit * (peak if limit != 3e-3 else peak.amax(1, keepdim=True)) + 1e-6 * (limit > 0)).all()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_a_quantised_file_is_served_as_it_is(kind: str, tmp_path: Path) -> None:
    """As the same file de-quantised, in a fraction of the memory; --dtype de-quantises, --quantize int4 makes 8 bits 4."""
    reference = testmodel.make_model("llama", 0, hidden_size=128, intermediate_size=256)
    write_gguf(tmp_path / "model.gguf", "llama", reference, gguf.GGMLQuantizationType[kind])
    backend = open_backend("cpu", 1, 1.0)

    def load(**options: str) -> Any:
        return load_model(Start(model_id=str(tmp_path), **options), backend, lambda *_: None)

    own, full, four = load(), load(dtype="float32"), load(quantize="int4")
    format = {"Q4_0": "int4-symmetric", "Q4_1": "int4"}.get(kind, "int8-groups")
    assert own.facts["weights"] == f"bf16, {format}"  # the head of this file is stored as numbers
    assert (full.facts["weights"], four.facts["weights"][:4]) == ("f32", "int4")
    assert four.weight_bytes <= own.weight_bytes < 0.6 * full.weight_bytes
    sequences = random_sequences(512, (40,))
    want, got = (Feeder(model, backend, sequences).run()[0] for model in (full, own))
    assert (got - want).square().mean() < 5e-3 * want.square().mean()
