"""GPTQ and AWQ checkpoints: packed here by their own rules, read back as the numbers they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.backends.base import Backend
from forerun.backends.registry import open_backend
from forerun.engine import testmodel
from forerun.engine.errors import StartError
from forerun.engine.models.load import load_model
from forerun.engine.weights import open_checkpoint
from forerun.messages import Start

from .paging import Feeder, random_sequences

AWQ_PACKING = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ: the i-th four bits of a word hold the column of this number."""


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
    for got, expected in zip(Feeder(model, backend, sequences).run(), want):
        assert (got - expected).abs().max() < (2e-4 if symmetric else 6e-3) * expected.abs().max()
    assert load(packed, backend, quantize=method).facts == model.facts
    with pytest.raises(StartError, match="but the checkpoint is quantised with"):
        load(packed, backend, quantize="awq" if method == "gptq" else "gptq")


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
    load(packed, backend)  # the order is what counts, not the word
    tensors = load_file(packed / "model.safetensors")
    name = next(name for name in tensors if name.endswith("g_idx"))
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(StartError, match="desc_act=False"):
        load(packed, backend)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("gptq", {"bits": 8}, "weights of 8 bits"),
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


def test_a_checkpoint_without_codes_has_none(tmp_path: Path) -> None:
    testmodel.write_model("llama", 0, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert all(checkpoint.codes(name) is None for name in checkpoint.names())
