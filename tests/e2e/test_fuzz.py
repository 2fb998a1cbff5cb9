"""Requests that nobody should send, while somebody else's streams run: an answer or a 4xx, the streams are not disturbed, and nothing
is left.

Numeric parameters at their extremes first; then whatever `hostile.py` can think of, over sockets that are slow, half closed or gone. The
short form is part of the fast suite, `make fuzz` sends 20,000 (`make fuzz FUZZ=2000` so many, with numbers from 0 on: each is the same
every time).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from forerun.server.edge import UNREAD_SECONDS
from tests.e2e import hostile
from tests.e2e.hostile import Hostile
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


ANSWERS = {200, 400, 404, 408, 413, 415, 422, 429}
"""and 504, the missed deadline of a request that set one"""
AT_ONCE = 8
GROWTH = 32.0
"""MiB; a leak of 2 kB a request would be as much"""
SECONDS, PATIENT_SECONDS = 100, 600
"""for an answer; in the long run the machine may have other things to do meanwhile"""
STREAMS = [
    {"inputs": f"the quick brown {i}", "parameters": {"max_new_tokens": 120, "seed": i, "do_sample": i % 2 == 1, "details": True}}
    for i in range(4)
]


async def exchange(server: Server, sent: Hostile) -> bytes:
    """What came back; nothing where nothing was waited for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        whole = sent.wire()
        if sent.manner == "cut":
            writer.write(whole[: len(whole) - len(sent.body) // 2 - 1])
            await writer.drain()
            return b""
        step = max(1, len(whole) // 8) if sent.manner == "slow" else len(whole)
        for at in range(0, len(whole), step):
            writer.write(whole[at : at + step])
            await writer.drain()
            if step < len(whole):
                await asyncio.sleep(0.01)
        if sent.manner == "half":
            writer.write_eof()
        if sent.manner in ("gone", "unread"):
            await asyncio.sleep(0.05 if sent.manner == "unread" else 0)
            return b""
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


def check(sent: Hostile, answer: bytes) -> None:
    """`answer`: the whole response with its head, or nothing."""
    if not answer and sent.manner in ("half", "cut", "gone", "unread"):
        return
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    what = f"request {sent.number} ({sent.kind}, {sent.manner}): {sent.path} {sent.body[:300]!r}\n{answer[:600]!r}"
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), what
    status = int(head[9:12])
    assert status in ANSWERS or (status == 504 and b"deadline_ms" in sent.body), what
    if status != 200:
        assert isinstance(json.loads(body)["error_type"], str), what
    for code in re.findall(rb'"http_status_code":(\d+)', body):
        assert int(code) in ANSWERS or int(code) == 504, what


@contextlib.asynccontextmanager
async def bystanders(server: Server) -> AsyncIterator[list[int]]:
    """Four streams, over and over: each says the same bytes every time. How often, in all, is what the list counts."""
    rounds = [0]
    over = asyncio.Event()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def said(body: dict[str, Any]) -> list[bytes]:
            """The events, without the comments that keep a connection alive while the machine has other things to do."""
            async with session.post(server.url + "/generate_stream", json=body) as stream:
                told = re.sub(rb'"speculation":{[^}]*}', b"", await stream.read())
            return [event for event in told.split(b"\n\n") if event != b":"]

        async def again(body: dict[str, Any], expected: list[bytes]) -> None:
            while not over.is_set():
                assert await said(body) == expected, "a bystander was disturbed"
                rounds[0] += 1

        expected = [await said(body) for body in STREAMS]
        async with asyncio.TaskGroup() as group:
            for body, once in zip(STREAMS, expected):
                group.create_task(again(body, once))
            try:
                yield rounds
            finally:
                over.set()


async def within(seconds: int, answer: Coroutine[Any, Any, bytes]) -> bytes:
    """Naps are counted, not the clock: where this process was put aside with the server, nothing is late. Raises TimeoutError."""
    task = asyncio.create_task(answer)
    try:
        for _ in range(seconds):
            done, _ = await asyncio.wait([task], timeout=1.0)
            if done:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()


async def attack(server: Server, seed: int, numbers: range, seconds: int = SECONDS) -> None:
    waiting = iter(numbers)

    async def answer(sent: Hostile) -> bytes:
        """Once more where the machine stopped us for longer than the server waits for whoever takes nothing in."""
        began = time.monotonic()
        said = await exchange(server, sent)
        return said if said or time.monotonic() - began < UNREAD_SECONDS else await exchange(server, sent)

    async def send() -> None:
        for number in waiting:
            sent = hostile.request(seed, number)
            try:
                check(sent, await within(seconds, answer(sent)))
            except TimeoutError:
                raise AssertionError(f"no answer in {seconds} s to request {number}: {sent.path} {sent.body[:300]!r}") from None

    await asyncio.gather(*(send() for _ in range(AT_ONCE)))


async def idle(server: Server) -> None:
    """Nothing runs, waits or holds pages any more."""
    async with asyncio.timeout(SECONDS):
        for name in ("tgi_batch_current_size", "tgi_queue_size", 'forerun_kv_pages{state="used"}'):
            while await asyncio.to_thread(server.metric, name):  # noqa: ASYNC110 - another process says so
                await asyncio.sleep(0.05)


def resident(server: Server) -> dict[str, float]:
    """MiB of the server's processes, by what they are."""
    found = {"front": server.process.pid}
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    found |= {f"worker {i}": int(child) for i, child in enumerate(children)}
    sizes = {name: re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()) for name, pid in found.items()}
    return {name: int(size[1]) / 1024 for name, size in sizes.items() if size}


@pytest.mark.parametrize(("kind", "numbers"), [("echo", range(100)), ("llama", range(150, 166))])
async def test_hostile_requests_do_not_disturb_bystanders(request: pytest.FixtureRequest, kind: str, numbers: range) -> None:
    server: Server = request.getfixturevalue(kind)
    async with bystanders(server) as rounds:
        await attack(server, 1, numbers)
    assert rounds[0] >= 4
    await idle(server)
    assert (await asyncio.to_thread(server.ask, "/health"))[0] == 200


@pytest.mark.slow
@pytest.mark.timeout(10_800)
async def test_many_hostile_requests(echo: Server, request: pytest.FixtureRequest) -> None:
    count: int = request.config.getoption("--hostile", default=20_000)
    part = max(1, count // 20)
    sizes: list[dict[str, float]] = []
    async with bystanders(echo) as rounds:
        for first in range(0, count, part):
            await attack(echo, 2, range(first, min(first + part, count)), PATIENT_SECONDS)
            sizes.append(resident(echo))
            told = {name: round(size) for name, size in sizes[-1].items()}
            print(f"{first + part} requests, MiB: {told}, rounds of the bystanders: {rounds[0]}", flush=True)
    await idle(echo)
    for name, size in sizes[-1].items():
        grown = size - max(one[name] for one in sizes[:5] if name in one)
        assert grown < GROWTH, f"{name} grew by {grown:.0f} MiB in the last three quarters of the requests"
