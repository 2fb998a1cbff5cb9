"""Is a model folder whole? Reads names, sizes and headers only, so it is quick on any model and needs no tensor library."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

LFS = b"version https://git-lfs"
WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
"""in the order in which they are preferred"""


class Unreadable(Exception):
    """A file that is there and says nothing. The message says what is wrong and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Folder:
    """What was found. `faults`: each says what is wrong and what to do; none means that loading can be tried."""

    architecture: str
    weights: str
    weight_bytes: int
    context_tokens: int | None
    chat_template: bool
    faults: tuple[str, ...]


def inspect(path: Path, allow_pickle: bool = False) -> Folder:
    """`path`: a model folder or a GGUF file."""
    if path.is_file():
        return Folder("in the file", path.name, path.stat().st_size, None, False, tuple(unreadable(path)))
    faults: list[str] = []
    config = _json(path / "config.json", faults, needed=not any(path.glob("*.gguf")))
    chat = _json(path / "tokenizer_config.json", faults, needed=False)
    weights, size = _weights(path, allow_pickle, faults)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")):
        if not any(path.glob("*.gguf")):
            faults.append(f"{path} has no tokenizer.json: add it, or give --tokenizer-name FOLDER")
    elif (path / "tokenizer.json").is_file() or (path / "tokenizer.json").is_symlink():
        faults += unreadable(path / "tokenizer.json")
    text = config.get("text_config", config)
    architecture = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
    template = "chat_template" in chat or any(path.glob("chat_template.*"))
    return Folder(architecture, weights, size, text.get("max_position_embeddings"), template, tuple(faults))


def _weights(path: Path, allow_pickle: bool, faults: list[str]) -> tuple[str, int]:
    """(what kind, bytes) of the weights that would be read."""
    for pattern in WEIGHTS:
        files = sorted(path.glob(pattern))
        if not files:
            continue
        for file in files:
            faults += unreadable(file) or (_truncated(file) if pattern == "*.safetensors" else [])
        faults += _missing_shards(path, files)
        if pattern == "*.bin" and not allow_pickle:
            faults.append(
                f"{path} has .bin weights only, which can run code when read: convert them to safetensors, or give --allow-pickle"
            )
        return f"{len(files)} {pattern.removeprefix('*.')}", sum(file.stat().st_size for file in files if file.exists())
    inside = sorted(file.parent.name for file in path.glob("*/*.safetensors"))
    hint = f"; the folder {path / inside[0]} has some: is it the model?" if inside else ""
    faults.append(f"{path} has no weights (*.safetensors, *.gguf): fetch the model again{hint}")
    return "none", 0


def _missing_shards(path: Path, files: list[Path]) -> list[str]:
    index = path / f"{'model' if files[0].suffix == '.safetensors' else 'pytorch_model'}{files[0].suffix}.index.json"
    if not index.is_file():
        return []
    faults: list[str] = []
    named = set(_json(index, faults, needed=True).get("weight_map", {}).values())
    missing = sorted(named - {file.name for file in files})
    return faults + ([f"{index.name} names files that are not there: {', '.join(missing)}. Fetch the model again"] if missing else [])


def unreadable(path: Path) -> list[str]:
    """Why a file that is listed in its folder cannot be what it should be; nothing if it can."""
    if path.is_symlink() and not path.exists():
        return [f"{path} is a link to a file that is not there: fetch the model again"]
    try:
        with path.open("rb") as file:
            if file.read(len(LFS)) != LFS:
                return []
    except OSError as wrong:
        return [f"{path} cannot be read ({wrong.strerror}): check its permissions, or fetch the model again"]
    return [f"{path} is a Git LFS pointer, not the file: run `git lfs pull` in the model folder"]


def text_of(path: Path) -> str | None:
    """What a file says, None where there is none. Raises Unreadable."""
    if not path.exists() and not path.is_symlink():
        return None
    for fault in unreadable(path):
        raise Unreadable(fault)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as wrong:
        raise Unreadable(f"{path} cannot be read ({wrong}): fetch the model again") from None


def object_of(path: Path) -> dict[str, Any]:
    """The JSON object in a file, an empty one where there is no file or another value in it. Raises Unreadable."""
    try:
        found = {} if (text := text_of(path)) is None else json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise Unreadable(f"{path} cannot be read as JSON ({wrong}): fetch the model again") from None
    return found if isinstance(found, dict) else {}


def _truncated(path: Path) -> list[str]:
    """A safetensors file is 8 bytes of header length, a JSON header, and data up to the largest offset in it."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length < size else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, LookupError, TypeError, AttributeError):
        return [f"{path} is not a safetensors file: fetch it again"]
    if length >= size or 8 + length + max(ends, default=0) > size:
        return [f"{path} is cut short ({size} bytes): fetch it again"]
    return []


def _json(path: Path, faults: list[str], needed: bool) -> dict[str, Any]:
    if needed and not path.exists() and not path.is_symlink():
        faults.append(f"{path} is missing: is {path.parent} a model folder?")
    try:
        return object_of(path)
    except Unreadable as wrong:
        faults.append(str(wrong))
        return {}
