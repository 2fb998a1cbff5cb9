"""config.json → ModelSpec: both spellings, the families' defaults, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import transformers

from forerun.engine.errors import StartError
from forerun.engine.models.spec import FAMILIES, ModelSpec, read_spec

MINIMUM = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8}
KINDS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
}


def spec_of(name: str, **config: Any) -> ModelSpec:
    return read_spec({"architectures": [name]} | MINIMUM | config)


def shape(spec: ModelSpec) -> Any:
    """A spec without the leftovers of spelling: rotary parameters that change nothing."""
    ropes = [dataclasses.replace(rope, parameters={}) for rope in spec.ropes]
    return dataclasses.replace(spec, ropes=tuple(ropes))


@pytest.mark.parametrize("name", KINDS)
def test_missing_keys_have_the_defaults_of_the_family(name: str) -> None:
    """A configuration that says only the sizes means what transformers' class for it means."""
    kv = {} if name.startswith(("Mistral", "Mixtral", "Gemma2", "Gemma3", "SmolLM3", "Qwen3Moe")) else {"num_key_value_heads": 4}
    full = transformers.AutoConfig.for_model(KINDS[name], **MINIMUM | kv).to_dict()
    full["architectures"] = [name]
    assert shape(spec_of(name, **kv)) == shape(read_spec(full))


def test_all_families_are_tried() -> None:
    assert set(KINDS) | {"Gemma3ForConditionalGeneration"} == set(FAMILIES)


def test_both_spellings_of_rotary_parameters() -> None:
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = spec_of("LlamaForCausalLM", rope_theta=5e5, rope_scaling=scaling)
    new = spec_of("LlamaForCausalLM", rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 5e5})
    assert shape(old) == shape(new)
    assert (old.ropes[0].kind, old.ropes[0].theta, old.ropes[0].original) == ("llama3", 5e5, 64)


def test_gemma3_turns_by_layer_type_in_both_spellings() -> None:
    old = spec_of("Gemma3ForCausalLM", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = spec_of(
        "Gemma3ForCausalLM",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert shape(old) == shape(new)
    assert [layer.rope for layer in old.layers] == [1, 1, 1, 1, 1, 0]
    assert [layer.attention.window for layer in old.layers] == [4096] * 5 + [0]
    assert [rope.kind for rope in old.ropes] == ["linear", "default"]


def test_published_gemma3_configuration_leaves_most_out() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    spec = read_spec({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}})
    assert (spec.vocab, spec.layers[0].attention.heads, spec.layers[0].attention.kv_heads, spec.tied) == (262208, 8, 4, True)


def test_layers_without_positions() -> None:
    spec = spec_of("SmolLM3ForCausalLM", no_rope_layer_interval=3)
    assert [layer.rope for layer in spec.layers] == [0, 0, None, 0, 0, None]
    listed = spec_of("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 1, 1, 0])
    assert [layer.rope for layer in listed.layers] == [None, 0, 0, 0, 0, None]


def test_constants_fold_into_scales() -> None:
    spec = spec_of(
        "GraniteForCausalLM", embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.015, logits_scaling=8.0
    )
    assert (spec.embed_scale, spec.residual_scale, spec.layers[0].attention.scale, spec.logits_scale) == (12.0, 0.22, 0.015, 0.125)
    gemma = spec_of("Gemma2ForCausalLM", query_pre_attn_scalar=64)
    assert (gemma.embed_scale, gemma.norm_offset, gemma.layers[0].attention.scale, gemma.layers[0].attention.softcap) == (
        8.0,
        1.0,
        0.125,
        50.0,
    )


@pytest.mark.parametrize(
    ("config", "reach", "states"),
    [
        ({}, 2048, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192, 2048),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192, 8192),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048, 2048),
    ],
)
def test_longest_sequence(config: dict[str, Any], reach: int, states: int) -> None:
    spec = spec_of("LlamaForCausalLM", **config)
    assert (spec.reach, spec.max_positions) == (reach, states)


def test_early_phi3_said_yarn_or_su_and_meant_longrope() -> None:
    lists = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    for kind in ("yarn", "su", "longrope"):
        assert spec_of("Phi3ForCausalLM", rope_scaling={"type": kind} | lists).ropes[0].kind in ("longrope", "su")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised .gptq."),
        ({"hidden_act": "mish"}, "activation mish"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"architectures": []}, "names 0 architectures"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"rope_scaling": {"type": "wobbly"}}, "rope scaling wobbly"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling linear lacks factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": None}},
            "llama3 lacks low_freq_factor, high_freq_factor",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope lacks long_factor"),
        ({"num_key_value_heads": 3}, "heads for 3 of keys and values"),
    ],
)
def test_what_cannot_be_served_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message) as raised:
        spec_of("LlamaForCausalLM", **config)
    assert raised.value.cure
