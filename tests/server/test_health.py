"""Health in every phase: what is asked, and what each answer means to whoever probes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from forerun import hub
from forerun.messages import Progress
from forerun.router.observer import StepReport
from forerun.router.request import Failure
from forerun.router.service import Phase
from forerun.server import health
from tests.server.front import runs, serve, stuck, until

TGI = ["/health", "/ping", "/", "/health/ready"]


@pytest.mark.parametrize("path", [*TGI, "/health/live", "/health/generate"])
async def test_healthy_is_empty(path: str) -> None:
    async with serve() as front:
        response, body = await front.get(path)
        assert (response.status, body) == (200, b"")
        async with front.session.head(front.url + path) as response:
            assert response.status == 200


@pytest.mark.parametrize(("phase", "live"), [(Phase.LOADING, 200), (Phase.READY, 200), (Phase.DRAINING, 200), (Phase.FAILED, 503)])
async def test_phases(phase: Phase, live: int) -> None:
    async with serve() as front:
        front.router.phase = phase
        for path in [*TGI, "/health/generate"]:
            response, body = await front.get(path)
            assert response.status == (200 if phase is Phase.READY else 503)
            if response.status == 503:
                assert json.loads(body)["error_type"] == "healthcheck"
        assert (await front.get("/health/live"))[0].status == live


async def test_loading_shows_its_progress() -> None:
    async with serve() as front:
        front.router.phase = Phase.LOADING
        assert json.loads((await front.get("/health"))[1]) == {"error": "loading", "error_type": "healthcheck"}
        front.router.progress = Progress("packing", 3, 10)
        assert json.loads((await front.get("/health"))[1]) == {
            "error": "packing: 3 of 10",
            "error_type": "healthcheck",
            "progress": {"stage": "packing", "done": 3, "total": 10},
        }


async def test_a_worker_without_a_tokenizer_is_not_ready() -> None:
    """Whoever is healthy takes requests: health and inference must not contradict each other while one half still loads."""
    async with serve() as front:
        front.services.tokenizer, kept = None, front.services.tokenizer
        for path in TGI:
            assert (await front.get(path))[0].status == 503
        assert (await front.get("/health/live"))[0].status == 200
        assert (await front.post("/generate", {"inputs": "x"}))[0] == 429
        front.services.tokenizer = kept
        assert (await front.get("/health"))[0].status == 200 and (await front.post("/generate", {"inputs": "x"}))[0] == 200


async def test_failure_is_named() -> None:
    async with serve() as front:
        front.router.phase = Phase.FAILED
        front.router.failure = Failure("the worker died three times", "generation", 500)
        assert "three times" in json.loads((await front.get("/health/live"))[1])["error"]


async def test_a_worker_without_a_sign_of_life_is_unhealthy_but_worth_keeping() -> None:
    async with serve() as front:
        front.router.beat = 60.0
        assert [(await front.get(path))[0].status for path in ("/health", "/health/ready", "/health/live")] == [503, 503, 200]


async def test_generate_probe_fails_when_no_token_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_SECONDS", 0.1)
    async with serve(script=stuck, step_seconds=0.01) as front:
        responses = await asyncio.gather(*(front.get("/health/generate") for _ in range(5)))
        assert [response.status for response, _ in responses] == [503] * 5
        assert len(front.router.submitted) == 1
        await front.settled()


async def test_generate_probe_believes_other_requests_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.01)
    async with serve(script=stuck, step_seconds=0.01) as front:
        probe = asyncio.create_task(front.get("/health/generate"))
        await until(lambda: bool(front.router.submitted))
        front.services.metrics.batch.stepped(StepReport(0.001, 0, 1, 1, 0, 1, 0, 0, 0, 0))
        assert (await probe)[0].status == 200
        await front.settled()


async def test_generate_probe_sees_a_failing_worker() -> None:
    async with serve(script=runs(failure=Failure("no", "generation", 424))) as front:
        assert (await front.get("/health/generate"))[0].status == 503


async def test_info_tells_the_commit_of_a_model_from_the_hub_cache(tmp_path: Path) -> None:
    commit, other = "0" * 39 + "1", "f" * 40
    for name in (commit, other):
        (tmp_path / "models--tiny" / "snapshots" / name).mkdir(parents=True)
    (tmp_path / "models--tiny" / "refs").mkdir()
    (tmp_path / "models--tiny" / "refs" / "main").write_text(commit)
    cache = str(tmp_path)
    assert hub.commit("tiny", None, cache) == commit and hub.commit("tiny", other[:7], cache) == other
    assert hub.commit(str(tmp_path / "models--tiny"), None, cache) == commit
    assert hub.commit(str(tmp_path), None, cache) is None and hub.commit("none", None, cache) is None
    async with serve("--huggingface-hub-cache", cache) as front:
        assert json.loads((await front.get("/info"))[1])["model_sha"] == commit


async def test_info_has_tgis_fields_first_and_waits_for_the_limits() -> None:
    async with serve() as front:
        response, body = await front.get("/info")
        assert response.status == 200
        info = json.loads(body)
        assert list(info)[:14] == [
            *("model_id", "model_sha", "model_pipeline_tag", "max_concurrent_requests", "max_best_of", "max_stop_sequences"),
            *("max_input_tokens", "max_total_tokens", "validation_workers", "max_client_batch_size", "router", "version", "sha"),
            "docker_label",
        ]
        assert (info["max_input_tokens"], info["max_total_tokens"], info["max_concurrent_requests"]) == (200, 256, 8)
        assert tuple(map(int, info["version"].split("-")[0].split("."))) >= (2, 1, 0)
        assert info["model_device_type"] == "echo"
        front.router.limits = None
        assert (await front.get("/info"))[0].status == 503
