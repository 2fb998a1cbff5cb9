"""The native routes, answered whole: shapes, defaults, options and headers."""

from __future__ import annotations

import json
import math

import pytest

from forerun.engine import echo
from forerun.messages import SamplingParams
from forerun.router.request import Run
from tests.server.front import byte_level, runs, serve

PROMPT = "hello the quick"


def ids(text: str) -> list[int]:
    return byte_level()._encode(text, True)


def expected(prompt: str, tokens: int) -> str:
    """What the echo worker answers greedily."""
    tokenizer = byte_level()
    asked = ids(prompt)
    params = SamplingParams(0, len(asked), tokens, stop_ids=tokenizer.eos_ids)
    detokenizer = tokenizer.detokenizer(asked)
    said = echo.answer(asked, params, tokenizer.vocab_size)
    return "".join([*map(detokenizer.push, said), detokenizer.flush()])


async def test_generate_answers_an_object_and_root_a_list() -> None:
    async with serve() as front:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5}}
        assert await front.post("/generate", body) == (200, {"generated_text": expected(PROMPT, 5)})
        assert await front.post("/", body) == (200, [{"generated_text": PROMPT + expected(PROMPT, 5)}])
        assert await front.post("/invocations", body) == (200, [{"generated_text": PROMPT + expected(PROMPT, 5)}])


@pytest.mark.parametrize(
    ("path", "given", "repeated"),
    [
        ("/", None, True),
        ("/", True, True),
        ("/", False, False),
        ("/generate", None, False),
        ("/generate", True, True),
        ("/generate", False, False),
    ],
)
async def test_return_full_text(path: str, given: bool | None, repeated: bool) -> None:
    async with serve() as front:
        _, answer = await front.post(path, {"inputs": PROMPT, "parameters": {"max_new_tokens": 3, "return_full_text": given}})
        text = (answer[0] if path == "/" else answer)["generated_text"]
        assert text == (PROMPT if repeated else "") + expected(PROMPT, 3)


async def test_absent_parameters_sample_and_empty_ones_are_greedy() -> None:
    async with serve() as front:
        await front.post("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1}})
        await front.post("/generate", {"inputs": "x"})
        greedy, sampled = (sequence.params.sample for sequence in front.router.submitted)
        assert (greedy, sampled) == (False, True)


async def test_details_keys_in_tgis_order() -> None:
    async with serve() as front:
        _, answer = await front.post("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 2, "details": True}})
        assert list(answer) == ["generated_text", "details"]
        details = answer["details"]
        assert list(details) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens", "speculation"]
        assert (details["finish_reason"], details["generated_tokens"], details["seed"], details["prefill"]) == ("length", 2, None, [])
        assert [list(token) for token in details["tokens"]] == [["id", "text", "logprob", "special"]] * 2
        assert details["speculation"] == {"drafted": 0, "accepted": 0, "steps": 2}


async def test_seed_is_echoed_when_sampling_and_drawn_when_absent() -> None:
    async with serve() as front:
        asked = {"max_new_tokens": 1, "do_sample": True, "details": True}
        _, given = await front.post("/generate", {"inputs": "x", "parameters": {**asked, "seed": 2**64 - 1}})
        assert given["details"]["seed"] == 2**64 - 1
        drawn = [(await front.post("/generate", {"inputs": "x", "parameters": asked}))[1]["details"]["seed"] for _ in range(2)]
        assert drawn[0] != drawn[1]


async def test_prompt_details_have_one_entry_a_token_and_bypass_the_prefix_cache() -> None:
    async with serve() as front:
        asked = {"max_new_tokens": 1, "decoder_input_details": True}
        for _ in range(2):
            _, answer = await front.post("/generate", {"inputs": PROMPT, "parameters": asked})
            prefill = answer["details"]["prefill"]
            assert [token["id"] for token in prefill] == ids(PROMPT)
            assert [token["logprob"] for token in prefill] == [None, *(echo.logprob(token) for token in ids(PROMPT)[1:])]
        assert not any(sequence.request.cache for sequence in front.router.submitted)


async def test_prompt_details_with_best_of_whoever_wins() -> None:
    async with serve() as front:
        asked = {"max_new_tokens": 4, "decoder_input_details": True, "best_of": 2, "do_sample": True}
        winners = set()
        while len(winners) < 2:
            _, answer = await front.post("/generate", {"inputs": PROMPT, "parameters": asked})
            details = answer["details"]
            assert [token["id"] for token in details["prefill"]] == ids(PROMPT)
            winners.add([sequence.params.seed for sequence in front.router.submitted[-2:]].index(details["seed"]))


async def test_prompt_details_follow_truncate() -> None:
    async with serve() as front:
        asked = {"max_new_tokens": 1, "decoder_input_details": True, "truncate": 3}
        _, answer = await front.post("/generate", {"inputs": PROMPT, "parameters": asked})
        assert [token["id"] for token in answer["details"]["prefill"]] == ids(PROMPT)[-3:]


async def test_truncate_equals_sending_the_last_tokens() -> None:
    async with serve() as front:
        cut = ids(PROMPT)[-4:]
        text = byte_level().decode(cut)
        assert ids(text) == cut
        _, long = await front.post("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, "truncate": 4}})
        _, short = await front.post("/generate", {"inputs": text, "parameters": {"max_new_tokens": 5}})
        assert long == short


async def test_top_tokens_at_each_position() -> None:
    async with serve() as front:
        _, answer = await front.post("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 2, "details": True, "top_n_tokens": 3}})
        details = answer["details"]
        assert [len(top) for top in details["top_tokens"]] == [3, 3]
        assert [top[0]["id"] for top in details["top_tokens"]] == [token["id"] for token in details["tokens"]]


async def test_best_of_takes_the_highest_mean_logprob_and_lists_the_others() -> None:
    async with serve() as front:
        asked = {"max_new_tokens": 6, "best_of": 2, "do_sample": True, "details": True}
        _, answer = await front.post("/generate", {"inputs": PROMPT, "parameters": asked})
        details = answer["details"]
        (other,) = details["best_of_sequences"]

        def mean(tokens: list[dict[str, float]]) -> float:
            return math.fsum(token["logprob"] for token in tokens) / len(tokens)

        assert mean(details["tokens"]) >= mean(other["tokens"])
        assert other["seed"] != details["seed"]
        assert {details["seed"], other["seed"]} == {sequence.params.seed for sequence in front.router.submitted}
        assert list(other) == ["generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
        assert len(front.router.submitted) == 2


@pytest.mark.parametrize("best_of", [0, 1, None])
async def test_best_of_off(best_of: int | None) -> None:
    async with serve() as front:
        status, answer = await front.post(
            "/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1, "best_of": best_of, "details": True}}
        )
        assert status == 200
        assert "best_of_sequences" not in answer["details"]


async def test_stop_text_stays_and_nothing_follows_it() -> None:
    whole = expected(PROMPT, 20)
    async with serve() as front:
        for stop in {whole[start:end] for start in range(len(whole)) for end in range(start + 1, min(len(whole), start + 4) + 1)}:
            body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 20, "stop": [stop], "details": True}}
            _, answer = await front.post("/generate", body)
            found = whole.find(stop) + len(stop)
            assert answer["generated_text"] == whole[:found], stop
            texts = [token["text"] for token in answer["details"]["tokens"] if not token["special"]]
            assert "".join(texts) == whole[:found]
            assert answer["details"]["finish_reason"] in ("stop_sequence", "length")


async def test_end_of_sequence_is_a_token_but_not_text() -> None:
    tokenizer = byte_level()
    said = [*ids("hello"), tokenizer.eos_ids[0]]
    async with serve(script=runs(said)) as front:
        _, answer = await front.post("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 50, "details": True}})
        assert answer["generated_text"] == "hello"
        assert answer["details"]["finish_reason"] == "eos_token"
        last = answer["details"]["tokens"][-1]
        assert (last["text"], last["special"]) == ("</s>", True)


async def test_tokens_behind_the_end_are_dropped() -> None:
    eos = byte_level().eos_ids[0]
    for said in ([*ids("hello"), eos, *ids("more")], [*ids("hello"), eos]):
        async with serve(script=runs(said)) as front:
            _, answer = await front.post("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 50, "details": True}})
            assert answer["generated_text"] == "hello"
            assert answer["details"]["generated_tokens"] == len(ids("hello")) + 1


async def test_headers() -> None:
    async with serve() as front:
        response, _ = await front.raw("/generate", {"inputs": "añ한", "parameters": {"max_new_tokens": 4}})
        headers = response.headers
        assert headers["content-type"] == "application/json"
        assert headers["x-compute-characters"] == "3"
        assert headers["x-prompt-tokens"] == str(len(ids("añ한")))
        assert headers["x-generated-tokens"] == "4"
        assert headers["x-compute-type"] == "echo"
        assert float(headers["x-compute-time"]) >= 0
        for name in ("total", "validation", "queue", "inference"):
            assert int(headers[f"x-{name}-time"]) >= 0
        assert int(headers["x-time-per-token"]) >= 0
        assert "server" not in headers


async def test_tokenize_gives_bytes_of_the_input() -> None:
    async with serve() as front:
        text = "hello añ 한 the"
        status, tokens = await front.post("/tokenize", {"inputs": text})
        assert status == 200
        assert [token["id"] for token in tokens] == ids(text)
        assert all(list(token) == ["id", "text", "start", "stop"] for token in tokens)
        assert all(text.encode()[token["start"] : token["stop"]] for token in tokens)
        assert await front.post("/tokenize", {"inputs": ""}) == (200, [])
        assert front.router.submitted == []


@pytest.mark.parametrize("tokens", [1023, 1024, 1025, 2048, 70_000])
async def test_tokenize_of_any_length(tokens: int) -> None:
    text = ('\u0001"é' * tokens)[:tokens]
    async with serve() as front:
        status, said = await front.post("/tokenize", {"inputs": text})
        assert status == 200
        assert [token["id"] for token in said] == ids(text)
        assert said[-1]["stop"] == len(text.encode())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
async def test_routes_that_are_missing_say_so(path: str) -> None:
    async with serve() as front:
        status, error = await front.post(path, {"messages": [], "model": "tgi"})
        assert status == 404
        assert path in error["error"]["message"] and "/v1/chat/completions" in error["error"]["message"]


async def test_extensions_reach_the_router() -> None:
    async with serve() as front:
        await front.post(
            "/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1, "speculate": 0, "deadline_ms": 5000, "priority": 3}}
        )
        request = front.router.submitted[0].request
        assert (request.speculate, request.priority) == (0, 3)
        assert request.deadline is not None and request.deadline - request.arrived == pytest.approx(5.0)


async def test_logprobs_print_as_single_precision() -> None:
    async with serve(script=lambda sequence: iter([Run([0], [-0.10000000149011612], [], [])])) as front:
        _, raw = await front.raw("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1, "details": True}})
        assert b'"logprob":-0.1,' in raw
    async with serve(script=lambda sequence: iter([Run([0], [-math.inf], [], [])])) as front:
        _, raw = await front.raw("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1, "details": True}})
        assert json.loads(raw)["details"]["tokens"][0]["logprob"] is None
