"""A server's life in processes of its own: start, signals, death of either process, and what clients see of it."""

from __future__ import annotations

import asyncio
import functools
import signal
import socket
import time
from pathlib import Path

import pytest

from forerun.config import Config
from forerun.launch import start_message
from tests.forerun.served import Stream, client, health, is_gone, kill, maps, resident_bytes, served, until, write_folder

LONG = 3000
PROMPTS = ["hello world", "the quick brown fox", "a", "hello hello", "fox sees a"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


def test_a_worker_is_told_what_the_operator_asked_for() -> None:
    flags = ["--model-id", "m", "--dtype", "float32", "--max-total-tokens", "99", "--max-batch-size", "7", "--threads", "3"]
    start = start_message(Config.parse(flags, {}))
    assert (start.model_id, start.dtype, start.max_total_tokens, start.max_rows, start.threads) == ("m", "float32", 99, 7, 3)
    assert not start.echo and not start.test_faults
    assert start_message(Config.parse(["--model-id", "m", "--max-concurrent-requests", "16"], {})).max_rows == 16


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_may_die_or_hang_and_all_streams_go_on_token_exact(folder: Path, how: signal.Signals) -> None:
    with served(folder, "--max-batch-size", "3", "--worker-timeout", "1") as server:
        async with client(await server.ready()) as session:
            undisturbed = [Stream(session, prompt, LONG) for prompt in PROMPTS]
            await asyncio.gather(*(stream.task for stream in undisturbed))
            streams = [Stream(session, prompt, LONG) for prompt in PROMPTS]
            await until(lambda: sum(len(stream.tokens) > 10 for stream in streams) == 3)
            worker = await server.worker()
            kill(worker, how)
            assert sum(not stream.tokens for stream in streams) == 2, "two are still queued"
            await until(lambda: is_gone(worker), 8)
            await asyncio.gather(*(stream.task for stream in streams))
            assert [stream.tokens for stream in streams] == [stream.tokens for stream in undisturbed]
            assert all(len(stream.tokens) == LONG for stream in streams)
            assert await health(session) == 200
            assert "Worker died, starting another" in server.log()


async def test_three_deaths_within_a_minute_end_the_server_and_everybody_is_told(folder: Path) -> None:
    with served(folder) as server:
        async with client(await server.ready()) as session:
            streams = [Stream(session, prompt, 15_000) for prompt in PROMPTS]
            await until(lambda: all(stream.tokens for stream in streams))
            worker = 0
            for _ in range(3):
                worker = await server.worker(but_not=worker)
                await asyncio.sleep(0.05)
                kill(worker)
                await until(functools.partial(is_gone, worker))
            await asyncio.gather(*(stream.task for stream in streams))
            assert all(stream.error and stream.error["error_type"] == "generation" for stream in streams)
            assert await health(session) == 503 and await health(session, "/health/live") == 503
            late = Stream(session, "too late", 5)
            await late.task
            assert late.status == 429
        assert await server.exit_code() == 1
        assert "3 workers died within a minute" in server.log().splitlines()[-2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_and_queued_finish(folder: Path, number: signal.Signals) -> None:
    with served(folder, "--max-batch-size", "2") as server:
        async with client(await server.ready()) as session:
            streams = [Stream(session, prompt, LONG) for prompt in PROMPTS[:3]]
            await until(lambda: sum(bool(stream.tokens) for stream in streams) == 2)
            kill(await server.worker(), signal.SIGSTOP)  # a step that takes its time
            kill(server.pid, number)
            await until(lambda: f"Received {number.name}" in server.log())
            assert await health(session, "/health/ready") == 503
            refused = Stream(session, "new", 5)
            await refused.task
            assert refused.status == 429
            kill(await server.worker(), signal.SIGCONT)
            await asyncio.gather(*(stream.task for stream in streams))
            assert [len(stream.tokens) for stream in streams] == [LONG] * 3
        assert await server.exit_code() == 0
        assert f"because={number.name}" in server.log()


@pytest.mark.parametrize("again", [False, True])
async def test_when_the_grace_is_over_or_a_second_signal_comes_the_rest_ends_with_an_error(folder: Path, again: bool) -> None:
    with served(folder, "--graceful-termination-timeout", "60" if again else "1") as server:
        async with client(await server.ready()) as session:
            streams = [Stream(session, prompt, 16_000) for prompt in PROMPTS]
            await until(lambda: all(stream.tokens for stream in streams))
            kill(server.pid, signal.SIGTERM)
            if again:
                await until(lambda: "Received SIGTERM" in server.log())
                kill(server.pid, signal.SIGTERM)
            await asyncio.gather(*(stream.task for stream in streams))
            assert all(stream.error and "shutting down" in stream.error["error"] for stream in streams)
        assert await server.exit_code() == 0


async def test_when_the_front_is_killed_its_worker_goes_too_and_the_port_is_free(folder: Path) -> None:
    with served(folder) as server:
        address = await server.ready()
        worker = await server.worker()
        kill(server.pid)
        await server.exit_code()
        await until(lambda: is_gone(worker), 3)
        with served(folder, port=int(address.rpartition(":")[2])) as second:
            assert await second.ready() == address
            async with client(address) as session:
                stream = Stream(session, "hello", 5)
                await stream.task
                assert len(stream.tokens) == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_port_answers_while_loading_and_a_signal_ends_the_load(folder: Path, number: signal.Signals) -> None:
    with served(folder) as server:
        address = await server.listening()
        worker = await server.worker()
        kill(worker, signal.SIGSTOP)  # a load that takes its time
        async with client(address) as session:
            assert await health(session) == 503 and await health(session, "/health/live") == 200
            async with session.post("/generate", json={"inputs": "x"}) as response:
                assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
        before = time.monotonic()
        kill(server.pid, number)
        assert await server.exit_code() == 0
        assert time.monotonic() - before < 10
        assert is_gone(worker)


async def test_an_idle_server_stops_at_once(folder: Path) -> None:
    with served(folder) as server:
        async with client(await server.ready()) as session:
            assert await health(session) == 200  # an open keep-alive connection is no reason to wait
            before = time.monotonic()
            kill(server.pid, signal.SIGINT)
            assert await server.exit_code() == 0
            assert time.monotonic() - before < 10


async def test_the_front_is_small_and_has_no_tensor_library(folder: Path) -> None:
    with served(folder) as server:
        await server.ready()
        assert resident_bytes(server.pid) < 150 << 20
        assert not any(maps(pid, "libtorch") for pid in (server.pid, await server.worker()))


async def test_a_port_that_is_taken_is_said_with_a_cure(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, served(folder, port=taken.getsockname()[1]) as server:
        assert await server.exit_code() == 1
        assert "cannot listen" in server.log() and "--port" in server.log()


async def test_a_model_that_is_not_there_is_said_with_a_cure(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert await server.exit_code() == 1
        assert "error: " in server.log() and "tokenizer" in server.log()


async def test_a_worker_that_cannot_load_ends_the_start_with_reason_and_cure(folder: Path) -> None:
    with served(folder, echo=False) as server:
        assert await server.exit_code(60) == 1
        assert "error: " in server.log() and "cure: " in server.log()


async def test_limits_that_contradict_the_model_end_the_start(folder: Path) -> None:
    with served(folder, "--max-input-tokens", "20000") as server:
        assert await server.exit_code() == 1
        assert "Argument validation error: `max_input_tokens` must be < `max_total_tokens`" in server.log()
