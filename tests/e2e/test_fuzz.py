"""Every numeric parameter at its extremes, while somebody else's stream runs: an answer or a 4xx, and the stream is not disturbed."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import aiohttp

from tests.e2e.server import Server

VALUES = [
    -1,
    0,
    1,
    2,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**63,
    2**64 - 1,
    2**64,
    -0.0,
    1e-45,
    1e-7,
    0.5,
    0.999999999,
    1.5,
    1e38,
    1e39,
    1e308,
]
FIELDS = [
    *("temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p", "seed", "truncate", "best_of"),
    *("max_new_tokens", "top_n_tokens", "speculate", "deadline_ms"),
]
BYSTANDER = {"inputs": "the quick brown", "parameters": {"max_new_tokens": 300, "seed": 3, "do_sample": True}}


async def whole(session: aiohttp.ClientSession, server: Server) -> str:
    async with session.post(server.url + "/generate_stream", json=BYSTANDER) as stream:
        raw = await stream.read()
    last = json.loads(raw.strip().split(b"\n\n")[-1][6:])
    text: str = last["generated_text"]
    return text


async def ask(session: aiohttp.ClientSession, server: Server, parameters: dict[str, Any]) -> tuple[dict[str, Any], int, Any]:
    parameters = {"max_new_tokens": 3, "do_sample": True, "details": True, **parameters}
    async with session.post(server.url + "/generate", json={"inputs": "hello the", "parameters": parameters}) as answer:
        return parameters, answer.status, await answer.json()


async def test_extremes_do_not_disturb_a_bystander(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        expected = await whole(session, server)
        bystander = asyncio.create_task(whole(session, server))
        cases = list(itertools.product(FIELDS, VALUES))
        for batch in (cases[start : start + 26] for start in range(0, len(cases), 26)):
            for parameters, status, answer in await asyncio.gather(*(ask(session, server, {field: value}) for field, value in batch)):
                assert status in (200, 422, 429) or (status == 504 and parameters.get("deadline_ms")), (parameters, answer)
                if status == 200:
                    assert answer["details"]["generated_tokens"] >= 1
                    for token in answer["details"]["tokens"]:
                        assert token["logprob"] is None or token["logprob"] <= 1e-3, parameters
        assert await bystander == expected
        assert await whole(session, server) == expected
