"""Every registered drafter behind a whole server, by being registered: what clients hear over sockets is, bit for bit, what they hear
without guesses. The target is the engine tests' tiny model as a folder, so that heads which learned some of its answers fit it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.server import START_SECONDS, Server, environment, free_port, patience, running
from tests.e2e.test_life import kill_worker
from tests.engine.drafters import fitted
from tests.engine.drafters.companions import write_tiny
from tests.engine.test_identity import prompt_of
from tests.engine.test_registered import ALL, SPECS
from tests.engine.tiny import STOP, Alphabet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
COMMON = ("--threads", "1", "--dtype", "float32", "--max-total-tokens", "128", "--max-batch-total-tokens", "1024")
GUESSING = ("--speculate", "6", "--speculation-controller", "fixed")
REGEX = {"type": "regex", "value": "[a-e]{3}(-[a-e0-9]{1,9}){2,4}"}
KINDS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 2**64 - 1},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "watermark": True},
    {"typical_p": 0.8, "seed": 0, "temperature": 1.4, "top_n_tokens": 3},
    {"grammar": REGEX},
    {"grammar": REGEX, "do_sample": True, "seed": 5, "top_n_tokens": 2},
    {"decoder_input_details": True, "stop": ["a", "Q"]},
]


def write_ascii(folder: Path) -> Path:
    """The tiny model as a folder whose tokens are characters, so that grammars can be followed in it."""
    write_tiny(folder)
    words = [text.decode().replace(" ", "Ġ") for text in Alphabet.tokens[:STOP]]
    model = {"type": "BPE", "vocab": {word: id for id, word in enumerate([*words, "</s>"])}, "merges": [["{", '"']], "unk_token": None}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    stop = {"id": STOP, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {"version": "1.0", "model": model, "added_tokens": [stop], "pre_tokenizer": level, "decoder": level}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | dict.fromkeys(("normalizer", "post_processor", "truncation", "padding"))))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP}))
    return folder


def text(seed: int, length: int) -> str:
    """A prompt that the heads of `fitted.py` have learned the answer to."""
    return b"".join(Alphabet.tokens[token] for token in prompt_of(seed, length)).decode()


REQUESTS = [
    {"inputs": text(1 + number % 2, 21 if number % 2 == 0 else 5), "parameters": {"max_new_tokens": 30, "details": True, **kind}}
    for number, kind in enumerate(KINDS)
]
SEVERAL = {"prompt": text(1, 21), "n": 3, "seed": 7, "temperature": 0.8, "max_tokens": 30, "logprobs": 2, "model": "tgi"}
ASKED: list[tuple[str, dict[str, Any]]] = [*(("/generate", body) for body in REQUESTS), ("/v1/completions", SEVERAL)]
POLL_SECONDS = 0.005


async def said(session: aiohttp.ClientSession, server: Server, asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The answers, each with its numbers; all are on their way at once."""

    async def one(path: str, body: dict[str, Any]) -> Any:
        async with session.post(server.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            found = await response.json()
        for part in ("id", "created"):
            found.pop(part, None)
        found.get("details", {}).pop("speculation", None)
        return found

    return await asyncio.gather(*(one(*each) for each in asked))


@contextlib.contextmanager
def service(*command: str, log: Path) -> Iterator[str]:
    """A process that serves drafts on the port that stands in for PORT."""
    port = free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *(part.replace("PORT", str(port)) for part in command)], stdout=out, stderr=out, env=environment()
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in patience():
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError):
                assert json.load(urllib.request.urlopen(url + "/health", timeout=START_SECONDS))["workers"] >= 0
                break
        else:
            raise AssertionError("not ready: " + log.read_text())
        yield url
    finally:
        process.terminate()
        for _ in patience():
            if process.poll() is not None:
                break
        else:
            process.kill()
            raise AssertionError("it did not end: " + log.read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("drafters")
    made = {name: make(place / name) for name, make in fitted.FOLDERS.items()}
    stranger = write_tiny(place / "stranger", 7)
    target = write_ascii(place / "target")
    (stranger / "tokenizer.json").write_text((target / "tokenizer.json").read_text())
    return made | {"itself": target, "stranger": stranger}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    async def ask(server: Server) -> list[Any]:
        async with aiohttp.ClientSession() as session:
            return await said(session, server, ASKED)

    with running(folders["itself"], tmp_path_factory.mktemp("plain") / "log", *COMMON, "--speculator", "none") as server:
        first, second = asyncio.run(ask(server)), asyncio.run(ask(server))
        assert first == second and server.metric("forerun_drafted_tokens_total") == 0
    for answer, body in zip(first, REQUESTS):
        grammar = body["parameters"].get("grammar")  # type: ignore[attr-defined]
        assert grammar is None or re.fullmatch("[-a-e0-9]+", answer["generated_text"])
    assert len({choice["text"] for choice in first[-1]["choices"]}) == 3
    return first


async def compare(server: Server, expected: list[Any]) -> None:
    """Twice, since the second time some drafters know the answers; then with the worker killed in the middle. Starting a worker is most of
    what this takes; the answers are a tenth."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for _ in range(2):
            assert await said(session, server, ASKED) == expected
        assert server.metric("forerun_drafted_tokens_total") > 0
        before = server.metric("forerun_committed_tokens_total")
        going = asyncio.create_task(said(session, server, ASKED))
        while not going.done():
            await asyncio.sleep(POLL_SECONDS)  # whoever asks without a pause takes the processor that the answers need
            if await asyncio.to_thread(server.metric, "forerun_committed_tokens_total") >= before + 20:
                break
        kill_worker(server)
        assert await going == expected
    await asyncio.to_thread(server.wait)
    assert server.metric("forerun_speculation_failures_total") == 0


def test_there_is_one_for_each_name() -> None:
    assert all(any(name in re.split("[+=]", spec) for spec in ALL) for name in SPECS)


@pytest.mark.parametrize("spec", ALL)
async def test_clients_hear_what_they_hear_without(spec: str, folders: dict[str, Path], expected: list[Any], tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        places: dict[str, object] = dict(folders)
        if "{service}" in spec:
            command = (
                "-m",
                "forerun.cli",
                "draft-server",
                "--model-id",
                str(folders["itself"]),
                "--speculator",
                "suffix",
                "--port",
                "PORT",
            )
            places["service"] = stack.enter_context(service(*command, log=tmp_path / "service"))
        server = stack.enter_context(
            running(folders["itself"], tmp_path / "log", *COMMON, "--speculator", spec.format(**places), *GUESSING)
        )
        await compare(server, expected)


async def test_an_applications_own_model_drafts(folders: dict[str, Path], expected: list[Any], tmp_path: Path) -> None:
    """The ten lines of docs/drafters.md as a program of their own, with the target itself as the draft: nearly all its guesses hold."""
    page = (ROOT / "docs" / "drafters.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "draftserver" in code)
    code = code.replace('"DRAFT"', repr(str(folders["itself"]))).replace("9001", "PORT")
    with service("-c", code, log=tmp_path / "service") as url:
        flags = (*COMMON, "--speculator", f"remote={url},wait=20000", *GUESSING)
        with running(folders["itself"], tmp_path / "log", *flags) as server:
            async with aiohttp.ClientSession() as session:
                assert await said(session, server, ASKED[:2]) == expected[:2]
            body = {"inputs": text(1, 21), "parameters": {"max_new_tokens": 30, "details": True}}
            found = json.loads(server.ask("/generate", body, timeout=START_SECONDS)[1])["details"]["speculation"]
            assert found["accepted"] > 10, found
            assert server.metric("forerun_speculation_failures_total") == 0
