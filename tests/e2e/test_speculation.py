"""Guessing, seen by clients over sockets: the same bytes as without, whatever happens in the middle of an accepted path."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.server import Server, running
from tests.e2e.test_identity import REQUESTS, WORDS, answer
from tests.e2e.test_life import kill_worker

COMMON = ("--threads", "1", "--max-total-tokens", "320", "--max-batch-total-tokens", "2048", "--max-batch-prefill-tokens", "64")
GUESSING = ("--speculate", "6", "--speculation-controller", "fixed")
SPECS = ["suffix", "ngram+suffix", pytest.param("model=TARGET", marks=pytest.mark.slow)]
"""TARGET: the draft model is the target itself"""


@pytest.fixture(scope="module")
def plain(llama_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(llama_model, tmp_path_factory.mktemp("plain") / "log", *COMMON, "--speculator", "none") as server:
        yield server


@pytest.fixture(scope="module", params=SPECS)
def guessing(request: pytest.FixtureRequest, llama_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    spec = request.param.replace("TARGET", str(llama_model))
    with running(llama_model, tmp_path_factory.mktemp("guessing") / "log", *COMMON, "--speculator", spec, *GUESSING) as server:
        yield server


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def details(session: aiohttp.ClientSession, server: Server, inputs: str, **parameters: Any) -> tuple[str, dict[str, Any]]:
    body = {"inputs": inputs, "parameters": {"details": True, "max_new_tokens": 40, **parameters}}
    async with session.post(server.url + "/generate", json=body) as response:
        said = await response.json()
    return said["generated_text"], said["details"]


def check_counts(found: dict[str, Any]) -> int:
    """`details.speculation` adds up with what was said. Returns how many guesses were accepted."""
    told, count = found["speculation"], found["generated_tokens"]
    assert 0 <= told["accepted"] <= told["drafted"] and told["steps"] >= 1
    assert told["steps"] + told["accepted"] - count in (0, 1), "a step brings its guesses and one token, unless a guess was the last"
    assert count == len(found.get("tokens", range(count)))
    return int(told["accepted"])


async def test_streams_alone_and_together(plain: Server, guessing: Server) -> None:
    async with client() as session:
        expected = [await answer(session, plain, body) for body in REQUESTS]
        assert [await answer(session, guessing, body) for body in REQUESTS] == expected
        accepted = guessing.metric("forerun_accepted_tokens_total")
        together = await asyncio.gather(*(answer(session, guessing, body) for body in REQUESTS + REQUESTS))
        assert together == expected + expected
        assert guessing.metric("forerun_accepted_tokens_total") > accepted
        assert plain.metric("forerun_drafted_tokens_total") == 0


async def test_stops_and_limits_inside_an_accepted_path(plain: Server, guessing: Server) -> None:
    """The answer is known to the drafter from the time before, so that paths run over the place where it must end."""
    async with client() as session:
        text, _ = await details(session, plain, WORDS)
        ends: list[dict[str, Any]] = [{"stop": [text[at : at + 2]]} for at in range(1, len(text) - 2, 5)]
        ends += [{"max_new_tokens": limit} for limit in (1, 2, 3, 5, 8, 13)]
        accepted = 0
        for _ in range(2):
            assert (await details(session, guessing, WORDS))[0] == text
        for end in ends:
            said, found = await details(session, guessing, WORDS, **end)
            expected, plainly = await details(session, plain, WORDS, **end)
            accepted += check_counts(found)
            assert check_counts(plainly) == 0
            del found["speculation"], plainly["speculation"]
            assert (said, found) == (expected, plainly)
        assert accepted > 0


async def test_several_answers_to_one_prompt_are_the_same(plain: Server, guessing: Server) -> None:
    """Each has dice of its own, and all of them guess beside each other. (TGI's `best_of` takes no seed, so it cannot be repeated.)"""
    asked = {"model": "tgi", "prompt": WORDS, "n": 3, "seed": 7, "temperature": 0.8, "max_tokens": 40, "logprobs": 2}

    async def choices(session: aiohttp.ClientSession, server: Server) -> list[dict[str, Any]]:
        async with session.post(server.url + "/v1/completions", json=asked) as response:
            said = await response.json()
        found: list[dict[str, Any]] = said["choices"]
        return found

    async with client() as session:
        expected = await choices(session, plain)
        assert len({choice["text"] for choice in expected}) == 3
        assert [await choices(session, guessing) for _ in range(2)] == [expected, expected]


async def test_a_request_may_do_without(guessing: Server) -> None:
    """C29: no guess is made for it, by any drafter."""
    async with client() as session:
        for _ in range(2):
            _, found = await details(session, guessing, WORDS, speculate=0)
            assert found["speculation"] == {"drafted": 0, "accepted": 0, "steps": found["generated_tokens"]}


async def test_a_kill_in_the_middle_of_accepted_paths(plain: Server, guessing: Server) -> None:
    async with client() as session:
        expected = [await answer(session, plain, body) for body in REQUESTS]
        deaths = guessing.metric("forerun_worker_deaths_total")
        before = guessing.metric("forerun_accepted_tokens_total")
        told: list[dict[str, Any]] = []
        streams = [asyncio.create_task(answer(session, guessing, body, told)) for body in 4 * REQUESTS]
        # On a busy machine all may be over before we look; they must be right all the same.
        while await asyncio.to_thread(guessing.metric, "forerun_accepted_tokens_total") < before + 20:
            if all(stream.done() for stream in streams):
                break
        kill_worker(guessing)
        assert await asyncio.gather(*streams) == 4 * expected
        end = time.monotonic() + 60
        while guessing.metric("forerun_worker_deaths_total") == deaths:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        assert guessing.metric("forerun_worker_deaths_total") == deaths + 1
        assert sum(check_counts(found) for found in told) > 20
    await asyncio.to_thread(guessing.wait)


async def test_clients_that_leave(plain: Server, guessing: Server) -> None:
    """They take nobody along and leave nothing behind."""
    async with client() as session:
        body = REQUESTS[3]
        expected = await answer(session, plain, body)
        for _ in range(3):
            kept = [asyncio.create_task(answer(session, guessing, body)) for _ in range(2)]
            for _ in range(4):
                async with session.post(guessing.url + "/generate_stream", json=body) as stream:
                    event = await stream.content.readuntil(b"\n\n")
                    assert json.loads(event[5:])["index"] == 1
            assert await asyncio.gather(*kept) == [expected, expected]
        end = time.monotonic() + 10
        while guessing.metric('forerun_kv_pages{state="used"}'):
            assert time.monotonic() < end, "pages are held for nobody"
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_the_other_rule_of_acceptance(plain: Server, llama_model: Path, tmp_path: Path) -> None:
    """`--acceptance rejection`: greedy answers are those of plain decoding; sampled ones are whole, and a draft that equals the target is
    believed almost always."""
    flags = (*COMMON, "--speculator", f"model={llama_model}", *GUESSING, "--acceptance", "rejection")
    with running(llama_model, tmp_path / "log", *flags) as server:
        async with client() as session:
            said, found = await details(session, server, WORDS)
            expected, _ = await details(session, plain, WORDS)
            assert said == expected and check_counts(found) > 0
            drafted = accepted = 0
            for seed in range(4):
                _, found = await details(session, server, WORDS, do_sample=True, temperature=0.8, seed=seed)
                accepted += check_counts(found)
                drafted += found["speculation"]["drafted"]
            assert 0.9 * drafted < accepted
