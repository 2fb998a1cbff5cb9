"""Every family of the one decoder against transformers' eager attention, on the same weights: paged, chunked, and in company."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.backends.base import Backend
from forerun.backends.registry import open_backend
from forerun.engine import testmodel
from forerun.engine.batch import Batch
from forerun.engine.errors import StartError
from forerun.engine.models.assemble import assemble
from forerun.engine.models.load import load_model
from forerun.engine.models.model import Model, Output
from forerun.engine.models.quantised import Formats
from forerun.engine.models.spec import FAMILIES, read_spec
from forerun.messages import Start
from tests.engine.paging import Feeder, random_sequences

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in (
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
        *("phi3", "olmo2", "granite", "smollm3"),
    )
} | {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "llama 3.1": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3_moe, some dense": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": False}),
    "gemma3, stretched": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "smollm3, windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 20}),
    "granite, tied": ("granite", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return open_backend("cpu", 1, 1.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes each model once: case → (folder, transformers model with eager attention)."""

    @functools.cache
    def write(case: str) -> tuple[Path, Any]:
        arch, changes = CASES[case]
        folder = tmp_path_factory.mktemp("model")
        reference = testmodel.write_model(arch, 0, folder, **changes)
        reference.config._attn_implementation = "eager"
        return folder, reference

    return write


def load(folder: Path, backend: Backend, **options: Any) -> Model:
    return load_model(Start(model_id=str(folder), **{"dtype": "float32"} | options), backend, lambda *_: None)


def reference_logits(reference: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [reference(torch.tensor([sequence])).logits[0] for sequence in sequences]


def assert_equal_logits(got: list[torch.Tensor], want: list[torch.Tensor], bound: float = 1e-4) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).abs().max().item() < bound


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, folders: Any, backend: Backend) -> None:
    folder, reference = folders(case)
    model = load(folder, backend)
    assert model.facts["model"].endswith("own decoder")
    sequences = random_sequences(model.vocab, (57, 34, 18, 1))
    assert_equal_logits(Feeder(model, backend, sequences).run(), reference_logits(reference, sequences))


def test_every_family_is_tried(folders: Any) -> None:
    tried = {type(folders(case)[1]).__name__ for case in CASES}
    assert tried | {"Gemma3ForConditionalGeneration"} == set(FAMILIES)


@pytest.mark.parametrize("case", ["llama", "gemma2", "olmo2"])
def test_taps_are_hidden_states_behind_the_layers(case: str, folders: Any, backend: Backend) -> None:
    """Tap i = what decoder layer i adds up to, before the final norm; tap `layers` = behind the final norm."""
    folder, reference = folders(case)
    model = load(folder, backend)
    sequences = random_sequences(model.vocab, (20, 9))
    taps = (model.layers, 0, model.layers - 1)
    feeder = Feeder(model, backend, sequences, taps)
    feeder.run()
    for sequence, parts in zip(sequences, feeder.tapped):
        states = hidden_states(reference, sequence)
        want = torch.cat([states[tap] for tap in taps], dim=1)
        assert (torch.cat(parts) - want).abs().max().item() < 1e-4


def test_a_tapped_forward_is_recorded(folders: Any, backend: Backend) -> None:
    """Taps are no reason to run a step op by op; a replay has the bits of the function."""
    if not backend.caps.graphs:
        pytest.skip("no native kernels here")
    model = load(folders("llama")[0], backend)
    feeder = Feeder(model, backend, random_sequences(model.vocab, (20, 9)))
    calls = 0

    def forward(batch: Batch) -> Output:
        nonlocal calls
        calls += 1
        return model.forward(batch, feeder.pool, (0, model.layers, 0))

    captured = backend.capture(forward, None)
    for shares in ({0: 5}, {0: 7, 1: 2}, {1: 1}):
        batch = feeder.batch(shares)
        plain, replay = model.forward(batch, feeder.pool, (0, model.layers, 0)), captured(batch)
        assert torch.equal(replay.taps, plain.taps) and torch.equal(replay.logits, plain.logits)
        feeder.step(shares)
    assert calls == 1


def hidden_states(reference: Any, sequence: list[int]) -> dict[int, torch.Tensor]:
    """What transformers' layers return, and its body behind the final norm."""
    states: dict[int, torch.Tensor] = {}

    def hear(index: int) -> Any:
        return layers[index].register_forward_hook(
            lambda module, given, out: states.update({index: out if torch.is_tensor(out) else out[0]})
        )

    layers = reference.model.layers
    hooks = [hear(index) for index in range(len(layers))]
    with torch.no_grad():
        states[len(layers)] = reference.model(torch.tensor([sequence])).last_hidden_state
    for hook in hooks:
        hook.remove()
    return {index: state[0] for index, state in states.items()}


def test_no_taps_cost_nothing(folders: Any, backend: Backend) -> None:
    model = load(folders("llama")[0], backend)
    feeder = Feeder(model, backend, [[5, 6, 7]])
    feeder.step({0: 3})
    assert feeder.tapped == [[]]


def test_phi3_long_and_short(tmp_path: Path, backend: Backend) -> None:
    """Longrope is settled by the longest sequence that the server allows: within the original length transformers' short factors, beyond it
    its long ones."""
    pairs = 6
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.2 * i for i in range(pairs)],
        "long_factor": [2.0 + i for i in range(pairs)],
    }
    reference = testmodel.write_model("phi3", 0, tmp_path, rope_parameters=scaling, original_max_position_embeddings=48)
    reference.config._attn_implementation = "eager"
    for limit, length in ((48, 40), (100, 60)):
        model = load(tmp_path, backend, max_total_tokens=limit)
        assert model.max_tokens == limit
        sequences = random_sequences(model.vocab, (length,))
        assert_equal_logits(Feeder(model, backend, sequences).run(), reference_logits(reference, sequences))


def test_rope_scaling_from_the_command_line(folders: Any, backend: Backend) -> None:
    folder, _ = folders("llama")
    config = dict(CASES["llama"][1], rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    stretched = testmodel.make_model("llama", 0, **config)
    stretched.config._attn_implementation = "eager"
    for options in ({"rope_scaling": "linear", "rope_factor": 2.0}, {"rope_factor": 2.0}):
        model = load(folder, backend, **options)
        assert model.max_tokens == 1024
        sequences = random_sequences(model.vocab, (30,))
        assert_equal_logits(Feeder(model, backend, sequences).run(), reference_logits(stretched, sequences))


def test_bfloat16_stays_near_float32(tmp_path: Path, backend: Backend) -> None:
    reference = testmodel.write_model("qwen3", 0, tmp_path, dtype="bfloat16").float()
    model = load(tmp_path, backend, dtype="bfloat16")
    assert model.dtype == "bfloat16" and model.pool.dtype == torch.bfloat16
    sequences = random_sequences(model.vocab, (40,))
    got, want = Feeder(model, backend, sequences).run(), reference_logits(reference, sequences)
    assert (got[0] - want[0]).abs().mean() < 0.02 * want[0].abs().mean()


def test_shards_and_joined_experts(tmp_path: Path, backend: Backend) -> None:
    """The same model in several files, and with experts stacked as transformers 5 holds them in memory."""
    reference = testmodel.write_model("mixtral", 0, tmp_path / "one")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    reference.config.save_pretrained(tmp_path / "stacked")
    save_file({name: tensor.contiguous() for name, tensor in reference.state_dict().items()}, tmp_path / "stacked" / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "stacked" / "model.safetensors")
    sequences = random_sequences(512, (20, 12))
    logits = [Feeder(load(tmp_path / kind, backend), backend, sequences).run() for kind in ("one", "shards", "stacked")]
    for other in logits:
        assert_equal_logits(other, reference_logits(reference, sequences))


def test_language_part_of_a_multimodal_checkpoint(folders: Any, tmp_path: Path, backend: Backend) -> None:
    folder, reference = folders("gemma3_text")
    text = reference.config.to_dict()
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    for kind, prefix in (("new", "model.language_model."), ("old", "language_model.model.")):
        tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        tensors["vision_tower.patch.weight"] = torch.zeros(2, 2)
        write_folder(tmp_path / kind, outer, tensors)
        model = load(tmp_path / kind, backend)
        sequences = random_sequences(model.vocab, (30,))
        assert_equal_logits(Feeder(model, backend, sequences).run(), reference_logits(reference, sequences))


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.pop("model.embed_tokens.weight"), "no embed_tokens.weight"),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm2.weight": torch.ones(4)}),
            "has no model.layers.0.self_attn.q_norm2",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}),
            "model.norm.weight is .5., config.json and the other weights say .64.",
        ),
        (lambda tensors: tensors.update({"lm_head.weight": torch.ones(512, 64, dtype=torch.int8)}), "stored as torch.int8"),
        (lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(16, 64)}), "k_proj.weight is .16, 64."),
    ],
)
def test_what_does_not_fit_is_named(change: Any, message: str, folders: Any, tmp_path: Path, backend: Backend) -> None:
    folder, reference = folders("llama")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    write_folder(tmp_path / "broken", reference.config.to_dict(), tensors)
    with pytest.raises(StartError, match=message):
        load(tmp_path / "broken", backend)


class Held:
    """A checkpoint in memory."""

    config = None

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def codes(self, name: str) -> None:
        return None

    def release(self) -> None:
        pass


@pytest.mark.parametrize(
    "case", ["llama, biases", "qwen2", "qwen3", "gemma3_text", "olmo2", "mixtral", "mixtral, stacked", "qwen3_moe", "phi3"]
)
def test_no_tensor_is_missed_or_has_another_shape_unsaid(case: str, folders: Any, backend: Backend) -> None:
    """Each of the first layer's and of both ends, in turn: gone, or one row or column more or less."""
    folder, reference = folders(case.removesuffix(", stacked"))
    tensors = load_file(folder / "model.safetensors")
    if case.endswith("stacked"):
        tensors = reference.state_dict()
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    spec = dataclasses.replace(spec, layers=spec.layers[:1])
    tensors = {name: tensor for name, tensor in tensors.items() if "layers." not in name or "layers.0." in name}

    def build(changed: dict[str, torch.Tensor]) -> None:
        assemble(spec, Held(changed), backend, torch.float32, Formats(), 64, lambda *_: None)

    build(tensors)
    for name, tensor in tensors.items():
        with pytest.raises(StartError, match=r"lacks|has no"):
            build({other: kept for other, kept in tensors.items() if other != name})
        for axis in range(tensor.ndim):
            for more in (-1, 1):
                shape = [size + more * (axis == place) for place, size in enumerate(tensor.shape)]
                with pytest.raises(StartError, match=r"say \["):
                    build(tensors | {name: torch.ones(shape)})


def test_progress_counts_up_to_its_total(folders: Any, backend: Backend) -> None:
    seen: list[tuple[str, int, int]] = []
    load_model(Start(model_id=str(folders("llama")[0])), backend, lambda *step: seen.append(step))
    done = [step[1] for step in seen]
    assert done == sorted(done) and seen[-1][1] == seen[-1][2] and {step[0] for step in seen} == {"loading"}


def test_weight_bytes_count_everything(folders: Any, backend: Backend) -> None:
    folder, reference = folders("llama")
    model = load(folder, backend)
    parameters = sum(parameter.nbytes for parameter in reference.parameters())
    positions = (512 + backend.caps.max_nodes) * 16 * 4
    assert model.weight_bytes == parameters + positions


@pytest.mark.parametrize("case", ["llama", "gemma2", "mixtral"])
def test_a_recording_serves_every_shape(case: str, folders: Any, backend: Backend) -> None:
    """What a forward does never depends on the number of rows: recorded with one batch, it must be right for any other, also where no
    row, some rows or all rows need logits."""
    model = load(folders(case)[0], backend)
    sequence = random_sequences(model.vocab, (40,))[0]
    alone = Feeder(model, backend, [sequence])
    alone.step({0: 40})
    feeder = Feeder(model, backend, [sequence])
    recorded = backend.capture(lambda batch: model.forward(batch, feeder.pool), None)
    at = 0
    for count, kept in ((5, 5), (7, 2), (4, 0), (1, 1), (23, 1)):
        batch = feeder.batch({0: count})
        batch.logit_rows = torch.arange(count - kept, count, dtype=torch.int32)
        got = recorded(batch).logits
        at += count
        feeder.done[0] = at
        assert torch.equal(got, alone.logits[0][0][at - kept : at])


@pytest.mark.parametrize("case", CASES)
def test_the_memory_plan_counts_all_that_a_row_keeps_alive(case: str, folders: Any, backend: Backend) -> None:
    """`width` is what the plan multiplies with the rows of the largest step; a recorded forward keeps exactly its buffers."""
    if not backend.caps.graphs:
        pytest.skip("the backend records nothing")
    model = load(folders(case)[0], backend)
    feeder = Feeder(model, backend, random_sequences(model.vocab, (20,)))
    batch = feeder.batch({0: 20})
    batch.logit_rows = batch.logit_rows[-1:]
    _, program = backend.ops.record(lambda batch: model.forward(batch, feeder.pool), batch)  # type: ignore[attr-defined]
    kept = sum(buffer.width for buffer in program._buffers) / 4
    assert kept <= model.width <= 3 * kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_logits_never_depend_on_company_or_chunks(case: str, dtype: str, folders: Any, backend: Backend) -> None:
    """Bit for bit, whatever else is in the batch and wherever a prompt is cut."""
    if not backend.caps.batch_invariant:
        pytest.skip("the backend does not promise it")
    model = load(folders(case)[0], backend, dtype=dtype)
    sequences = random_sequences(model.vocab, (41, 26, 9))
    company = Feeder(model, backend, sequences, seed=3).run()
    for sequence, together in zip(sequences, company):
        alone = Feeder(model, backend, [sequence], seed=4)
        alone.step({0: len(sequence)})
        assert torch.equal(alone.logits[0][0], together)
