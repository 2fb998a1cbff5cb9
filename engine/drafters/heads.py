"""A checkpoint of heads: its files, its tensors by name, and what a drafter's value says beside the folder.

    medusa=DIR            the folder or hub id
    medusa=DIR,tree=NAME  and options, each `name=value`, behind commas

Heads are published as safetensors or pickles, under names that differ in what stands before them, and with copies of weights that are the
target's. A tensor that nobody asks for is an error, as in a model: the file is not what it was taken for. Knows no kind of heads.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from forerun.backends.base import Backend, Weight
from forerun.engine.drafters.registry import Host
from forerun.engine.errors import StartError
from forerun.engine.models.decoder import Linear
from forerun.engine.models.load import find
from forerun.engine.weights import Checkpoint, open_checkpoint, open_file, read_config

LOOSE_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Files of heads that may lie in a folder beside other weights; they come first."""


def parse_value(kind: str, value: str, known: Mapping[str, Iterable[str]], own: str = "") -> tuple[str, dict[str, str]]:
    """(folder or hub id, options). `known`: options and the values they may have; `own`: the place where none is given, "" = one must be.
    StartError for anything else."""
    place, *given = re.split(r",(?=[a-z_]+=)", value)
    place = place or own
    if not place:
        raise StartError(f"--speculator {kind} does not say which heads", f"use --speculator {kind}=DIR")
    options = dict(each.split("=", 1) for each in given)
    for name, choice in options.items():
        if name not in known:
            raise StartError(f"{kind} has no option {name!r}", f"it has: {', '.join(known) or 'none'}")
        if choice not in known[name]:
            raise StartError(f"{kind} has no {name} {choice!r}", f"use one of {', '.join(known[name])}")
    return place, options


@dataclasses.dataclass(eq=False, slots=True)
class Heads:
    """One load of heads. `prefix`: what stands before every name in the file. `used`: names that were asked for; `bytes`: what was kept."""

    path: Path
    config: dict[str, Any]
    checkpoint: Checkpoint
    backend: Backend
    prefix: str = ""
    used: set[str] = dataclasses.field(default_factory=set)
    bytes: int = 0

    @classmethod
    def open(cls, place: str, host: Host) -> Heads:
        """The folder's heads, or its only weights. StartError where there are none, or a pickle that nobody allowed."""
        path = find(msgspec.structs.replace(host.start, model_id=place, revision=None))
        loose = [path / name for name in LOOSE_FILES if (path / name).is_file()]
        allow = host.start.allow_pickle
        checkpoint = open_file(loose[0], allow) if loose else open_checkpoint(path, allow)
        return cls(path, read_config(path) or {}, checkpoint, host.backend)

    def names(self) -> set[str]:
        """Names without the prefix, of the tensors that have it."""
        return {name.removeprefix(self.prefix) for name in self.checkpoint.names() if name.startswith(self.prefix)}

    def has(self, name: str) -> bool:
        return self.prefix + name in self.checkpoint.names()

    def skip(self, *names: str) -> None:
        """Tensors that may be there and are of no use."""
        self.used |= {self.prefix + name for name in names}

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As it is in the file. A size of −1 may be any."""
        full = self.prefix + name
        if full not in self.checkpoint.names():
            raise StartError(f"{self.path} lacks the tensor {full}", "fetch the heads again, or check that config.json is theirs")
        self.used.add(full)
        there = self.checkpoint.shape(full)
        if len(there) != len(shape) or any(want not in (-1, size) for want, size in zip(shape, there)):
            raise StartError(
                f"{self.path}: {full} is {list(there)} where this target needs {[want if want >= 0 else 'any' for want in shape]}",
                "use heads that were trained for this target",
            )
        return self.checkpoint.read(full)

    def weight(self, name: str, rows: int, columns: int) -> Weight:
        """A packed matrix. What is stored in 16 bits stays in 16 bits where the device multiplies them."""
        return self.pack(self.tensor(name, (rows, columns)))

    def joined(self, names: Iterable[str], columns: int) -> Weight:
        """Matrices with the same columns, one below the other."""
        return self.pack(torch.cat([self.tensor(name, (-1, columns)) for name in names]))

    def together(self, rows: Mapping[str, int], columns: int, halves: bool = False) -> Linear:
        """One product of several: name.weight one below the other, each with its rows, and name.bias of all of them or of none. `halves`:
        gate and up, packed for `ops.mlp`."""
        matrices = [self.tensor(f"{name}.weight", (count, columns)) for name, count in rows.items()]
        biased = any(self.has(f"{name}.bias") for name in rows)
        bias = torch.cat([self.vector(f"{name}.bias", count) for name, count in rows.items()]) if biased else None
        return Linear(self.pack(torch.cat(matrices), halves), bias)

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        """name.weight, and name.bias if there is one."""
        bias = self.vector(f"{name}.bias", rows) if self.has(f"{name}.bias") else None
        return Linear(self.weight(f"{name}.weight", rows, columns), bias)

    def vector(self, name: str, size: int) -> Tensor:
        """float32."""
        return self.keep(self.tensor(name, (size,)).float())

    def table(self, name: str, rows: int, columns: int) -> Tensor:
        """An embedding, for `ops.embed`."""
        stored = self.tensor(name, (rows, columns))
        return self.keep(stored.to(self.kept(stored.dtype), copy=True))

    def pack(self, matrix: Tensor, halves: bool = False) -> Weight:
        weight = self.backend.pack(matrix, "bf16" if self.kept(matrix.dtype) == torch.bfloat16 else "f32", halves)
        self.bytes += weight.bytes
        return weight

    def keep(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.nbytes
        return tensor.to(self.backend.device)

    def kept(self, stored: torch.dtype) -> torch.dtype:
        """The type that a stored one is kept in."""
        half = stored.itemsize <= 2 and torch.bfloat16 in self.backend.caps.dtypes
        return torch.bfloat16 if half else torch.float32

    def close(self) -> None:
        """All is read. StartError for tensors that nobody asked for."""
        unused = sorted(name for name in self.checkpoint.names() - self.used if name.startswith(self.prefix))
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise StartError(
                f"{self.path} has {', '.join(unused[:3])}{more}, which heads of this kind do not have",
                "check that config.json and the weights belong together",
            )
        self.checkpoint.release()

    def demand(self, holds: bool, problem: str, cure: str = "use heads that were trained for this target") -> None:
        """StartError unless it holds."""
        if not holds:
            raise StartError(f"{self.path}: {problem}", cure)
