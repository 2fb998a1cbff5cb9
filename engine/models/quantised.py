"""Which format each matrix of a model gets: what `--quantize` says, what the checkpoint holds, and how the two meet.

    --quantize                     matrices of layers     output head
    (none)                         as the file has them; a plain checkpoint in the model's type
    int8, eetq, bitsandbytes       int8                   int8
    int4                           int4                   int8: a 4-bit head spoils a small model
    gptq, awq                      as the checkpoint says (gptq reads both, as in TGI)

Weights that a file holds in fewer bits than asked for stay as they are. --dtype without --quantize expands a GGUF file's weights; beside
the integers of GPTQ and AWQ it is the type of all that is not quantised.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.engine.errors import StartError
from forerun.engine.integers import Integers, read_scheme, settings_of
from forerun.engine.weights import Checkpoint
from forerun.kernels import quant
from forerun.kernels.quant import Codes
from forerun.messages import Start

EIGHT_BITS = ("int8", "eetq", "bitsandbytes")
OURS = "use --quantize int8 or int4 with an unquantised checkpoint"
CURES = {
    "bitsandbytes-nf4": "use --quantize int4, which has 4 bits too and groups with a scale and a minimum",
    "bitsandbytes-fp4": "use --quantize int4, which has 4 bits too and groups with a scale and a minimum",
    "fp8": "use --quantize int8, which has as many bits",
    "exl2": f"{OURS}, or a GPTQ, AWQ or GGUF checkpoint of this model",
    "marlin": "use the GPTQ or AWQ checkpoint of this model with --quantize gptq or awq",
    "compressed-tensors": f"{OURS}, or a GPTQ, AWQ or GGUF checkpoint of this model",
}

Matrix = Tensor | Codes


@dataclasses.dataclass(frozen=True, slots=True)
class Formats:
    """`layers`, `head`: the format of matrices that are stored as numbers, None = the model's type. `stored`: codes stay codes."""

    layers: str | None = None
    head: str | None = None
    stored: bool = False

    def read(self, checkpoint: Checkpoint, name: str) -> Matrix:
        codes = checkpoint.codes(name) if self.stored else None
        return checkpoint.read(name) if codes is None else codes


def choose_formats(start: Start) -> Formats:
    """What the command line asks for. StartError for methods that are not there."""
    if start.quantize is None:
        return Formats()
    if start.quantize in EIGHT_BITS:
        return Formats("int8", "int8", stored=True)
    if start.quantize == "int4":
        return Formats("int4", "int8", stored=True)
    if start.quantize in ("gptq", "awq"):
        return Formats(stored=True)
    raise StartError(f"--quantize {start.quantize} is not available", CURES.get(start.quantize, OURS))


def unwrap(path: Path, config: dict[str, Any], checkpoint: Checkpoint, start: Start) -> tuple[dict[str, Any], Checkpoint, Formats]:
    """A checkpoint that is quantised by its settings, read as codes; the configuration without them; and the formats."""
    formats = choose_formats(start)
    settings = settings_of(path, config, checkpoint)
    if settings is None:
        if start.quantize in ("gptq", "awq"):
            raise StartError(f"--quantize {start.quantize} needs a checkpoint that was quantised so, and this one is not", OURS)
        return config, checkpoint, formats if start.quantize else Formats(stored=start.dtype is None)
    scheme = read_scheme(settings)
    if start.quantize == "awq" and scheme.method != "awq":
        raise StartError(f"--quantize awq, but the checkpoint is quantised with {scheme.method}", "leave --quantize out")
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if plain.get("text_config"):
        plain["text_config"] = {key: value for key, value in plain["text_config"].items() if key != "quantization_config"}
    return plain, Integers(checkpoint, scheme, remake=formats.layers is not None), dataclasses.replace(formats, stored=True)


def numbers(matrix: Matrix) -> Tensor:
    return matrix if torch.is_tensor(matrix) else quant.expand(matrix)


def bits(format: str) -> int:
    return 4 if format.startswith("int4") else 8


def joined(parts: list[Matrix]) -> Matrix:
    """One matrix of all rows. Codes of one format stay; of several they meet in `int8-groups`, which holds any of them nearly exactly."""
    if len(parts) == 1:
        return parts[0]
    codes = [part for part in parts if not torch.is_tensor(part)]
    if len(codes) < len(parts):
        return torch.cat([numbers(part) for part in parts])
    if len({part.format for part in codes}) == 1:
        return quant.join(codes)
    return quant.quantize(torch.cat([quant.expand(part) for part in codes]), "int8-groups")


def settled(matrix: Matrix, wanted: str | None) -> Matrix:
    """Codes stay if they have no more bits than what is wanted; else they are numbers again, to be quantised anew."""
    if torch.is_tensor(matrix) or wanted is None or bits(matrix.format) <= bits(wanted):
        return matrix
    return quant.expand(matrix)
