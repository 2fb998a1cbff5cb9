"""The log line of a request: TGI's fields on every route that generates, and nothing of what was asked or said."""

from __future__ import annotations

import re
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.server.front import serve
from tests.server.test_openai import has

TIMES = ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token")
DURATION = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?(µs|ms|s)")
CHAT = [{"role": "user", "content": "confidential"}]
NATIVE = {"inputs": "confidential", "parameters": {"max_new_tokens": 3, "seed": 7, "temperature": 0.5}}
OPENAI = {"max_tokens": 3, "seed": 7, "temperature": 0.5}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/", NATIVE),
    ("/", {**NATIVE, "stream": True}),
    ("/generate", NATIVE),
    ("/generate_stream", NATIVE),
    ("/invocations", NATIVE),
    ("/vertex", {"instances": [NATIVE]}),
    ("/v1/chat/completions", {**OPENAI, "messages": CHAT}),
    ("/v1/chat/completions", {**OPENAI, "messages": CHAT, "stream": True}),
    ("/v1/completions", {**OPENAI, "prompt": "confidential"}),
    ("/v1/completions", {**OPENAI, "prompt": "confidential", "stream": True}),
]


async def lines(path: str, body: dict[str, Any], **headers: str) -> list[Any]:
    async with serve() as front:
        has(front)
        with capture_logs() as logged:
            response, said = await front.raw(path, body, headers=headers)
            assert response.status == 200, said
            await front.settled()
    return [line for line in logged if line["log_level"] == "info"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_every_generation_has_tgis_line(path: str, body: dict[str, Any]) -> None:
    (line,) = await lines(path, body, **{"x-request-id": "mine-1"})
    assert line["event"] == "Success" and line["request_id"] == "mine-1"
    assert line.keys() >= {*TIMES, "parameters", "seed", "input_tokens", "generated_tokens", "finish_reason"}
    assert all(DURATION.fullmatch(line[name]) for name in TIMES), {name: line[name] for name in TIMES}
    assert (line["seed"], line["generated_tokens"]) == (7, 3)
    assert line["parameters"]["max_new_tokens"] == 3
    assert line["parameters"].get("temperature") == (None if path == "/vertex" else 0.5), "Vertex reads no temperature, as in TGI"
    assert "confidential" not in repr(line)


async def test_greedy_has_no_seed_as_in_tgi() -> None:
    (line,) = await lines("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1}})
    assert line["seed"] is None


async def test_each_of_several_answers_has_its_line() -> None:
    told = await lines("/v1/completions", {**OPENAI, "prompt": ["a", "b"], "n": 2})
    assert [line["event"] for line in told] == ["Success"] * 4


async def test_refusals_are_no_news_and_failures_are() -> None:
    async with serve("--api-key", "Secret") as front:
        with capture_logs() as logged:
            await front.post("/generate", {"inputs": ""}, headers={"Authorization": "Bearer Secret"})
            await front.post("/generate", NATIVE)
        assert {line["log_level"] for line in logged} == {"debug"}, "anybody can send them as fast as they like"
        assert "Secret" not in repr(logged)
