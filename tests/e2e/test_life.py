"""A server process through its life: overload, clients that leave, large prompts, faults, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import aiohttp

from tests.e2e.server import Server, running

LONG = {"inputs": "hello the quick", "parameters": {"max_new_tokens": 1500}}


async def until_idle(session: aiohttp.ClientSession, url: str, seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            async with session.get(url + "/metrics") as page:
                text = await page.text()
            if "tgi_batch_current_size 0\n" in text and "tgi_queue_size 0\n" in text:
                return
            await asyncio.sleep(0.05)


async def test_clients_that_leave_free_their_places(echo: Server) -> None:
    async with aiohttp.ClientSession() as session:

        async def leave(path: str, after: float) -> None:
            task = asyncio.create_task(session.post(echo.url + path, json=LONG))
            await asyncio.sleep(after)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(leave(path, 0.02 * n) for path in ("/generate", "/generate_stream", "/") for n in range(8)))
        for _ in range(4):
            async with session.post(echo.url + "/generate_stream", json=LONG) as stream:
                await stream.content.readuntil(b"\n\n")
                stream.close()
        await until_idle(session, echo.url)
        async with session.post(echo.url + "/generate", json={"inputs": "x", "parameters": {"max_new_tokens": 2}}) as answer:
            assert answer.status == 200


async def test_overload_is_answered_at_once(echo_model: Path, tmp_path: Path) -> None:
    with running(echo_model, tmp_path / "log", "--echo", "--max-concurrent-requests", "4") as server:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask() -> tuple[int, float, str | None]:
                began = time.monotonic()
                async with session.post(server.url + "/generate", json=LONG) as answer:
                    await answer.read()
                    return answer.status, time.monotonic() - began, answer.headers.get("retry-after")

            answers = await asyncio.gather(*(ask() for _ in range(50)))
            statuses = [status for status, *_ in answers]
            assert statuses.count(200) >= 4
            assert set(statuses) == {200, 429}
            assert all(int(after or 0) >= 1 for status, _, after in answers if status == 429)
            assert (await ask())[0] == 200


async def test_large_prompts_do_not_hold_up_the_others(echo: Server) -> None:
    async with aiohttp.ClientSession() as session:
        large = {"inputs": "hello the quick " * 60_000}
        posts = [asyncio.create_task(session.post(echo.url + "/generate", json=large)) for _ in range(6)]
        slowest = 0.0
        for _ in range(20):
            began = time.monotonic()
            async with session.get(echo.url + "/health") as answer:
                assert answer.status == 200
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.02)
        assert slowest < 1.0
        for answer in await asyncio.gather(*posts):
            assert answer.status == 422
            answer.close()


async def test_a_worker_that_dies_does_not_interrupt_a_stream(echo_model: Path, tmp_path: Path) -> None:
    with running(echo_model, tmp_path / "log", "--echo") as server:
        async with aiohttp.ClientSession() as session:
            async with session.post(server.url + "/generate", json=LONG) as answer:
                expected = (await answer.json())["generated_text"]
            async with session.post(server.url + "/generate_stream", json=LONG) as stream:
                said = [await stream.content.readuntil(b"\n\n")]
                kill_worker(server)
                said += [event + b"\n\n" for event in (await stream.content.read()).split(b"\n\n") if event]
        texts = [json.loads(event[6:]) for event in said if event.startswith(b"data:")]
        assert texts[-1]["generated_text"] == expected
        assert [event["index"] for event in texts] == list(range(1, 1501))
        assert server.metric("forerun_worker_deaths_total") == 1


def kill_worker(server: Server) -> None:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    workers = [pid for pid in children if b"engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(workers) == 1
    os.kill(int(workers[0]), signal.SIGKILL)


async def test_termination_lets_a_stream_end(echo_model: Path, tmp_path: Path) -> None:
    with running(echo_model, tmp_path / "log", "--echo") as server:
        async with aiohttp.ClientSession() as session, session.post(server.url + "/generate_stream", json=LONG) as stream:
            await stream.content.readuntil(b"\n\n")
            server.process.send_signal(signal.SIGTERM)
            rest = await stream.content.read()
        assert b'"generated_text":"' in rest
        assert server.process.wait(30) == 0


async def test_termination_without_patience_ends_streams_with_an_error(echo_model: Path, tmp_path: Path) -> None:
    with running(echo_model, tmp_path / "log", "--echo", "--graceful-termination-timeout", "0", "--max-total-tokens", "2048") as server:
        async with aiohttp.ClientSession() as session, session.post(server.url + "/generate_stream", json=LONG) as stream:
            await stream.content.readuntil(b"\n\n")
            server.process.send_signal(signal.SIGTERM)
            rest = await stream.content.read()
        last = json.loads(rest.strip().split(b"\n\n")[-1][6:])
        assert last.get("error_type") == "generation" or last.get("generated_text")
        assert server.process.wait(30) == 0


def test_the_log_has_a_line_for_each_request(echo_model: Path, tmp_path: Path) -> None:
    with running(echo_model, tmp_path / "log", "--echo", "--json-output") as server:
        server.ask("/generate", {"inputs": "secret words", "parameters": {"max_new_tokens": 3, "seed": 5}})
        server.stop()
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    (success,) = [line for line in lines if "Success" in json.dumps(line)]
    text = json.dumps(success)
    assert "total_time" in text and "request_id" in text and "secret" not in text
