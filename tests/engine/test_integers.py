"""GPTQ and AWQ checkpoints: any bits against their definition, element by element; models packed here by their own rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.backends.base import Backend
from forerun.backends.registry import open_backend
from forerun.engine import testmodel
from forerun.engine.errors import StartError
from forerun.engine.integers import Integers, read_scheme
from forerun.engine.models.load import load_model
from forerun.engine.weights import open_checkpoint
from forerun.kernels import quant
from forerun.kernels.quant import Codes
from forerun.messages import Start

from .paging import Feeder, random_sequences

AWQ_PACKING = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ: the i-th four bits of a word hold the column of this number."""


class Words:
    """A checkpoint of one quantised matrix `w`."""

    config = None

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {f"w.{name}": tensor for name, tensor in tensors.items()}

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def codes(self, name: str) -> Codes | None:
        return None

    def release(self) -> None:
        return None


def bits_of(word: int, place: int, bits: int) -> int:
    return (word & 0xFFFFFFFF) >> (bits * place) & ((1 << bits) - 1)


def meaning(tensors: dict[str, Tensor], method: str, bits: int, group: int, added: int) -> Tensor:
    """The matrix [N, K] that the words stand for, as AutoGPTQ's and AutoAWQ's kernels compute it for one element after the other."""
    each = 32 // bits
    words, zeros, scales = (tensors[name].tolist() for name in ("qweight", "qzeros", "scales"))
    columns, rows = (len(words) * each, len(words[0])) if method == "gptq" else (len(words), len(words[0]) * 8)
    order = tensors["g_idx"].tolist() if "g_idx" in tensors else [k // group for k in range(columns)]
    unmixed = [AWQ_PACKING.index(column) for column in range(8)]
    out = torch.empty(rows, columns)
    for n in range(rows):
        for k in range(columns):
            g = order[k]
            if method == "gptq":
                code = bits_of(words[k // each][n], k % each, bits)
                zero = (bits_of(zeros[g][n // each], n % each, bits) + added) % (1 << bits)
            else:
                code, zero = bits_of(words[k][n // 8], unmixed[n % 8], 4), bits_of(zeros[g][n // 8], unmixed[n % 8], 4)
            out[n, k] = scales[g][n] * (code - zero)
    return out


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**31),
    form=st.sampled_from(["gptq", "gptq_v2", "gptq 8 bits", "awq"]),
    groups=st.integers(1, 3),
    group=st.sampled_from([32, 64, -1]),
    symmetric=st.booleans(),
    ordered=st.booleans(),
    kind=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_any_words_are_what_their_format_says(
    seed: int, form: str, groups: int, group: int, symmetric: bool, ordered: bool, kind: torch.dtype
) -> None:
    """Random bits in every word: codes, zeros that wrap around, scales of any size and type, groups in any order."""
    generator = torch.Generator().manual_seed(seed)
    method, bits = form[:4].strip() if form[0] == "g" else "awq", 8 if form.endswith("8 bits") else 4
    groups = 1 if group < 0 else groups
    rows, columns, each = 16, groups * max(group, 32), 32 // bits
    draw = lambda *shape: torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)  # noqa: E731
    added = int(form in ("gptq", "gptq 8 bits"))
    tensors = {
        "qweight": draw(columns // each, rows) if method == "gptq" else draw(columns, rows // 8),
        "qzeros": draw(groups, rows // each),
        "scales": (torch.randn(groups, rows, generator=generator) * 10 ** torch.randn(1, rows, generator=generator)).to(kind),
    }
    if symmetric:
        middle = (1 << (bits - 1)) - added
        word = sum(middle << (bits * place) for place in range(each))
        tensors["qzeros"] = torch.full((groups, rows // each), word - (word >> 31 << 32), dtype=torch.int64).to(torch.int32)
    if method == "gptq" and not ordered:
        tensors["g_idx"] = (torch.arange(columns) // max(group, 32))[torch.randperm(columns, generator=generator)].int()
    asked = {"quant_method": method, "bits": bits, "group_size": group, "desc_act": not ordered}
    scheme = read_scheme(asked | ({"checkpoint_format": form} if form == "gptq_v2" else {}))
    want = meaning(tensors, method, bits, max(group, 32) if group > 0 else columns, added)
    opened = Integers(Words(tensors), scheme, remake=True)
    assert opened.names() == {"w.weight"} and opened.shape("w.weight") == (rows, columns)
    torch.testing.assert_close(opened.read("w.weight"), want, rtol=1e-6, atol=0)
    codes = opened.codes("w.weight")
    if method == "gptq" and not ordered and groups > 1:
        assert codes is None
        with pytest.raises(StartError, match=r"desc_act.*--quantize int8"):
            Integers(Words(tensors), scheme).codes("w.weight")
        return
    assert codes is not None
    exact = symmetric and kind == torch.float16
    assert codes.format == ("int8-groups" if bits == 8 else "int4-symmetric" if symmetric else "int4")
    peak = want.view(rows, -1, 32).abs().amax(2).repeat_interleave(32, 1)
    room = 1e-6 if exact else 1 / 250 if bits == 8 and not symmetric else 2**-10
    span = tensors["scales"].float().abs().amax(0).unsqueeze(1) * 15  # of minima, which are rounded beside the row's largest
    assert ((quant.expand(codes) - want).abs() <= room * torch.maximum(peak, span * (bits == 4)) + 1e-6 * span).all()


def into_words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[a, 8·b] of 0 … 15 → int32 [a, b]."""
    groups = values.long().view(values.shape[0], -1, 8)
    words = sum(groups[:, :, column] << (4 * place) for place, column in enumerate(order))
    return (words & 0xFFFFFFFF).sub(2**32 * (words >> 31 & 1)).to(torch.int32)


def quantised(matrix: Tensor, method: str, group: int, symmetric: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of one layer, and the numbers they stand for."""
    rows, columns = matrix.shape
    parts = matrix.view(rows, -1, group)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    if symmetric:
        scales, zeros = (torch.maximum(-low, high) / 7.5).half(), torch.full(low.shape, 8)
    else:
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(1, 15).int()
    codes = ((parts / scales.float().unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, 15).int()
    numbers = ((codes - zeros.unsqueeze(2)) * scales.float().unsqueeze(2)).view(rows, columns)
    flat = codes.view(rows, columns)
    if method == "gptq":
        made = {"qweight": into_words(flat).T, "qzeros": into_words((zeros - 1).T), "g_idx": (torch.arange(columns) // group).int()}
    else:
        made = {"qweight": into_words(flat.T, AWQ_PACKING), "qzeros": into_words(zeros.T, AWQ_PACKING)}
    return {name: tensor.contiguous() for name, tensor in (made | {"scales": scales.T}).items()}, numbers


def write(folder: Path, method: str, group: int = 32, symmetric: bool = False, **settings: Any) -> Path:
    """A tiny Llama in `folder / plain` with the numbers, in `folder / packed` with the integers; returns the latter."""
    plain, packed = folder / "plain", folder / "packed"
    testmodel.write_model("llama", 0, plain, hidden_size=128, intermediate_size=256)
    packed.mkdir()
    tensors = load_file(plain / "model.safetensors")
    integers: dict[str, Tensor] = {}
    for name in list(tensors):
        if name.endswith("_proj.weight"):
            made, tensors[name] = quantised(tensors[name].float(), method, group, symmetric)
            integers |= {name.replace("weight", part): tensor for part, tensor in made.items()}
        else:
            integers[name] = tensors[name]
    save_file(tensors, plain / "model.safetensors")
    save_file(integers, packed / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": group} | settings
    (packed / "config.json").write_text(json.dumps(config))
    return packed


@pytest.fixture(scope="module")
def backend() -> Backend:
    return open_backend("cpu", 1, 1.0)


def load(folder: Path, backend: Backend, **options: Any) -> Any:
    return load_model(Start(model_id=str(folder), **options), backend, lambda *_: None)


@pytest.mark.parametrize(
    ("method", "group", "symmetric"), [("gptq", 32, False), ("gptq", 64, True), ("awq", 128, False), ("awq", 64, True)]
)
def test_integers_are_the_numbers_they_stand_for(method: str, group: int, symmetric: bool, tmp_path: Path, backend: Backend) -> None:
    packed = write(tmp_path, method, group, symmetric)
    sequences = random_sequences(512)
    want = Feeder(load(tmp_path / "plain", backend), backend, sequences).run()
    model = load(packed, backend)
    assert model.facts["weights"] == ("f32, int4-symmetric" if symmetric else "f32, int4")
    for got, expected in zip(Feeder(model, backend, sequences).run(), want):  # activations have 16 bits, a step for every span
        assert (got - expected).abs().max() < (4e-4 if symmetric else 6e-3) * expected.abs().max()
    assert load(packed, backend, quantize=method).facts == load(packed, backend, quantize="gptq").facts == model.facts
    if method == "gptq":
        with pytest.raises(StartError, match="but the checkpoint is quantised with gptq"):
            load(packed, backend, quantize="awq")
    half = load(packed, backend, dtype="bfloat16")  # of all that is no integer
    assert half.facts["weights"] == model.facts["weights"].replace("f32", "bf16") and half.weight_bytes < model.weight_bytes


def test_the_second_version_of_gptq_holds_zeros_as_they_are(tmp_path: Path, backend: Backend) -> None:
    first = load(write(tmp_path / "a", "gptq"), backend)
    packed = write(tmp_path / "b", "gptq", checkpoint_format="gptq_v2")
    tensors = load_file(packed / "model.safetensors")
    for name in tensors:
        if name.endswith("qzeros"):
            tensors[name] += 0x11111111
    save_file(tensors, packed / "model.safetensors")
    sequence = random_sequences(512, (20,))
    one, two = (Feeder(model, backend, sequence).run()[0] for model in (first, load(packed, backend)))
    assert torch.equal(one, two)


def test_act_order(tmp_path: Path, backend: Backend) -> None:
    packed = write(tmp_path, "gptq", desc_act=True)
    sequence = random_sequences(512, (20,))
    want = Feeder(load(packed, backend), backend, sequence).run()[0]  # the order is what counts, not the word
    tensors = load_file(packed / "model.safetensors")
    for name in [name for name in tensors if name.endswith("g_idx")]:  # the same matrices: groups numbered from the end
        tensors[name] = tensors[name].max() - tensors[name]
        for part in ("scales", "qzeros"):
            tensors[name.replace("g_idx", part)] = tensors[name.replace("g_idx", part)].flip(0).contiguous()
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(StartError, match="desc_act=False, or --quantize int8"):
        load(packed, backend)
    again = load(packed, backend, quantize="int8")
    assert again.facts["weights"] == "int8"
    got = Feeder(again, backend, sequence).run()[0]
    assert (got - want).square().mean() < 5e-3 * want.square().mean()


def test_settings_beside_the_configuration(tmp_path: Path, backend: Backend) -> None:
    """AutoGPTQ and AutoAWQ before transformers knew them, and TGI's own `quantize`, keep them elsewhere."""
    packed = write(tmp_path, "gptq")
    sequence = random_sequences(512, (20,))
    want = Feeder(load(packed, backend), backend, sequence).run()[0]
    config = json.loads((packed / "config.json").read_text())
    kept = config.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartError, match=r"packed integers.*add the model's quantize_config\.json"):
        load(packed, backend)
    (packed / "quantize_config.json").write_text(json.dumps({key: kept[key] for key in ("bits", "group_size")} | {"desc_act": False}))
    assert torch.equal(Feeder(load(packed, backend, quantize="gptq"), backend, sequence).run()[0], want)
    (packed / "quantize_config.json").unlink()
    notes = {"gptq_bits": torch.tensor([4]), "gptq_groupsize": torch.tensor([32]), "gptq_sym": torch.tensor([False])}
    save_file(load_file(packed / "model.safetensors") | notes, packed / "model.safetensors")
    assert torch.equal(Feeder(load(packed, backend), backend, sequence).run()[0], want)
    awq = write(tmp_path / "awq", "awq")
    want = Feeder(load(awq, backend), backend, sequence).run()[0]
    config = json.loads((awq / "config.json").read_text())
    del config["quantization_config"]
    (awq / "config.json").write_text(json.dumps(config))
    (awq / "quant_config.json").write_text(json.dumps({"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}))
    assert torch.equal(Feeder(load(awq, backend), backend, sequence).run()[0], want)


def test_tensors_that_are_missing_or_do_not_fit(tmp_path: Path, backend: Backend) -> None:
    packed = write(tmp_path, "gptq")
    whole = load_file(packed / "model.safetensors")
    for part, change, message in (
        ("qzeros", None, r"lacks .*q_proj\.qzeros"),
        ("g_idx", lambda order: order[:-1].clone(), "g_idx does not fit"),
        ("g_idx", lambda order: order + 1, "g_idx does not fit"),
    ):
        name = f"model.layers.0.self_attn.q_proj.{part}"
        changed = {key: tensor for key, tensor in whole.items() if key != name}
        save_file(changed | ({name: change(whole[name])} if change else {}), packed / "model.safetensors")
        with pytest.raises(StartError, match=message):
            load(packed, backend)


def test_experts_that_are_quantised_in_several_ways(tmp_path: Path, backend: Backend) -> None:
    plain = tmp_path / "plain"
    testmodel.write_model("mixtral", 0, plain, hidden_size=64, intermediate_size=64)
    tensors = load_file(plain / "model.safetensors")
    names = [name for name in tensors if "experts" in name and name.endswith("weight") and tensors[name].ndim == 2]
    if not names:
        pytest.skip("experts are stacked here")
    for place, name in enumerate(sorted(names)):
        made, _ = quantised(tensors.pop(name).float(), "gptq", 32, symmetric=place == 0)
        tensors |= {name.replace("weight", part): tensor for part, tensor in made.items()}
    save_file(tensors, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}))
    with pytest.raises(StartError, match=r"experts of .* are quantised in several ways"):
        load(plain, backend)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("gptq", {"bits": 3}, "GPTQ weights of 3 bits; 4 are read, and 8 of GPTQ"),
        ("gptq", {"bits": 8}, "4 scales for 64 inputs"),  # 4-bit words behind settings that say 8
        ("awq", {"bits": 8}, "AWQ weights of 8 bits"),
        ("gptq", {"dynamic": {"+:.*down_proj.*": {"bits": 8}}}, "other bits or groups for some modules"),
        ("awq", {"version": "gemv_fast"}, "laid out for gemv_fast"),
        ("gptq", {"checkpoint_format": "marlin"}, "laid out for marlin"),
        ("awq", {"version": "gemv"}, "laid out for gemv"),
        ("gptq", {"group_size": 48}, "groups of 48"),
        ("gptq", {"quant_method": "fp8"}, r"quantised \(fp8\).*--quantize int4"),
        ("gptq", {"group_size": 64}, "4 scales for 128 inputs in groups of 64"),
    ],
)
def test_what_is_not_read_is_said(method: str, settings: dict[str, Any], message: str, tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(StartError, match=message):
        load(write(tmp_path, method, **settings), backend)


@pytest.mark.parametrize("quantize", ["int8", "int4", "eetq"])
def test_a_plain_checkpoint_quantised_at_load(quantize: str, tmp_path: Path, backend: Backend) -> None:
    """Near to the model in float32, much smaller, and the same bit for bit in any company and chunking."""
    testmodel.write_model("llama", 0, tmp_path, hidden_size=128, intermediate_size=256)
    plain, model = load(tmp_path, backend), load(tmp_path, backend, quantize=quantize)
    assert model.facts["weights"] == ("int4, int8" if quantize == "int4" else "int8")
    assert model.weight_bytes < 0.5 * plain.weight_bytes
    sequences = random_sequences(512)
    alone = [Feeder(model, backend, [sequence]).run(64)[0] for sequence in sequences]
    for seed in range(3):
        for one, other in zip(Feeder(model, backend, sequences, seed=seed).run(), alone):
            assert torch.equal(one, other)
    for one, other in zip(Feeder(plain, backend, sequences).run(), alone):
        assert (one - other).square().mean() < (0.3 if quantize == "int4" else 5e-3) * one.square().mean()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_mixture_quantised_at_load(quantize: str, tmp_path: Path, backend: Backend) -> None:
    """The router keeps the model's type."""
    testmodel.write_model("mixtral", 0, tmp_path)
    model = load(tmp_path, backend, quantize=quantize)
    assert model.facts["weights"] == ("f32, int4, int8" if quantize == "int4" else "f32, int8")
    sequences = random_sequences(512, (20, 9))
    alone = [Feeder(model, backend, [sequence]).run(64)[0] for sequence in sequences]
    for one, other in zip(Feeder(model, backend, sequences, seed=1).run(), alone):
        assert torch.equal(one, other)


def test_an_architecture_of_transformers_is_read_unquantised(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["GPT2LMHeadModel"], "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(StartError, match=r"quantised \(gptq\).*use the unquantised one"):
        load(tmp_path, backend)


def test_a_checkpoint_without_codes_has_none(tmp_path: Path) -> None:
    testmodel.write_model("llama", 0, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert all(checkpoint.codes(name) is None for name in checkpoint.names())
