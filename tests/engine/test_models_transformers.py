"""Other architectures through unmodified transformers: the list that is claimed, and the reasons for which a model is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from forerun.backends.base import Backend
from forerun.backends.registry import open_backend
from forerun.engine import testmodel
from forerun.engine.errors import StartError
from forerun.engine.models.load import load_model
from forerun.engine.models.model import Model
from forerun.engine.models.spec import FAMILIES
from forerun.engine.models.transformers import VERIFIED, Adapted, Bridge
from forerun.messages import Start
from tests.engine.paging import Feeder, random_sequences

CLASSES = dict(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
CASES = {arch: CLASSES[arch] for arch in testmodel.ARCHES if CLASSES[arch] not in FAMILIES}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return open_backend("cpu", 1, 1.0)


def load(folder: Path, backend: Backend, **options: Any) -> Model:
    return load_model(Start(model_id=str(folder), **{"dtype": "float32"} | options), backend, lambda *_: None)


def compare(model: Model, reference: Any, backend: Backend) -> None:
    reference.config._attn_implementation = "eager"
    sequences = random_sequences(model.vocab, (45, 33, 7))
    for got, sequence in zip(Feeder(model, backend, sequences).run(), sequences):
        with torch.no_grad():
            want = reference(torch.tensor([sequence])).logits[0]
        assert (got - want).abs().max().item() < 1e-4


@pytest.mark.parametrize("arch", CASES)
def test_logits_equal_transformers(arch: str, tmp_path: Path, backend: Backend) -> None:
    """Within 1e-4 of its own; and bit for bit the same in any company and chunking."""
    reference = testmodel.write_model(arch, 0, tmp_path)
    model = load(tmp_path, backend)
    assert type(reference).__name__ == CASES[arch]
    assert model.facts["model"].endswith(f"through transformers {transformers.__version__}")
    compare(model, reference, backend)
    if backend.caps.batch_invariant:
        sequences = random_sequences(model.vocab, (41, 9))
        for sequence, together in zip(sequences, Feeder(model, backend, sequences, seed=3).run()):
            alone = Feeder(model, backend, [sequence])
            alone.step({0: len(sequence)})
            assert torch.equal(alone.logits[0][0], together)


def test_what_is_claimed_is_what_is_tried() -> None:
    assert set(CASES.values()) == set(VERIFIED)


def test_the_page_lists_what_is_claimed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    own, _, others = page.partition("## Through transformers")
    assert set(re.findall(r"`(\w+For\w+)`", own)) == set(FAMILIES)
    assert set(re.findall(r"`(\w+(?:For|LMHead)\w+)`", others.partition("## Refused")[0])) == set(VERIFIED)


def test_taps_equal_those_of_transformers(tmp_path: Path, backend: Backend) -> None:
    reference = testmodel.write_model("gpt_neox", 0, tmp_path)
    model = load(tmp_path, backend)
    sequences = random_sequences(model.vocab, (21,))
    feeder = Feeder(model, backend, sequences, taps=(1, model.layers))
    feeder.run()
    states: list[torch.Tensor] = []
    reference.base_model.layers[1].register_forward_hook(lambda module, given, out: states.append(out if torch.is_tensor(out) else out[0]))
    with torch.no_grad():
        last = reference.base_model(torch.tensor(sequences)).last_hidden_state
    want = torch.cat([states[0][0], last[0]], dim=1)
    assert (torch.cat(feeder.tapped[0]) - want).abs().max().item() < 1e-4


def test_bfloat16_weights_are_packed(tmp_path: Path, backend: Backend) -> None:
    reference = testmodel.write_model("gpt_neox", 0, tmp_path, dtype="bfloat16").float()
    model, full = load(tmp_path, backend, dtype="bfloat16"), load(tmp_path, backend)
    assert model.pool.dtype == torch.bfloat16 and model.weight_bytes < 0.6 * full.weight_bytes
    sequence = random_sequences(model.vocab, (30,))
    got = Feeder(model, backend, sequence).run()[0]
    with torch.no_grad():
        want = reference(torch.tensor(sequence)).logits[0]
    assert (got - want).abs().mean() < 0.05 * want.abs().mean()


def test_two_models_in_one_process_do_not_share_their_attention(tmp_path: Path, backend: Backend) -> None:
    references = [testmodel.write_model("stablelm", seed, tmp_path / str(seed)) for seed in (0, 1)]
    models = [load(tmp_path / str(seed), backend) for seed in (0, 1)]
    for model, reference in zip(models, references):
        compare(model, reference, backend)


def test_positions_behind_the_last_are_harmless(tmp_path: Path, backend: Backend) -> None:
    """A guess may stand behind the last position: learned positions have no row for it."""
    testmodel.write_model("gpt2", 0, tmp_path, max_position_embeddings=24)
    model = load(tmp_path, backend)
    assert model.max_tokens == 24
    feeder = Feeder(model, backend, random_sequences(model.vocab, (30,)))
    feeder.step({0: 30})
    assert feeder.logits[0][0].shape == (30, model.vocab)


REFUSED = {
    "bloom": ({}, "fails on flat rows"),
    "falcon": ({}, "no attention that can be replaced"),
    "xglm": ({"d_model": 64, "ffn_dim": 96, "num_layers": 3, "attention_heads": 4}, "calls the attention interface 0 times in 3 layers"),
    "falcon_h1": (
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
        "rows influence each other outside attention",
    ),
    "recurrent_gemma": ({}, "calls the attention interface 1 times in 3 layers"),
    "diffllama": ({}, "calls the attention interface 6 times in 3 layers"),
    "doge": ({}, "adds a bias to attention scores"),
    "llama4_text": ({"num_local_experts": 2}, "another kind .chunked_attention"),
    "gpt_neox": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotates by the longest sequence"),
}


@pytest.mark.parametrize("arch", REFUSED)
def test_a_model_that_mixes_rows_otherwise_is_refused(arch: str, tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, reason = REFUSED[arch]
    monkeypatch.setitem(testmodel.ARCHES, arch, changes)
    testmodel.write_model(arch, 0, tmp_path)
    with pytest.raises(StartError, match=reason) as raised:
        load(tmp_path, backend)
    assert "docs/models.md" in raised.value.cure


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_model_without_a_list_of_its_layers_is_refused(layers: int, backend: Backend) -> None:
    text = SimpleNamespace(vocab_size=8, hidden_size=4, num_hidden_layers=2)
    model = torch.nn.Module()
    model.config = SimpleNamespace(get_text_config=lambda: text)  # type: ignore[assignment]
    model.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(layers))
    model.outside = torch.nn.Linear(4, 4)
    with pytest.raises(StartError, match="has no list of 2 layers with products in them"):
        Adapted(model, Bridge(backend.ops), backend, 8, torch.float32)


def test_other_reasons(tmp_path: Path, backend: Backend) -> None:
    testmodel.write_model("gpt_neox", 0, tmp_path)
    with pytest.raises(StartError, match="max_total_tokens 600 is more than the model's 512 positions"):
        load(tmp_path, backend, max_total_tokens=600)
    with pytest.raises(StartError, match="--rope-scaling is not available for GPTNeoXForCausalLM"):
        load(tmp_path, backend, rope_factor=2.0)
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"], "model_type": "new"}')
    with pytest.raises(StartError, match="transformers cannot load"):
        load(tmp_path, backend)
    code = {"AutoConfig": "new.Config", "AutoModelForCausalLM": "new.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NewForCausalLM"], "model_type": "new", "auto_map": code}))
    with pytest.raises(StartError, match="transformers cannot load") as raised:
        load(tmp_path, backend)
    assert "--trust-remote-code" in raised.value.cure
