"""The speed bars end to end on a tiny model: every part runs, every bar has a figure. The figures themselves mean nothing here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from forerun.bench import process
from forerun.bench.foundation import Foundation, Settings
from forerun.bench.launched import Launched, StartFailed, ours
from forerun.engine.testmodel import write_model

TINY = Settings(
    starts=2, rounds=1, tokens=24, firsts=2, soak_requests=40, soak_seconds=5, front_rounds=1, front_tokens=8, short_seconds=0.3
)
FLAGS = ["--max-total-tokens", "256", "--max-batch-total-tokens", "8192"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    write_model("llama", 0, folder)
    return str(folder)


@pytest.mark.slow
async def test_every_bar_has_a_figure(model: str) -> None:
    foundation = Foundation(model, FLAGS, TINY, lambda line: None)
    bars = await foundation.run(Foundation.PARTS)
    assert len({bar.name for bar in bars}) == len(bars) == 10
    assert all(math.isfinite(bar.measured) for bar in bars)
    assert foundation.details["memory"]["requests"] == 36


async def test_the_front_alone(model: str) -> None:
    foundation = Foundation(model, FLAGS, TINY, lambda line: None)
    event, short = await foundation.run(["front"])
    assert 0 < event.measured < 10_000
    assert short.measured > 1
    assert "load generator" in foundation.remarks[0]


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"ended with [1-9]") as caught:
        async with Launched(ours(str(tmp_path / "nothing"), [])):
            pass
    assert "nothing" in str(caught.value)


async def test_a_server_is_watched_and_stopped(model: str) -> None:
    async with Launched(ours(model, [*FLAGS, "--echo"])) as server:
        assert server.memory > process.resident_bytes(server.front) / 2
        assert server.ready_seconds > 0
        assert server.worker != server.front
        assert (await server.metrics())["tgi_request_count"] == 0
    assert server.exit_code == 0
