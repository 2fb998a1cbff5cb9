"""Text to token ids and back: the tokenizer of the model, off the event loop where it takes long.

Owns loading (tokenizer.json, or one made from older files) and the threads. Increments are in `detokenize.py`, stops in `stops.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from forerun import modelfolder
from forerun.config import Config
from forerun.hub import ModelNotFound, locate
from forerun.server.detokenize import Detokenizer, vocabulary
from forerun.server.schema import SimpleToken
from forerun.server.stops import StopMatcher
from forerun.server.template import ChatTemplates, load_templates

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer", "TokenizerError"]

T = TypeVar("T")

INLINE_CHARS = 1_000
"""up to here a hand-over to a thread costs more than tokenizing (well under a millisecond)"""
INLINE_RENDERED = 10_000
"""a hundred short messages count for so many; templates take 0.04 ms (ChatML) to 1.3 ms (Qwen3) for them"""
SHORT_CHARS = 50_000
"""longer texts have threads of their own, so that a queue of megabyte prompts does not hold up the others"""
CONVERT_SECONDS = 300

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's; other C libraries have none"""


class TokenizerError(Exception):
    """The tokenizer of a model cannot be had. The message says what is missing and what to do."""


class Tokenizer:
    """Safe to use from the event loop. `templates`: the model's chat templates. `eos_ids`: ids that end an answer. `vocab_size` counts
    added tokens."""

    def __init__(
        self, rust: tokenizers.Tokenizer, eos_ids: Sequence[int] = (), workers: int = 2, templates: ChatTemplates | None = None
    ) -> None:
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self._special = frozenset(token_id for token_id, token in rust.get_added_tokens_decoder().items() if token.special)
        self.is_special: Callable[[int], bool] = self._special.__contains__
        self._vocabulary = vocabulary(rust, self._special)
        self._short = ThreadPoolExecutor(1, "tokenize-short")
        self._long = ThreadPoolExecutor(workers, "tokenize-long")
        self.templates = templates or ChatTemplates({})
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.vocab_size: int = rust.get_vocab_size(with_added_tokens=True)
        self.token_text = lru_cache(maxsize=1 << 16)(self._token_text)

    @classmethod
    def load(cls, folder: Path, config: Config) -> Tokenizer:
        """The tokenizer of a model folder (or of a GGUF file). Blocks for seconds, so call it in a thread. Raises TokenizerError."""
        name = config.model.tokenizer_name
        if name is not None:
            try:
                folder = locate(name, None, config.model.huggingface_hub_cache)
            except ModelNotFound as missing:
                raise TokenizerError(f"--tokenizer-name: {missing}") from None
        with _files(folder, config) as files:
            rust = _read(files / "tokenizer.json")
            templates = _templates(folder, files, config.model.tokenizer_config_path)
            return cls(rust, _eos_ids(folder, files, rust), config.serving.validation_workers, templates)

    def close(self) -> None:
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self._run(self._encode, text, add_special_tokens)

    def count(self, text: str) -> int:
        """How many tokens a prompt has that brings its special tokens itself. Blocks: call it in a thread."""
        return len(self._encode(text, False))

    async def encode_offsets(self, text: str, render: Callable[[Iterator[SimpleToken]], T], add_special_tokens: bool = True) -> T:
        """Ids with the bytes of `text` they stand for; tokens that stand for none (special ones) have 0, 0 and no text. What `render` makes
        of them, which is called where the text is tokenized: a million tokens are neither held as objects nor encoded on the loop."""
        return await self._run(lambda text, special: render(self._offsets(text, special)), text, add_special_tokens)

    async def aside(self, size: int, call: Callable[[], T]) -> T:
        """What a template makes of about `size` characters: at once where that is little, else where texts of that length are tokenized, so
        that no one's conversation of thousands of messages holds up the others' streams, nor megabytes a usual one."""
        if size <= INLINE_RENDERED:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._short if size <= SHORT_CHARS else self._long, call)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._rust.decode(ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, context_ids: Sequence[int]) -> Detokenizer:
        """For the tokens that follow `context_ids` (a prompt: whole characters)."""
        return self._vocabulary.detokenizer(context_ids)

    def special_id(self, text: str) -> int | None:
        """The id of a special token; None for any other text."""
        token: int | None = self._rust.token_to_id(text)
        return token if token in self._special else None

    def _token_text(self, token_id: int) -> str:
        """The text of a token on its own, special or not (TGI's text of prompt tokens, of `top_tokens` and of special tokens)."""
        return self._rust.decode([token_id], skip_special_tokens=False)

    async def _run(self, call: Callable[[str, bool], T], text: str, add_special_tokens: bool) -> T:
        if len(text) <= INLINE_CHARS:
            return call(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        if len(text) <= SHORT_CHARS:
            return await loop.run_in_executor(self._short, call, text, add_special_tokens)
        return await loop.run_in_executor(self._long, _then_trim, call, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Only the batch calls of tokenizers release the interpreter lock.
        return self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _offsets(self, text: str, add_special_tokens: bool) -> Iterator[SimpleToken]:
        encoding = self._rust.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        # One span at a time: `encoding.offsets` would hold the interpreter lock for all of them.
        spans = (encoding.token_to_chars(index) or (0, 0) for index in range(len(encoding)))
        for token_id, (start, stop, first, last) in zip(encoding.ids, _with_bytes(text, spans)):
            yield SimpleToken(id=token_id, text=text[start:stop], start=first, stop=last)


def _then_trim(call: Callable[[str, bool], T], text: str, add_special_tokens: bool) -> T:
    """A megabyte of text takes some 100 MB while it is tokenized, which the C library would keep for ever."""
    try:
        return call(text, add_special_tokens)
    finally:
        if _trim is not None:
            _trim(0)


def _with_bytes(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop) in characters, with the same in UTF-8 bytes. Starts never go back, except to (0, 0), which stands for no text."""
    chars = size = 0
    for start, stop in spans:
        if not stop:
            yield 0, 0, 0, 0
            continue
        size += len(text[chars:start].encode())
        chars = start
        yield start, stop, size, size + len(text[start:stop].encode())


def _read(path: Path) -> tokenizers.Tokenizer:
    for fault in modelfolder.unreadable(path):
        raise TokenizerError(fault)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as wrong:  # the bindings raise plain Exception
        raise TokenizerError(f"{path} cannot be read: {wrong}. Fetch the model again, or give another with --tokenizer-name") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        return modelfolder.object_of(path)
    except modelfolder.Unreadable as wrong:
        raise TokenizerError(str(wrong)) from None


def _eos_ids(folder: Path, files: Path, rust: tokenizers.Tokenizer) -> list[int]:
    """What generation_config.json says, and the tokenizer's own; config.json only if both are silent."""

    def ids(value: object) -> list[int]:
        return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]

    found = ids(_json(folder / "generation_config.json").get("eos_token_id"))
    token = (_json(folder / "tokenizer_config.json") or _json(files / "tokenizer_config.json")).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str):
        found += ids(rust.token_to_id(content))
    return found or ids(_json(folder / "config.json").get("eos_token_id"))


def _templates(folder: Path, files: Path, config_path: str | None) -> ChatTemplates:
    """The folder's, else those that came with the converted tokenizer. Raises TokenizerError for a file that was named and is not there."""
    if config_path is not None and not Path(config_path).is_file():
        raise TokenizerError(f"--tokenizer-config-path: there is no file {config_path}")
    try:
        if config_path is not None:
            return load_templates(folder, Path(config_path))
        return load_templates(folder) or load_templates(files)
    except modelfolder.Unreadable as wrong:
        raise TokenizerError(str(wrong)) from None


@contextlib.contextmanager
def _files(folder: Path, config: Config) -> Iterator[Path]:
    """A folder with a tokenizer.json: the model's own, or one made by transformers in a process of its own and kept beside the hub cache
    if that can be written."""
    if (folder / "tokenizer.json").is_file():
        yield folder
        return
    if not _sources(folder):
        raise TokenizerError(
            f"{folder} has no tokenizer (tokenizer.json, or files to make one from). Add it, or give --tokenizer-name FOLDER"
        )
    kept = _kept(folder, config)
    if kept and kept.is_file():
        yield kept.parent
        return
    with tempfile.TemporaryDirectory(prefix="forerun-tokenizer-") as work:
        made = Path(work, "made")
        _convert(folder, made, config)
        if kept:
            _keep(made, kept.parent)
        yield made


def tokenizer_file(folder: Path, config: Config) -> Path | None:
    """The tokenizer.json that `Tokenizer.load` reads, or makes and keeps; None when it keeps none."""
    if config.model.tokenizer_name is not None:
        try:
            folder = locate(config.model.tokenizer_name, None, config.model.huggingface_hub_cache)
        except ModelNotFound:
            return None  # `load` says so
    plain = folder / "tokenizer.json"
    return plain if plain.is_file() else _kept(folder, config)


def _kept(folder: Path, config: Config) -> Path | None:
    """Where a tokenizer that was made of these files is kept."""
    stamp = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in _sources(folder)]
    hub = config.model.huggingface_hub_cache
    name = hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:32]
    return Path(hub).parent / "forerun-tokenizers" / name / "tokenizer.json" if hub and stamp else None


def _sources(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else sorted(path for path in folder.glob("*") if path.is_file() and _is_source(path.name))


def _is_source(name: str) -> bool:
    return name.endswith((".model", ".tiktoken", ".gguf")) or name in (
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tekken.json",
        "tokenizer_config.json",
    )


def _convert(folder: Path, made: Path, config: Config) -> None:
    command = [sys.executable, "-m", "forerun.engine.convert_tokenizer", str(folder), str(made)]
    command += ["--trust-remote-code"] if config.model.trust_remote_code else []
    try:
        done = subprocess.run(command, env=config.worker_environment(), capture_output=True, text=True, timeout=CONVERT_SECONDS)
    except subprocess.TimeoutExpired:
        raise TokenizerError(f"making a tokenizer.json for {folder} took over {CONVERT_SECONDS} s: make it once by hand") from None
    if done.returncode or not (made / "tokenizer.json").is_file():
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        cure = "" if config.model.trust_remote_code else "; if its tokenizer is Python code of the model, give --trust-remote-code"
        raise TokenizerError(f"{folder} has no tokenizer.json and transformers could not make one: {said}{cure}")


def _keep(made: Path, kept: Path) -> None:
    """Best effort: a cache that cannot be written (a read-only image) costs the conversion at each start."""
    part = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(made, part)
        part.rename(kept)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
