"""From a `Start` message to a `Model`: find the files, choose the number type and the longest sequence, build.

Two ways to build: the one decoder for the families of `spec.py`, and the unmodified transformers model for any other architecture (which
is the only case that imports transformers). Both answer to the same `Model` protocol.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from forerun.backends.base import Backend
from forerun.engine.errors import StartError
from forerun.engine.models.assemble import Progress, assemble
from forerun.engine.models.model import Model
from forerun.engine.models.quantised import unwrap
from forerun.engine.models.spec import FAMILIES, ModelSpec, family_of, read_spec
from forerun.engine.weights import Checkpoint, open_checkpoint, read_config
from forerun.hub import ModelNotFound, locate
from forerun.messages import Start

KV_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HOLDS = {torch.float32: {torch.float32, torch.bfloat16, torch.float16}, torch.bfloat16: {torch.bfloat16}, torch.float16: {torch.float16}}
"""Which types' values a type holds without rounding."""


def load_model(start: Start, backend: Backend, progress: Progress) -> Model:
    """Loads and packs the model that `start` names. `progress(stage, done, total)`. StartError says what is wrong and the cure."""
    refuse_what_is_not_there(start, backend)
    model = load_any(start, backend, progress)
    if start.kv_dtype:
        model.pool = dataclasses.replace(model.pool, dtype=KV_DTYPES[start.kv_dtype])
        model.facts["kv"] = start.kv_dtype
    return model


def load_any(start: Start, backend: Backend, progress: Progress) -> Model:
    path = find(start)
    config = read_config(path)
    if config is not None and family_of(config) not in FAMILIES:
        return load_other(path, config, start, backend, progress)
    checkpoint = open_checkpoint(path, start.allow_pickle)
    config = config or checkpoint.config
    if config is None:
        raise StartError(f"{path} has no config.json", "fetch the model again")
    config, checkpoint, formats = unwrap(path, config, checkpoint, start)
    dtype = choose_dtype(start.dtype, stored_dtype(config, checkpoint), backend)
    spec = read_spec(config, rope_override(start))
    return assemble(spec, checkpoint, backend, dtype, formats, longest(spec, start.max_total_tokens), progress)


def find(start: Start) -> Path:
    """The model's folder, or a GGUF file."""
    try:
        return locate(start.model_id, start.revision, start.hub_cache)
    except ModelNotFound as error:
        raise StartError(str(error), "") from error


def load_other(path: Path, config: dict[str, Any], start: Start, backend: Backend, progress: Progress) -> Model:
    from forerun.engine.models.transformers import load_transformers

    if rope_override(start) is not None:
        raise StartError(f"--rope-scaling is not available for {family_of(config)}", "write it into config.json of the model")
    if start.quantize is not None:
        raise StartError(f"--quantize is not available for {family_of(config)}", "leave it out, or use an architecture of the own decoder")
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method not in (None, "mxfp4"):  # which transformers de-quantises as it reads
        raise StartError(f"the checkpoint is quantised ({method}), but {family_of(config)} is read as numbers", "use the unquantised one")
    dtype = choose_dtype(start.dtype, named_dtype(config) or torch.float32, backend)
    return load_transformers(path, backend, dtype, start.max_total_tokens, start.trust_remote_code, start.allow_pickle, progress)


def refuse_what_is_not_there(start: Start, backend: Backend) -> None:
    if start.kv_dtype and KV_DTYPES.get(start.kv_dtype) not in backend.caps.kv_dtypes:
        there = ", ".join(name for name, dtype in KV_DTYPES.items() if dtype in backend.caps.kv_dtypes)
        raise StartError(f"--kv-cache-dtype {start.kv_dtype} is not available on {backend.name}", f"use one of {there}, or leave it out")
    if start.world != 1:
        raise StartError(f"a model over {start.world} workers is not available", "use --num-shard 1")


def rope_override(start: Start) -> dict[str, Any] | None:
    """The command line's rope scaling; a factor alone means linear (as in TGI)."""
    if start.rope_scaling is None and start.rope_factor is None:
        return None
    return {"rope_type": start.rope_scaling or "linear", "factor": start.rope_factor or 1.0}


def named_dtype(config: dict[str, Any]) -> torch.dtype | None:
    """The type that a configuration names, in either spelling."""
    inner = config.get("text_config") or {}
    name = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype") or ""
    return DTYPES.get(str(name))


def stored_dtype(config: dict[str, Any], checkpoint: Checkpoint) -> torch.dtype:
    named = named_dtype(config)
    if named is not None:
        return named
    largest = max(checkpoint.names(), key=lambda name: torch.Size(checkpoint.shape(name)).numel())
    return checkpoint.read(largest).dtype


def choose_dtype(asked: str | None, stored: torch.dtype, backend: Backend) -> torch.dtype:
    """What is asked for; else the first of the device's types (best first) that holds the checkpoint's values without rounding."""
    offered = backend.caps.dtypes
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in offered)
    if asked:
        if DTYPES.get(asked) not in offered:
            raise StartError(f"--dtype {asked} is not available on {backend.name}", f"use one of {names}, or leave it out")
        return DTYPES[asked]
    return next((dtype for dtype in offered if stored in HOLDS.get(dtype, set())), offered[0])


def longest(spec: ModelSpec, asked: int) -> int:
    """The longest sequence: what is asked for, if the positions reach so far; else what the model states."""
    if asked > spec.reach:
        raise StartError(
            f"max_total_tokens {asked} is more than the model's {spec.reach} positions",
            f"use --max-total-tokens {spec.reach} or less, or stretch the positions with --rope-scaling dynamic --rope-factor N",
        )
    return asked or spec.max_positions
