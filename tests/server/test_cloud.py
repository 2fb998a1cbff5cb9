"""The routes of cloud platforms: each body is answered as on its own route."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.router.request import Failure
from tests.server.front import runs, serve
from tests.server.test_native import ids
from tests.server.test_openai import ASK, chunks, has, said


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"inputs": "hello", "parameters": {"max_new_tokens": 4}}, "/"),
        ({**ASK, "max_tokens": 4, "seed": 3}, "/v1/chat/completions"),
        ({"prompt": "hello", "max_tokens": 4, "seed": 3}, "/v1/completions"),
        ({"inputs": "hello", "messages": [], "parameters": {"max_new_tokens": 4}}, "/"),
        ({"inputs": None, **ASK, "max_tokens": 4, "seed": 3}, "/v1/chat/completions"),
        ({"inputs": None, "messages": None, "prompt": "hello", "max_tokens": 4, "seed": 3}, "/v1/completions"),
    ],
)
async def test_invocations_answers_every_body_as_its_own_route_does(body: dict[str, Any], path: str) -> None:
    async with serve() as front:
        has(front)
        _, there = await front.post(path, body)
        status, here = await front.post("/invocations", body)
        assert status == 200
        for answer in (here, there):
            if isinstance(answer, dict):
                answer.pop("id"), answer.pop("created")
        assert here == there


async def test_invocations_streams_chats() -> None:
    async with serve() as front:
        has(front)
        body = {**ASK, "max_tokens": 5, "seed": 1}
        assert said(await chunks(front, "/invocations", body)) == said(await chunks(front, "/v1/chat/completions", body))


async def test_vertex_answers_a_text_for_each_instance() -> None:
    async with serve() as front:
        has(front)
        native = {"inputs": "hello", "parameters": {"max_new_tokens": 4, "seed": 5, "top_k": 1}}
        chat = {**ASK, "max_tokens": 4, "seed": 5}
        status, answer = await front.post("/vertex", {"instances": [native, chat]})
        assert status == 200
        _, one = await front.post("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 4, "seed": 5, "do_sample": True}})
        _, other = await front.post("/v1/chat/completions", chat)
        assert answer == {"predictions": [one["generated_text"], other["choices"][0]["message"]["content"]]}
        await front.settled()


async def test_vertex_fails_as_a_whole_and_leaves_nothing_running() -> None:
    async with serve(script=runs(ids("hello"), failure=Failure("no", "generation", 424))) as front:
        has(front)
        status, error = await front.post("/vertex", {"instances": [ASK, {"inputs": "x"}]})
        assert (status, error["error"]) == (424, "no")
        await front.settled()
    async with serve() as front:
        has(front)
        for instances, words in (
            ([], "Input validation error"),
            ([{"inputs": ""}], "cannot be empty"),
            ([{**ASK, "stream": True}], "`stream`"),
        ):
            status, error = await front.post("/vertex", {"instances": instances})
            assert status == 422 and words in json.dumps(error)
        await front.settled()
