"""A model that is not here is fetched once, from a hub that runs on this machine; what goes wrong is said with its cure."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.download import DownloadError, choose, download, explain
from forerun.hub import locate, must_fetch
from tests.forerun.fakehub import COMMIT, Hub, running
from tests.forerun.served import client, kill, served, until, write_folder

FILES = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": b"\2" + bytes(7) + b"{}" + bytes(300_000), "README.md": b"hi"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub("org/name", dict(FILES))) as hub:
        yield hub


async def fetched(hub: Hub, cache: Path, *parts: str, name: str = "org/name", revision: str | None = None) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    environment = dict(os.environ, HF_ENDPOINT=hub.url)
    await download(name, revision, str(cache), parts, environment, lambda done, total: told.append((done, total)))
    return told


async def test_what_is_fetched_is_found(hub: Hub, tmp_path: Path) -> None:
    assert must_fetch("org/name", None, str(tmp_path))
    told = await fetched(hub, tmp_path, "weights")
    assert told[0][0] == 0 and told[-1] == (300_015, 300_015)
    folder = locate("org/name", None, str(tmp_path))
    assert folder.name == COMMIT and {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not must_fetch("org/name", None, str(tmp_path))


async def test_a_download_that_broke_off_is_taken_up_again(hub: Hub, tmp_path: Path) -> None:
    await fetched(hub, tmp_path)
    assert must_fetch("org/name", None, str(tmp_path)), "there is a snapshot, but no weights in it"
    assert not must_fetch("org/name", None, str(tmp_path), weights=False)
    hub.broken = "model.safetensors"
    assert (await fetched(hub, tmp_path, "weights"))[-1] == (300_015, 300_015)
    folder = locate("org/name", None, str(tmp_path))
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert sum(asked.startswith("GET") and asked.endswith("config.json") for asked in hub.asked) == 1, "what is there is kept"


@pytest.mark.parametrize(
    ("names", "parts", "chosen"),
    [
        (["config.json", "a.safetensors"], ["weights"], ["config.json", "a.safetensors"]),
        (["config.json", "model-1.safetensors", "consolidated.safetensors"], ["weights"], ["config.json", "model-1.safetensors"]),
        (["model.safetensors", "m.gguf", "pytorch_model.bin", "original/x.safetensors"], ["weights", "pickles"], ["model.safetensors"]),
        (["config.json", "m.gguf"], ["weights"], ["config.json", "m.gguf"]),
        (["config.json", "m.safetensors", "code.py"], [], ["config.json"]),
        (["code.py", "m.safetensors", "tok.model", "chat_template.jinja"], ["weights", "code"],
         ["chat_template.jinja", "code.py", "tok.model", "m.safetensors"]),
        (["pytorch_model.bin", "pytorch_model.bin.index.json", "training_args.bin"], ["weights", "pickles"],
         ["pytorch_model.bin.index.json", "pytorch_model.bin"]),
    ],
)  # fmt: skip
def test_choice(names: list[str], parts: list[str], chosen: list[str]) -> None:
    assert choose(dict.fromkeys(names, 1), parts) == chosen


@pytest.mark.parametrize(
    ("names", "cure"),
    [(["pytorch_model.bin"], "--allow-pickle"), (["a.gguf", "b.gguf"], "hf download ID FILE"), (["README.md"], "give the id of a model")],
)
def test_nothing_to_serve(names: list[str], cure: str) -> None:
    with pytest.raises(DownloadError) as error:
        choose(dict.fromkeys(names, 1), ["weights"])
    assert cure in error.value.cure


async def test_what_goes_wrong_is_said_with_its_cure(hub: Hub, tmp_path: Path) -> None:
    async def failing(**more: str | None) -> DownloadError:
        with pytest.raises(DownloadError, match="org/") as error:
            await fetched(hub, tmp_path, "weights", **more)  # type: ignore[arg-type]
        return error.value

    assert "check the name" in (await failing(name="org/other")).cure
    assert "--revision" in (await failing(revision="v9")).cure
    hub.gated = True
    assert "HF_TOKEN" in (await failing()).cure
    hub.url = "http://127.0.0.1:9"
    assert "hf download org/name" in (await failing()).cure


def test_a_machine_without_the_client_and_a_cache_without_room() -> None:
    assert "pip install huggingface_hub" in explain("m", ModuleNotFoundError("No module named 'huggingface_hub'"))[1]
    assert "--huggingface-hub-cache" in explain("m", OSError(28, "No space left on device"))[1]


def test_only_hub_ids_are_looked_for_on_the_hub(tmp_path: Path) -> None:
    for no_id in (str(tmp_path), "/no/where", "./no", "a/b/c", "~/no", "", "a b"):
        assert not must_fetch(no_id, None, str(tmp_path)), no_id
    for an_id in ("gpt2", "org/name", "Org-1/name_2.0"):
        assert must_fetch(an_id, None, str(tmp_path)), an_id


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Hub]:
    """A hub with what an echo server needs."""
    folder = tmp_path / "original"
    folder.mkdir()
    write_folder(folder)
    with running(Hub("org/name", {path.name: path.read_bytes() for path in folder.iterdir()})) as hub:
        yield hub


async def test_a_server_fetches_its_model_once(echo: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", echo.url)
    cache = ("--huggingface-hub-cache", str(tmp_path / "hub"))
    for offline in (False, True):
        before = len(echo.asked)
        with served(tmp_path, *cache, *["--hf-hub-offline"] * offline, model="org/name") as server:
            await server.ready()
        assert (len(echo.asked) == before) is offline
    with served(tmp_path, "--huggingface-hub-cache", str(tmp_path / "other"), "--hf-hub-offline", model="org/name") as server:
        assert await server.exit_code() == 1
        assert "nothing was downloaded" in server.log() and "hf download org/name" in server.log()


async def test_a_server_that_fetches_answers_and_can_be_stopped(echo: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", echo.url)
    echo.held.clear()
    with served(tmp_path, "--huggingface-hub-cache", str(tmp_path / "hub"), model="org/name") as server:
        async with client(await server.listening()) as session:
            await until(lambda: any("resolve" in asked for asked in echo.asked))
            async with session.get("/health") as response:
                assert response.status == 503
            async with session.post("/generate", json={"inputs": "x"}) as response:
                assert response.status == 429
        before = time.monotonic()
        kill(server.pid, signal.SIGTERM)
        assert await server.exit_code() == 0 and time.monotonic() - before < 5
