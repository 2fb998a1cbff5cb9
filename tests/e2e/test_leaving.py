"""Every official client closes its stream in the middle: the row is free at once, though the answer would go on for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest
import text_generation
from huggingface_hub import AsyncInferenceClient, InferenceClient

from tests.e2e.server import Server

SECONDS = 30.0
FOR_EVER = 1_000_000
SAID = [{"role": "user", "content": "hello the quick"}]
DROPPED = 'tgi_request_failure{err="dropped"}'
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*Pydantic.*")


def text_generation_client(url: str) -> Iterator[Any]:
    return text_generation.Client(url, timeout=30).generate_stream("hello", max_new_tokens=FOR_EVER)


def hub_text(url: str) -> Iterator[Any]:
    client = InferenceClient(url, timeout=30)
    yield from client.text_generation("hello", max_new_tokens=FOR_EVER, stream=True)


def hub_chat(url: str) -> Iterator[Any]:
    client = InferenceClient(url, timeout=30)
    yield from client.chat_completion(SAID, max_tokens=FOR_EVER, stream=True)


def openai_chat(url: str) -> Iterator[Any]:
    asked = openai.OpenAI(base_url=f"{url}/v1", api_key="-")
    with asked.chat.completions.create(model="tgi", messages=SAID, max_tokens=FOR_EVER, stream=True) as stream:  # type: ignore[call-overload]
        yield from stream


def openai_several(url: str) -> Iterator[Any]:
    asked = openai.OpenAI(base_url=f"{url}/v1", api_key="-")
    likely: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    with asked.chat.completions.create(model="tgi", messages=SAID, n=3, max_tokens=FOR_EVER, stream=True, **likely) as stream:  # type: ignore[call-overload]
        yield from stream


def openai_text(url: str) -> Iterator[Any]:
    asked = openai.OpenAI(base_url=f"{url}/v1", api_key="-")
    with asked.completions.create(model="tgi", prompt=["hello", "the"], max_tokens=FOR_EVER, stream=True) as stream:
        yield from stream


async def async_text_generation(url: str) -> AsyncIterator[Any]:
    async for event in text_generation.AsyncClient(url, timeout=30).generate_stream("hello", max_new_tokens=FOR_EVER):
        yield event


async def async_hub_chat(url: str) -> AsyncIterator[Any]:
    async with AsyncInferenceClient(url, timeout=30) as asked:
        async for chunk in await asked.chat_completion(SAID, max_tokens=FOR_EVER, stream=True):
            yield chunk


async def async_openai(url: str) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as asked:
        stream = await asked.chat.completions.create(model="tgi", messages=SAID, max_tokens=FOR_EVER, stream=True)  # type: ignore[call-overload]
        async with stream:
            async for chunk in stream:
                yield chunk


def dropped(server: Server) -> float:
    return server.metric(DROPPED)


def freed(server: Server, before: float) -> None:
    end = time.monotonic() + SECONDS
    while server.metric("tgi_batch_current_size") or dropped(server) == before:
        assert time.monotonic() < end, "the row is held for a client that left"
        time.sleep(0.02)


@pytest.mark.parametrize("streaming", [text_generation_client, hub_text, hub_chat, openai_chat, openai_several, openai_text])
def test_a_closed_stream_frees_its_row(endless: Server, streaming: Callable[[str], Iterator[Any]]) -> None:
    before = dropped(endless)
    stream = streaming(endless.url)
    next(stream), next(stream)
    stream.close()  # type: ignore[attr-defined]
    del stream
    freed(endless, before)


@pytest.mark.parametrize("streaming", [async_text_generation, async_hub_chat, async_openai])
async def test_a_closed_async_stream_frees_its_row(endless: Server, streaming: Callable[[str], AsyncIterator[Any]]) -> None:
    before = await asyncio.to_thread(dropped, endless)
    async with contextlib.aclosing(streaming(endless.url)) as stream:  # type: ignore[type-var]
        await anext(stream)
    await asyncio.to_thread(freed, endless, before)


def test_a_whole_answer_given_up_frees_its_row(endless: Server) -> None:
    """A client that waits for no stream leaves while its answer is made."""
    for path, body, answers in (
        ("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": FOR_EVER}}, 1),
        ("/v1/chat/completions", {"messages": SAID, "max_tokens": FOR_EVER, "n": 2}, 2),
    ):
        before = dropped(endless)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", endless.port, timeout=SECONDS)) as asked:
            asked.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            end = time.monotonic() + SECONDS
            while endless.metric("tgi_batch_current_size") < answers:
                assert time.monotonic() < end, "it never began"
                time.sleep(0.02)
        freed(endless, before)
