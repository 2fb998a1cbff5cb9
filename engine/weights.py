"""Where a model's tensors lie on disk, and how to read them by name.

Owns: which files of a model folder are the weights, the safetensors format, and the memory mapping. Does not know: where the folder is
(`forerun/hub.py`), and what a tensor is for.

A tensor from `read` may be a view of the mapped file: pack it or copy it, then call `release`, and its pages leave this process's
memory. So a load needs the packed weights plus what is read between two `release` calls.
"""

from __future__ import annotations

import json
import math
import mmap
import pickle
import struct
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.engine.errors import StartError
from forerun.kernels.quant import Codes

SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Checkpoint(Protocol):
    """A model's tensors, by the names of the Hugging Face layout. `config`: what `config.json` would say, if the file holds it itself
    (GGUF), else None."""

    @property
    def config(self) -> dict[str, Any] | None: ...

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor:
        """The tensor, in any floating type. KeyError if there is none of this name."""
        ...

    def codes(self, name: str) -> Codes | None:
        """The matrix as it is quantised in the file; None if it is stored as numbers."""
        ...

    def release(self) -> None:
        """What was read so far is no longer needed in memory."""
        ...


class MappedFile:
    """A file as memory. Mapped privately, so that views are ordinary writable tensors and the file never changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
            if not self.size:
                raise StartError(f"{path} is empty", "fetch the model again")
            with path.open("rb") as file:
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:  # a link of the hub cache whose file is gone, or a file of somebody else
            raise StartError(f"{path} cannot be read: {error.strerror}", "check its permissions, or fetch the model again") from error
        if self.memory[:20] == b"version https://git-":
            raise StartError(f"{path} is a Git LFS pointer, not the file itself", "run `git lfs pull` in the model folder")

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        count = math.prod(shape)
        if offset + count * dtype.itemsize > self.size:
            raise StartError(f"{self.path} is cut short ({self.size} bytes)", "fetch the model again")
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset).view(shape)

    def release(self) -> None:
        """Drops the pages from this process's memory; a view that is still alive reads them again from the file."""
        self.memory.madvise(mmap.MADV_DONTNEED)


class Safetensors:
    """One `.safetensors` file: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, data."""

    config: dict[str, Any] | None = None

    def __init__(self, path: Path) -> None:
        self.file = MappedFile(path)
        length = struct.unpack("<Q", self.file.memory[:8])[0] if self.file.size >= 8 else 0
        self.start = 8 + length
        if not length or self.start > self.file.size:
            raise StartError(f"{path} is not a safetensors file or is cut short", "fetch the model again")
        try:
            header = json.loads(self.file.memory[8 : self.start])
        except ValueError as error:
            raise StartError(f"{path} has a broken header", "fetch the model again") from error
        header.pop("__metadata__", None)
        self.entries: dict[str, dict[str, Any]] = header
        if self.start + max((entry["data_offsets"][1] for entry in header.values()), default=0) > self.file.size:
            raise StartError(f"{path} is cut short ({self.file.size} bytes)", "fetch the model again")

    def names(self) -> set[str]:
        return set(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name]["shape"])

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        dtype = SAFETENSORS_TYPES.get(entry["dtype"])
        if dtype is None:
            raise StartError(f"{self.file.path}: {name} has type {entry['dtype']}", "convert the checkpoint to bfloat16")
        return self.file.view(dtype, tuple(entry["shape"]), self.start + entry["data_offsets"][0])

    def codes(self, name: str) -> Codes | None:
        return None

    def release(self) -> None:
        self.file.release()


class Pickled:
    """One `pytorch_model.bin`, read with `weights_only`: tensors, no code."""

    config: dict[str, Any] | None = None

    def __init__(self, path: Path) -> None:
        try:
            self.tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise StartError(f"{path} is not a plain pickle of tensors, or is cut short", "use a checkpoint with *.safetensors") from error

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def codes(self, name: str) -> Codes | None:
        return None

    def release(self) -> None:
        return None


class Shards:
    """Several files as one checkpoint. `files`: tensor name → the file that holds it."""

    config: dict[str, Any] | None = None

    def __init__(self, files: dict[str, Checkpoint]) -> None:
        self.files = files
        self.opened = list({id(file): file for file in files.values()}.values())

    def names(self) -> set[str]:
        return set(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files[name].shape(name)

    def read(self, name: str) -> Tensor:
        return self.files[name].read(name)

    def codes(self, name: str) -> Codes | None:
        return self.files[name].codes(name)

    def release(self) -> None:
        for file in self.opened:
            file.release()


def read_config(folder: Path) -> dict[str, Any] | None:
    """`config.json` of a model folder; None if there is none (a folder with a GGUF file alone)."""
    path = folder / "config.json"
    if not folder.is_dir() or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise StartError(f"{path} is not JSON: {error}", "fetch the model again") from error
    if not isinstance(config, dict):
        raise StartError(f"{path} is not a JSON object", "fetch the model again")
    return config


def open_checkpoint(path: Path, allow_pickle: bool = False) -> Checkpoint:
    """The weights of a model folder, or of one file. Safetensors before GGUF before pickles. StartError if there are none."""
    if path.is_file():
        return open_file(path, allow_pickle)
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (path / index).is_file():
            return open_index(path, index, allow_pickle)
    for pattern in ("model.safetensors", "*.safetensors", "*.gguf", "pytorch_model.bin"):
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return open_file(found[0], allow_pickle)
        if found:
            names = ", ".join(file.name for file in found)
            raise StartError(f"{path} has several weight files and no index ({names})", "give the file, or fetch the model with its index")
    raise StartError(f"{path} has no weights", "fetch *.safetensors of this model, or a GGUF file")


def open_file(path: Path, allow_pickle: bool) -> Checkpoint:
    from forerun.engine.gguf import GGUF

    if path.suffix == ".safetensors":
        return Safetensors(path)
    if path.suffix == ".gguf":
        return GGUF(path)
    if path.suffix in (".bin", ".pt", ".pth"):
        refuse_pickle(path, allow_pickle)
        return Pickled(path)
    raise StartError(f"{path} is no kind of weights this server reads", "give a folder with *.safetensors, or a GGUF file")


def refuse_pickle(path: Path, allow_pickle: bool) -> None:
    if not allow_pickle:
        raise StartError(
            f"{path} is a pickle, which may carry code",
            "use a checkpoint with *.safetensors, or pass --allow-pickle if you trust its source",
        )


def open_index(folder: Path, index: str, allow_pickle: bool) -> Checkpoint:
    """A sharded checkpoint: {"weight_map": {tensor name: file name}}."""
    weight_map: dict[str, str] = json.loads((folder / index).read_text())["weight_map"]
    missing = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
    if missing:
        raise StartError(f"{folder} lacks {', '.join(missing)}, which {index} names", "finish the download of this model")
    files = {file: open_file(folder / file, allow_pickle) for file in sorted(set(weight_map.values()))}
    return Shards({name: files[file] for name, file in weight_map.items()})
