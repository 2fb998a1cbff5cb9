"""The promise, seen by clients of a whole server with a real model: a request gets the same tokens and log-probabilities, bit for bit,
alone and in company, its prompt in chunks, its prefix found or computed, its pages taken away, its worker killed."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.server import Server, running
from tests.e2e.test_life import kill_worker

WORDS = "the quick brown hello 한글 🧵 fox sees a dog and says hello to the moon over the quiet river "
KINDS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 2**64 - 1},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "watermark": True},
    {"typical_p": 0.8, "seed": 0, "temperature": 1.4},
]
REQUESTS = [
    {"inputs": WORDS[: 20 + 12 * number], "parameters": {"max_new_tokens": 60 + 7 * number, "details": True, "top_n_tokens": 2, **kind}}
    for number, kind in zip(range(8), itertools.cycle(KINDS))
]


async def answer(
    session: aiohttp.ClientSession, server: Server, body: dict[str, Any], told: list[dict[str, Any]] | None = None
) -> list[tuple[Any, ...]]:
    """Everything a stream says but when, and how it was guessed: `told` collects the details."""
    async with session.post(server.url + "/generate_stream", json=body) as stream:
        raw = await stream.read()
    events = [json.loads(event[6:]) for event in raw.split(b"\n\n") if event.startswith(b"data:")]
    assert all("token" in event for event in events), events[-1]
    last = events[-1]["details"]
    if told is not None:
        told.append(last)
    said = [(event["token"], event["top_tokens"]) for event in events]
    return [*said, (last["finish_reason"], last["generated_tokens"], last["seed"], events[-1]["generated_text"])]


def wait_committed(server: Server, tokens: float) -> None:
    end = time.monotonic() + 30
    while server.metric("forerun_committed_tokens_total") < tokens:
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_company_chunks_prefixes_preemption_and_death(dtype: str, llama_model: Path, tmp_path: Path) -> None:
    common = ("--dtype", dtype, "--threads", "1", "--max-total-tokens", "240")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        with running(llama_model, tmp_path / "alone", *common, "--prefix-caching", "false") as server:
            alone = [await answer(session, server, body) for body in REQUESTS]
        assert {len(said) - 1 for said in alone} & {body["parameters"]["max_new_tokens"] for body in REQUESTS}, "some reach their limit"
        small = ("--max-batch-total-tokens", "384", "--max-batch-prefill-tokens", "24")
        with running(llama_model, tmp_path / "company", *common, *small) as server:
            for death in (False, True):
                streams = [asyncio.create_task(answer(session, server, body)) for body in REQUESTS + REQUESTS]
                if death:
                    await asyncio.to_thread(wait_committed, server, 1.1 * server.metric("forerun_committed_tokens_total"))
                    kill_worker(server)
                assert await asyncio.gather(*streams) == alone + alone
            assert server.metric("forerun_preemptions_total") > 0
            assert server.metric("forerun_prefix_hit_tokens_total") > 0
            assert server.metric("forerun_worker_deaths_total") == 1
