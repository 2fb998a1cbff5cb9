"""Where a model's files are: in a folder, a GGUF file, a folder of the hub cache, or the cache under a hub id. Never uses the network
(`download.py` does)."""

from __future__ import annotations

import re
from pathlib import Path

from forerun import modelfolder


class ModelNotFound(Exception):
    """The message says what was looked for and what to give instead."""


def locate(model_id: str, revision: str | None = None, hub_cache: str | None = None) -> Path:
    """The folder (or GGUF file) of `model_id`. Raises ModelNotFound."""
    path = Path(model_id).expanduser()
    if path.is_dir():
        return _snapshot(path, revision) if (path / "snapshots").is_dir() else path
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ModelNotFound(f"{path} is a file: give the folder that holds it, or a .gguf file")
    if model_id.startswith(("/", "./", "../", "~")) or model_id.count("/") > 1:
        raise ModelNotFound(f"no folder {model_id}")
    folder = Path(hub_cache or ".").expanduser() / ("models--" + model_id.replace("/", "--"))
    if hub_cache and (folder / "snapshots").is_dir():
        return _snapshot(folder, revision)
    raise ModelNotFound(
        f"no model {model_id}: it is not a folder, and the hub cache {hub_cache or '(none)'} does not hold it. "
        f"Give a model folder, or fetch it first with `hf download {model_id}`"
    )


def commit(model_id: str, revision: str | None, hub_cache: str) -> str | None:
    """The commit of a model that comes from the hub's cache; None for any other folder."""
    try:
        folder = locate(model_id, revision, hub_cache)
    except ModelNotFound:
        return None
    return folder.name if folder.parent.name == "snapshots" else None


def must_fetch(model_id: str, revision: str | None, hub_cache: str, weights: bool = True) -> bool:
    """Is a hub id meant that the cache does not hold, or (`weights`) not whole?"""
    if Path(model_id).expanduser().exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model_id):
        return False
    try:
        folder = locate(model_id, revision, hub_cache)
    except ModelNotFound:
        return True
    return weights and bool(modelfolder.inspect(folder, allow_pickle=True).faults)


def _snapshot(folder: Path, revision: str | None) -> Path:
    """A cached repository holds refs/<branch> = commit and snapshots/<commit>/ = that commit's files."""
    name = revision or "main"
    reference = folder / "refs" / name
    commit = reference.read_text().strip() if reference.is_file() else name
    there = sorted(path.name for path in (folder / "snapshots").iterdir() if path.is_dir())
    if commit in there:
        return folder / "snapshots" / commit
    matches = [found for found in there if found.startswith(commit)] if revision else there
    if len(matches) == 1:
        return folder / "snapshots" / matches[0]
    raise ModelNotFound(
        f"{folder} does not hold one snapshot of revision {name}; it holds {', '.join(there) or 'none'}. Give one of them as --revision"
    )
