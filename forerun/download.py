"""Fetches a model from the hub into the hub cache: files that are there are kept, a broken download is taken up again.

Both ends of a process of its own, so that the front never loads a hub client and never waits for one. The child
(`python -m forerun.download MODEL_ID REVISION CACHE PARTS…`) says one JSON object a line: {"done", "total"} in bytes, or {"error", "cure"}
and ends with 1. Knows which files a model is made of; `hub.py` finds them afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

BEAT_SECONDS = 1.0
TEXTS = (".json", ".model", ".tiktoken", ".jinja", ".txt")
"""configuration and tokenizer"""


class DownloadError(Exception):
    """`cure`: what the operator can do."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason)
        self.cure = cure


async def download(
    model_id: str, revision: str | None, cache: str, parts: Sequence[str], environment: dict[str, str], report: Callable[[int, int], None]
) -> None:
    """Returns when the cache holds the model. `parts`: of "weights", "pickles" and "code", beside what is always fetched;
    `report(done, total)` in bytes. Raises DownloadError. A cancelled download stops; what it has is kept."""
    command = (sys.executable, "-P", "-m", "forerun.download", model_id, revision or "main", cache, *parts)
    quiet = environment | {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=quiet)
    assert child.stdout is not None
    try:
        async for line in child.stdout:
            told = json.loads(line)
            if "error" in told:
                raise DownloadError(told["error"], told["cure"])
            report(told["done"], told["total"])
        if await child.wait():
            raise DownloadError(f"the download of {model_id} ended with exit code {child.returncode}", "see the lines above")
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def choose(files: dict[str, int], parts: Sequence[str]) -> list[str]:
    """The names to fetch of a repository's files (name → bytes): safetensors, else the one GGUF file, else pickles if allowed.
    Raises DownloadError when there is nothing to serve."""
    names = sorted(name for name in files if "/" not in name)
    chosen = [name for name in names if name.endswith(TEXTS) or (name.endswith(".py") and "code" in parts)]
    if "weights" not in parts:
        return chosen
    tensors = [name for name in names if name.endswith(".safetensors")]
    packed = [name for name in names if name.endswith(".gguf")]
    pickles = [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
    if tensors:  # some repositories hold the same weights once more in their maker's layout
        return chosen + ([name for name in tensors if name.startswith("model")] or tensors)
    if len(packed) == 1:
        return chosen + packed
    if packed:
        raise DownloadError(f"the repository has {len(packed)} GGUF files", "fetch one with `hf download ID FILE` and give its path")
    if pickles and "pickles" in parts:
        return chosen + pickles
    if pickles:
        raise DownloadError("the repository has .bin weights only, which can run code when read", "pass --allow-pickle if you trust it")
    raise DownloadError("the repository has no weights (*.safetensors, *.gguf)", "give the id of a model")


def fetch(model_id: str, revision: str, cache: Path, parts: Sequence[str]) -> None:
    """The child's work. Raises DownloadError, or what the hub client raises."""
    import huggingface_hub

    info = huggingface_hub.HfApi().model_info(model_id, revision=revision, files_metadata=True)
    files = {each.rfilename: each.size or 0 for each in info.siblings or []}
    chosen = choose(files, parts)
    folder = cache / ("models--" + model_id.replace("/", "--"))
    there = {name for name in chosen if (folder / "snapshots" / str(info.sha) / name).exists()}
    total = sum(files[name] for name in chosen)
    with _told(folder / "blobs", sum(files[name] for name in there), total):
        huggingface_hub.snapshot_download(model_id, revision=revision, cache_dir=cache, allow_patterns=chosen)
    _say(done=total, total=total)


@contextlib.contextmanager
def _told(blobs: Path, done: int, total: int) -> Iterator[None]:
    """Tell every second how much the folder has grown."""
    over, before = threading.Event(), _size(blobs)

    def tell() -> None:
        while not over.wait(BEAT_SECONDS):
            _say(done=min(total, done + _size(blobs) - before), total=total)

    teller = threading.Thread(target=tell)
    _say(done=done, total=total)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _size(blobs: Path) -> int:
    size = 0
    for path in blobs.glob("*"):
        with contextlib.suppress(OSError):  # it was complete and is called otherwise now
            size += path.stat().st_size
    return size


def explain(model_id: str, error: Exception) -> tuple[str, str]:
    """(what happened, what can be done) of whatever ended a download, told by its name: the client's classes have moved more than once."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    reason = f"{model_id} is not a folder here and cannot be fetched from the hub: {said}"
    elsewhere = f"fetch it where there is a network with `hf download {model_id}`, or give a model folder"
    if type(error) is DownloadError:
        return f"{model_id}: {said}", error.cure
    if "ModuleNotFoundError" in kinds:
        return reason, "pip install huggingface_hub, or give a model folder"
    if "GatedRepoError" in kinds:
        return reason, "accept the model's terms on the hub and set HF_TOKEN"
    if "RevisionNotFoundError" in kinds:
        return reason, "check --revision"
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return reason, "check the name; a private model needs HF_TOKEN"
    if kinds & {"OSError"} and getattr(error, "errno", None) in (errno.ENOSPC, errno.EACCES, errno.EROFS):
        return reason, "give a hub cache with room that can be written: --huggingface-hub-cache FOLDER"
    return reason, f"check the network and HF_ENDPOINT; or {elsewhere}"


def _say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


def main(arguments: Sequence[str]) -> int:
    model_id, revision, cache, *parts = arguments
    try:
        fetch(model_id, revision, Path(cache), parts)
    except Exception as error:
        reason, cure = explain(model_id, error)
        _say(error=reason, cure=cure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
