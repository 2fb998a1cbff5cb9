"""The command line end to end against a scripted server: table, JSON, picture, exit codes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.bench.cli import main
from tests.bench.fake import Fake, serving


@pytest.fixture
def fake() -> Iterator[Fake]:
    """Serves from a loop in a thread of its own, because the command line runs its own loop."""
    fake, ready, loop = Fake(gap=0.002), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving(fake):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield fake
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def test_a_closed_loop_with_picture(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "x.json"
    code = main(["load", "--url", fake.url, "--streams", "1,3", "--requests", "6", "--out", str(out), "--plot", "--api-key", "secret"])
    assert code == 0
    result = json.loads(out.read_text())
    assert [point["streams"] for point in result["points"]] == [1, 3]
    assert all(point["tokens"] == 6 * fake.tokens and point["requests"] == 6 for point in result["points"])
    assert result["machine"]["cores"] >= 1
    assert "secret" not in out.read_text()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "3 streams" in capsys.readouterr().out


def test_what_it_costs(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.json"
    assert main(["load", "--url", fake.url, "--requests", "2", "--warmup", "0", "--out", str(out), "--device-hour-price", "3.6"]) == 0
    (point,) = json.loads(out.read_text())["points"]
    assert point["cost"]["request"] == pytest.approx(0.001 / point["requests_per_second"])
    assert "a million tokens" in capsys.readouterr().out


def test_an_open_loop_from_a_file_of_prompts(fake: Fake, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n')
    out = tmp_path / "x.json"
    options = ["--rate", "50", "--burstiness", "0.5", "--seconds", "0.3", "--prompts", str(prompts), "--warmup", "0"]
    assert main(["load", "--url", fake.url, "--api", "openai-chat", *options, "--out", str(out)]) == 0
    (point,) = json.loads(out.read_text())["points"]
    assert (point["rate"], point["burstiness"]) == (50, 0.5)
    assert {request["messages"][0]["content"] for request in fake.requests} <= {"one", "two"}


def test_failed_requests_are_an_exit_code(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.refuse = 2
    assert main(["load", "--url", fake.url, "--requests", "4", "--warmup", "0", "--out", str(tmp_path / "x.json")]) == 1
    assert "2 × HTTP 429" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--requests", "1", "--url", "ftp://x"], "http://host:port"),
        (["--url", "http://127.0.0.1:9"], "how much to send"),
        (["--requests", "1", "--url", "http://127.0.0.1:9", "--prompts", "/nonexistent"], "/nonexistent"),
        (["--requests", "1", "--url", "http://127.0.0.1:9", "--ignore-eos"], "--ignore-eos"),
        (["--requests", "1", "--url", "http://127.0.0.1:9", "--rate", "0", "--warmup", "0"], "positive"),
    ],
)
def test_wrong_usage_names_the_cure(options: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["load", *options, "--out", str(tmp_path / "x.json")])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
