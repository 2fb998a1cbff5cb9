"""Tiny random models for tests, as ordinary Hugging Face folders: `forerun make-test-model --arch llama --seed 0 --out DIR`.

Weights are drawn so that activations keep their size and logits spread: greedy text wanders instead of repeating one token. The
tokenizer is byte level with a few hundred merges, so that random tokens give broken UTF-8 and odd token boundaries all the time. The
same seed gives the same files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""ids 0 … 3"""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = """The server answers every client, one token after another, and the text that leaves it is the text that was asked for.
A guess is checked before it is believed; what was not checked is thrown away. Two plus two is 4, ten times ten is 100, 3.14159 is near.
def add(left: int, right: int) -> int:\n    return left + right\n\nfor index in range(10):\n    print(index, add(index, index))\n
{"name": "value", "list": [1, 2, 3], "nested": {"true": true, "null": null}}
Der schnelle braune Fuchs springt über den faulen Hund. Où est la bibliothèque ? El niño comió una manzana. Γειά σου Κόσμε, привет мир.
你好,世界。こんにちは世界。안녕하세요. 🙂🚀 What is the capital of France? The capital of France is Paris, and the river is the Seine."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
ARCHES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": MOE | {"head_dim": 32, "norm_topk_prob": True},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24},
    "gemma3_text": {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24, "num_hidden_layers": 7},
    "phi3": {"partial_rotary_factor": 0.75, "num_key_value_heads": 4},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "codegen": GPT2 | {"rotary_dim": 8},
    "cohere": {},
    "cohere2": {"sliding_window": 24},
    "cwm": {"sliding_window": 24},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "ernie4_5": {"head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
    "exaone4": {"sliding_window": 24, "sliding_window_pattern": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": MOE | {"head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2 | {"n_inner": 96},
    "gpt_neox": {},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "gptj": GPT2 | {"rotary_dim": 8},
    "granitemoe": {"attention_multiplier": 0.25, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {
        "attention_multiplier": 0.25,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "ministral3": {},
    "nanochat": {},
    "nemotron": {"partial_rotary_factor": 0.5},
    "olmo": {},
    "olmo3": {"sliding_window": 24},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 48},
    "seed_oss": {"head_dim": 16},
    "stablelm": {},
    "starcoder2": {"sliding_window": 24},
    "vaultgemma": {"head_dim": 16, "sliding_window": 24},
}
"""What a family needs beyond `SMALL`, by transformers' model type."""
ALIASES = {"gemma3": "gemma3_text", "deepseek": "deepseek_v3"}


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes with: printable ones stand for themselves, the others for U+0100 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(sorted(set(range(256)) - set(printable)))}
    return [letters[byte] for byte in range(256)]


def learn_merges(count: int) -> list[tuple[str, str]]:
    """Plain byte-pair encoding of the corpus: the most frequent pair first, ties to the lesser."""
    alphabet = byte_alphabet()
    words = [[alphabet[byte] for byte in word.encode()] for word in CORPUS.replace(" ", "\0 ").split("\0")]
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = [merged(word, best) for word in words]
    return merges


def merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for letter in word:
        if out and (out[-1], letter) == pair:
            out[-1] += letter
        else:
            out.append(letter)
    return out


def write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = learn_merges(VOCAB - 256 - len(SPECIAL))
    tokens = [*SPECIAL, *byte_alphabet(), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[3], "unk_token": SPECIAL[0]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE} | named
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def draw(shape: torch.Size, name: str, generator: torch.Generator, offset: float, tied: bool) -> Tensor:
    """Random values of the size that keeps activations near 1. `offset`: what the family adds to norm weights. `tied`: the embedding is
    the head too; then it is small beside what the layers add, or every token would predict itself."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        centre = 1.0 - offset if "norm" in name or "ln_" in name else 0.0
        return centre + 0.1 * noise
    if any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
        return noise * (0.1 if tied else 0.5)
    gain: float = 1.5 * shape[-1] ** -0.5
    return (noise - noise.mean(-1, keepdim=True)) * gain


def import_transformers() -> Any:
    """Imported when needed (it takes a second), and quiet."""
    import transformers

    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    return library


def make_model(arch: str, seed: int, **changes: Any) -> Any:
    """A transformers model in float32, in evaluation mode. `changes`: of its configuration. ValueError for an unknown `arch`."""
    transformers = import_transformers()
    kind = ALIASES.get(arch, arch)
    if kind not in ARCHES:
        raise ValueError(f"no test model {arch}; there are {', '.join(sorted([*ARCHES, *ALIASES]))}")
    small = {name: value for name, value in SMALL.items() if not (name[0] in "hn" and "n_embd" in ARCHES[kind])}
    config = transformers.AutoConfig.for_model(kind, **small | ARCHES[kind] | changes)
    with torch.random.fork_rng():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    offset = 1.0 if kind.startswith("gemma") or kind == "nemotron" else 0.0
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(draw(parameter.shape, name, generator, offset, config.tie_word_embeddings))
    return model


def write_model(arch: str, seed: int, folder: Path, dtype: str = "float32", **changes: Any) -> Any:
    """Writes the folder; returns the model."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(arch, seed, **changes).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 3
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # written readable to its owner alone; a container runs as someone else
    write_tokenizer(folder)
    return model


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="forerun make-test-model", description="Write a tiny random model for tests.")
    parser.add_argument("--arch", default="llama", help=", ".join(sorted([*ARCHES, *ALIASES])))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args(arguments)
    changes = {"num_hidden_layers": options.layers, "hidden_size": options.hidden}
    try:
        write_model(options.arch, options.seed, options.out, options.dtype, **{name: value for name, value in changes.items() if value})
    except ValueError as error:
        print(f"make-test-model: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
