"""What a model is, in numbers: from a Hugging Face `config.json` to a `ModelSpec` that the one decoder is built from.

Reads both spellings of rotary parameters: `rope_theta` and `rope_scaling` at the top (transformers 4), and `rope_parameters`, flat or one
for each layer type (transformers 5). A key that is missing has the value that the family's configuration class gives it. Knows nothing
of weights; a family that is not in `FAMILIES` is left to `transformers.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from forerun.backends.base import AttentionSpec
from forerun.engine.errors import StartError
from forerun.engine.models.rotary import Rope, make_rope

Config = dict[str, Any]
HeadNorms = Literal["", "each", "all"]
"""queries and keys are normed: not, each head for itself, or all heads as one"""
QKV, ATTENTION = ("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
"""the products of a layer, as checkpoints name them"""


@dataclasses.dataclass(frozen=True, slots=True)
class Norms:
    """The names of a layer's four norms in the checkpoint, in the order of use; None = there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


SANDWICH = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """A mixture in place of the MLP. `names`: gate, up and down of one expert in the checkpoint; `block`: what holds them."""

    count: int
    top_k: int
    normalize: bool
    block: str
    names: tuple[str, str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpec:
    """`rope`: index into the model's ropes, or None (no positions in this layer). `experts`: None = an ordinary MLP."""

    attention: AttentionSpec
    rope: int | None
    experts: Experts | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """`norm_offset`: added to every norm weight of the checkpoint (Gemma stores w − 1). `round_embed_scale`: the scale is rounded to the
    weights' type, as the family's own code does. `residual_scale`: every block's result is multiplied by it before it is added."""

    family: str
    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rope, ...]
    norms: Norms
    head_norms: HeadNorms
    biased: frozenset[str]
    """products that have a bias; others may"""
    norm_eps: float
    norm_offset: float
    activation: str
    embed_scale: float
    round_embed_scale: bool
    residual_scale: float
    logits_scale: float
    logits_softcap: float
    tied: bool
    max_positions: int
    """what the configuration states, or the scaling reaches when it is there to extend it (YaRN)"""
    reach: int
    """the longest sequence that may be asked for"""


def biases_told(config: Config) -> tuple[str, ...]:
    return ATTENTION * bool(config.get("attention_bias")) + MLP * bool(config.get("mlp_bias"))


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """What a family's code does that its configuration does not say. `defaults`: of keys that a configuration may leave out.
    `biased`: the products that have a bias. `windows`: the attention window of every layer. `experts`: of a layer."""

    defaults: Config = dataclasses.field(default_factory=dict)
    norms: Norms = Norms()
    head_norms: HeadNorms = ""
    gemma: bool = False
    biased: Callable[[Config], tuple[str, ...]] = biases_told
    windows: Callable[[Config], list[int]] = lambda config: [0] * config["num_hidden_layers"]
    experts: Callable[[Config, int], Experts | None] = lambda config, layer: None


def window_everywhere(config: Config) -> list[int]:
    return [config.get("sliding_window") or 0] * config["num_hidden_layers"]


def window_by_type(config: Config, types: list[str]) -> list[int]:
    window = config.get("sliding_window") or 0
    return [window if kind == "sliding_attention" else 0 for kind in config.get("layer_types") or types]


def qwen_windows(config: Config) -> list[int]:
    """The last layers, from `max_window_layers` on, if windows are used at all."""
    if not config.get("use_sliding_window"):
        return [0] * config["num_hidden_layers"]
    first = config.get("max_window_layers", 28)
    return window_by_type(config, ["sliding_attention" if i >= first else "" for i in range(config["num_hidden_layers"])])


def qwen_moe_windows(config: Config) -> list[int]:
    return window_everywhere(config) if config.get("use_sliding_window") else [0] * config["num_hidden_layers"]


def gemma2_windows(config: Config) -> list[int]:
    return window_by_type(config, ["" if i % 2 else "sliding_attention" for i in range(config["num_hidden_layers"])])


def gemma3_types(config: Config) -> list[str]:
    """Every sixth layer sees everything."""
    pattern = config.get("sliding_window_pattern") or 6
    named = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(config["num_hidden_layers"])]
    return config.get("layer_types") or named


def smollm3_windows(config: Config) -> list[int]:
    if not config.get("use_sliding_window"):
        return [0] * config["num_hidden_layers"]
    return window_by_type(config, ["" if turns else "sliding_attention" for turns in rotating_layers(config)])


def mixtral_experts(config: Config, layer: int) -> Experts:
    return Experts(config.get("num_local_experts", 8), config.get("num_experts_per_tok", 2), True, "block_sparse_moe", ("w1", "w3", "w2"))


def qwen_experts(config: Config, layer: int) -> Experts | None:
    count: int = config["num_experts"] if "num_experts" in config else config.get("num_local_experts", 128)  # transformers 4 | 5
    dense = layer in (config.get("mlp_only_layers") or []) or not count or (layer + 1) % config.get("decoder_sparse_step", 1)
    normalize = config.get("norm_topk_prob", False)
    return None if dense else Experts(count, config.get("num_experts_per_tok", 8), normalize, "mlp", ("gate_proj", "up_proj", "down_proj"))


QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
GEMMA = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192}
MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(MISTRAL | {"sliding_window": 4096}, windows=window_everywhere),
    "MixtralForCausalLM": Family(MISTRAL | {"rope_theta": 1e6, "rms_norm_eps": 1e-5}, windows=window_everywhere, experts=mixtral_experts),
    "Qwen2ForCausalLM": Family(QWEN, biased=lambda config: QKV, windows=qwen_windows),
    "Qwen3ForCausalLM": Family(QWEN | {"head_dim": 128}, head_norms="each", windows=qwen_windows),
    "Qwen3MoeForCausalLM": Family(QWEN | {"num_key_value_heads": 4}, head_norms="each", windows=qwen_moe_windows, experts=qwen_experts),
    "GemmaForCausalLM": Family(GEMMA, gemma=True),
    "Gemma2ForCausalLM": Family(
        GEMMA
        | {
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        norms=SANDWICH,
        gemma=True,
        windows=gemma2_windows,
    ),
    "Gemma3ForCausalLM": Family(
        GEMMA
        | {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        norms=SANDWICH,
        head_norms="each",
        gemma=True,
        windows=lambda config: window_by_type(config, gemma3_types(config)),
    ),
    "Phi3ForCausalLM": Family(
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, windows=window_everywhere
    ),
    "Olmo2ForCausalLM": Family({"rms_norm_eps": 1e-5}, norms=AFTER, head_norms="all"),
    "GraniteForCausalLM": Family({"attention_multiplier": 1.0}),
    "SmolLM3ForCausalLM": Family(
        {"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4, "max_position_embeddings": 32768},
        windows=smollm3_windows,
    ),
}
FAMILIES["Gemma3ForConditionalGeneration"] = FAMILIES["Gemma3ForCausalLM"]
"""Text only: the language part of the multimodal checkpoint."""

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def family_of(config: Config) -> str:
    """The architecture's class name, which is what checkpoints agree on."""
    names = config.get("architectures") or []
    if len(names) != 1:
        raise StartError(f"config.json names {len(names)} architectures", "set `architectures` to the one class this checkpoint is of")
    return str(names[0])


def read_spec(config: Config, scaling: Config | None = None) -> ModelSpec:
    """The spec of a family in `FAMILIES`. `scaling`: rope scaling from the command line, in place of the configuration's."""
    name = family_of(config)
    family = FAMILIES[name]
    config = complete(config, family)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    ropes, which = read_ropes(config, head_dim, scaling)
    windows = family.windows(config)
    layers = tuple(
        LayerSpec(attention_spec(config, head_dim, windows[i]), which[i], family.experts(config, i))
        for i in range(config["num_hidden_layers"])
    )
    stretched = [rope.reach for rope in ropes if rope.kind == "yarn" or scaling] or [0]
    return ModelSpec(
        family=name,
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=layers,
        ropes=ropes,
        norms=family.norms,
        head_norms=family.head_norms,
        biased=frozenset(family.biased(config)),
        norm_eps=config["rms_norm_eps"],
        norm_offset=1.0 if family.gemma else 0.0,
        activation=activation(config, family),
        embed_scale=config["hidden_size"] ** 0.5 if family.gemma else config.get("embedding_multiplier", 1.0),
        round_embed_scale=family.gemma,
        residual_scale=config.get("residual_multiplier", 1.0),
        logits_scale=1.0 / config.get("logits_scaling", 1.0),
        logits_softcap=config.get("final_logit_softcapping") or 0.0,
        tied=config["tie_word_embeddings"],
        max_positions=max(config["max_position_embeddings"], *stretched),
        reach=max([config["max_position_embeddings"]] + [rope.reach for rope in ropes]),
    )


def complete(config: Config, family: Family) -> Config:
    """The language model's part of the configuration, with the family's defaults for what it leaves out."""
    text = config.get("text_config")
    if text is not None:
        config = text | {name: config[name] for name in ("architectures", "tie_word_embeddings", "quantization_config") if name in config}
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise StartError(f"the checkpoint is quantised ({method})", "use the unquantised checkpoint of this model")
    if config.get("use_bidirectional_attention"):
        raise StartError("the model attends in both directions", "use a decoder-only model")
    full = DEFAULTS | family.defaults | config
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if not full.get(name):
            raise StartError(f"config.json lacks {name}", "fetch the model's config.json again")
    heads, kv_heads = full["num_attention_heads"], full.get("num_key_value_heads") or full["num_attention_heads"]
    if heads % kv_heads:
        raise StartError(f"config.json says {heads} heads for {kv_heads} of keys and values", "fetch the model's config.json again")
    return full


def activation(config: Config, family: Family) -> str:
    name = config.get("hidden_activation") or config["hidden_act"]
    if family.gemma and name == "gelu":
        name = "gelu_pytorch_tanh"  # early Gemma configurations say gelu and mean this
    if name not in ACTIVATIONS:
        raise StartError(f"activation {name} is not known", f"known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def attention_spec(config: Config, head_dim: int, window: int) -> AttentionSpec:
    scalar = config.get("query_pre_attn_scalar")
    return AttentionSpec(
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=head_dim,
        scale=config.get("attention_multiplier") or float(scalar or head_dim) ** -0.5,
        window=window,
        softcap=config.get("attn_logit_softcapping") or 0.0,
    )


def rotating_layers(config: Config) -> list[int]:
    """1 for a layer that rotates, 0 for one without positions (SmolLM3)."""
    layers, interval = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    if family_of(config) != "SmolLM3ForCausalLM":
        return [1] * layers
    return config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]


def read_ropes(config: Config, head_dim: int, scaling: Config | None) -> tuple[tuple[Rope, ...], list[int | None]]:
    """The model's rotations, and which of them each layer uses."""
    by_type = rope_parameters(config, scaling)
    if config["architectures"][0] == "Phi3ForCausalLM" and (by_type[""].get("rope_type") or by_type[""].get("type")) == "yarn":
        by_type[""]["rope_type"] = "longrope"  # early Phi-3 configurations said yarn and meant this
    positions, original = config["max_position_embeddings"], config.get("original_max_position_embeddings")
    made = {kind: make_rope(parameters, config["rope_theta"], head_dim, positions, original) for kind, parameters in by_type.items()}
    order = list(made)
    types = gemma3_types(config) if len(made) > 1 else [""] * config["num_hidden_layers"]
    which = [order.index(kind) if turns else None for kind, turns in zip(types, rotating_layers(config))]
    return tuple(made.values()), which


def rope_parameters(config: Config, scaling: Config | None) -> dict[str, Config]:
    """Rotary parameters by layer type; one entry, called "", if all layers rotate alike."""
    given = config.get("rope_parameters") or {}
    partial = {"partial_rotary_factor": config["partial_rotary_factor"]} if config.get("partial_rotary_factor") else {}
    if "rope_local_base_freq" not in config:
        flat = scaled(given or config.get("rope_scaling") or {}, scaling)
        return {"": partial | flat}
    full = given.get("full_attention") or {}
    local = given.get("sliding_attention") or {}
    full = scaled(full or config.get("rope_scaling") or {}, scaling)
    return {"full_attention": full, "sliding_attention": {"rope_theta": config["rope_local_base_freq"]} | local}


def scaled(parameters: Config, scaling: Config | None) -> Config:
    """The parameters with the command line's scaling in place of their own."""
    if scaling is None:
        return dict(parameters)
    kept = {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
    return kept | scaling
