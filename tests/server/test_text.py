"""Loading, encoding off the event loop, offsets, end-of-sequence ids."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config import Config
from forerun.server.text import INLINE_CHARS, SHORT_CHARS, Tokenizer, TokenizerError, _with_bytes
from tests.server import tiny

MEGABYTE = ("the quick brown fox sees 12 한글 🧵, " * 40_000)[:1_000_000]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(tiny.byte_level())


def folder_of(path: Path, **files: object) -> Path:
    """A model folder with a tokenizer.json and the given JSON files."""
    tiny.byte_level().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("size", [10, INLINE_CHARS + 1, SHORT_CHARS + 1])
async def test_encode_is_the_same_on_every_path(byte_level: Tokenizer, size: int) -> None:
    text = MEGABYTE[:size]
    assert await byte_level.encode(text) == byte_level._rust.encode(text).ids
    assert [token.id for token in await byte_level.encode_offsets(text, list)] == byte_level._rust.encode(text).ids


async def test_special_tokens_are_added_when_asked() -> None:
    tokenizer = Tokenizer(tiny.llama())
    bos = tokenizer._rust.token_to_id("<s>")
    assert (await tokenizer.encode("hello"))[0] == bos
    assert bos not in await tokenizer.encode("hello", add_special_tokens=False)
    first, *rest = await tokenizer.encode_offsets("a hello", list)
    assert (first.id, first.text, first.start, first.stop) == (bos, "", 0, 0)
    assert rest[-1].stop == 7


@given(st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_offsets_are_bytes_and_name_their_text(text: str) -> None:
    tokenizer = Tokenizer(tiny.byte_level())
    tokens = list(tokenizer._offsets(text, True))
    data = text.encode()
    for token in tokens:
        assert data[token.start : token.stop].decode() == token.text
    assert not tokens or (tokens[0].start, tokens[-1].stop) == (0, len(data))


def test_offsets_of_tokens_inside_a_character_are_the_character() -> None:
    assert list(_with_bytes("aé🧵", [(0, 1), (1, 2), (1, 2), (2, 3), (0, 0)])) == [
        (0, 1, 0, 1), (1, 2, 1, 3), (1, 2, 1, 3), (2, 3, 3, 7), (0, 0, 0, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("call", [Tokenizer.encode, partial(Tokenizer.encode_offsets, render=list)])
async def test_a_megabyte_leaves_the_loop_responsive(byte_level: Tokenizer, call: Callable[[Tokenizer, str], Any]) -> None:
    """B15: while a long prompt is tokenized, the loop turns and short prompts pass."""
    work = asyncio.ensure_future(call(byte_level, MEGABYTE))
    gaps, last = [], time.perf_counter()
    while not work.done():
        await asyncio.sleep(0.002)
        await byte_level.encode("hello")
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    assert len(gaps) > 20, "the loop stood still (or the text is too short to tell)"
    assert sorted(gaps)[int(len(gaps) * 0.95)] < 0.3


async def test_short_texts_pass_a_queue_of_long_ones(byte_level: Tokenizer) -> None:
    long = [asyncio.ensure_future(byte_level.encode(MEGABYTE)) for _ in range(4)]
    await byte_level.encode(MEGABYTE[: SHORT_CHARS - 1])
    assert not all(work.done() for work in long)
    await asyncio.gather(*long)


RESIDENT = """
import asyncio, os
from forerun.server.text import Tokenizer
from tests.server import tiny
from tests.server.test_text import MEGABYTE

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def main():
    tokenizer = Tokenizer(tiny.byte_level())
    await tokenizer.encode(MEGABYTE[:100_000])
    print(resident())
    for _ in range(3):
        await tokenizer.encode(MEGABYTE)
        print(resident())
    tokenizer.close()

asyncio.run(main())
"""


def test_a_long_text_leaves_no_memory_behind() -> None:
    """In a process of its own: what other tests leave running would be counted too."""
    script = subprocess.run([sys.executable, "-c", RESIDENT], check=True, capture_output=True, text=True)
    before, *after = map(int, script.stdout.split())
    assert min(after) - before < 100 << 20


def test_token_text_and_special(byte_level: Tokenizer) -> None:
    rust = byte_level._rust
    eos, tool = rust.token_to_id("</s>"), rust.token_to_id("<tool>")
    assert (byte_level.is_special(eos), byte_level.is_special(tool)) == (True, False)
    assert byte_level.token_text(eos) == "</s>"
    assert byte_level.token_text(rust.token_to_id("Ġthe")) == " the"
    assert byte_level.token_text(rust.token_to_id("ðŁ")) == "\ufffd"
    assert byte_level.vocab_size == rust.get_vocab_size()
    assert byte_level.decode([eos, tool]) == "<tool>"


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"generation_config": {"eos_token_id": 3}}, [3]),
        ({"generation_config": {"eos_token_id": [5, 3]}}, [5, 3]),
        ({"tokenizer_config": {"eos_token": "</s>"}}, ["</s>"]),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}, "generation_config": {"eos_token_id": [7]}}, [7, "</s>"]),
        ({"config": {"eos_token_id": 9}}, [9]),
        ({"config": {"eos_token_id": 9}, "generation_config": {"eos_token_id": 4}}, [4]),
        ({"generation_config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": None}}, []),
        ({"tokenizer_config": {"eos_token": "<none>"}}, []),
    ],
)
def test_eos_ids(tmp_path: Path, files: dict[str, object], names: list[int | str]) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, **files), Config())
    assert tokenizer.eos_ids == tuple(name if isinstance(name, int) else tokenizer._rust.token_to_id(name) for name in names)


async def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    rust = tiny.byte_level()
    rust.enable_truncation(4)
    rust.enable_padding(length=64)
    rust.save(str(tmp_path / "tokenizer.json"))
    assert len(await Tokenizer.load(tmp_path, Config()).encode("a" * 20)) == 20


def test_tokenizer_name_wins(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "other").mkdir()
    folder_of(tmp_path / "other")
    config = Config.parse(["--model-id", "x", "--tokenizer-name", str(tmp_path / "other")], {})
    assert Tokenizer.load(tmp_path / "model", config).vocab_size
    config = Config.parse(["--model-id", "x", "--tokenizer-name", str(tmp_path / "none")], {})
    with pytest.raises(TokenizerError, match="--tokenizer-name"):
        Tokenizer.load(tmp_path / "model", config)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer .*--tokenizer-name"):
        Tokenizer.load(tmp_path, Config())


def test_a_broken_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load(tmp_path, Config())
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(TokenizerError, match="git lfs pull"):
        Tokenizer.load(tmp_path, Config())
    (tmp_path / "generation_config.json").write_text("{")
    tiny.byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"generation_config\.json cannot be read.*fetch"):
        Tokenizer.load(tmp_path, Config())
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja cannot be read.*fetch"):
        Tokenizer.load(tmp_path, Config())


def test_an_older_tokenizer_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache" / "hub"
    model.mkdir()
    rust = tiny.byte_level()
    parts = json.loads(rust.to_str())["model"]
    (model / "vocab.json").write_text(json.dumps(parts["vocab"]))
    (model / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in parts["merges"])]))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "hello"}))
    config = Config.parse(["--model-id", str(model), "--huggingface-hub-cache", str(cache)], {})
    made = Tokenizer.load(model, config)
    assert made._rust.encode("hello the").ids == rust.encode("hello the").ids
    assert made.eos_ids == (rust.token_to_id("hello"),)
    monkeypatch.setattr("forerun.server.text._convert", lambda *_: pytest.fail("converted twice"))
    assert Tokenizer.load(model, config)._rust.encode("hello").ids == made._rust.encode("hello").ids


OWN_CODE = """
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def __init__(self, vocab_file=None, **more):
        open(vocab_file + ".ran", "w").close()
        super().__init__(tokenizer_object=Tokenizer.from_file(vocab_file), **more)
    vocab_files_names = {"vocab_file": "own.vocab.json"}
"""


@pytest.mark.slow
def test_a_tokenizer_with_code_of_its_own_runs_only_with_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E07: the flag reaches every process, and nobody is asked on a terminal."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tmp_path / "model"
    model.mkdir()
    tiny.byte_level().save(str(model / "own.vocab.json"))
    (model / "own_tokenizer.py").write_text(OWN_CODE)
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(own))
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    flags = ["--model-id", str(model), "--huggingface-hub-cache", str(tmp_path / "cache" / "hub")]
    with pytest.raises(TokenizerError, match="--trust-remote-code"):
        Tokenizer.load(model, Config.parse(flags, {}))
    assert not (model / "own.vocab.json.ran").exists()
    made = Tokenizer.load(model, Config.parse([*flags, "--trust-remote-code"], {}))
    assert made._rust.encode("hello").ids == tiny.byte_level().encode("hello").ids
