"""What users of such servers reported, case by case: which test would find it here. The cases that had none are tests of this file.

A case is named as in the collection of reports it comes from; the words say what went wrong for the user.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.front import LIMITS, byte_level, runs, serve
from tests.server.test_native import ids
from tests.server.test_openai import ASK, TOOL, TOOLS, chunks, has, said

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "A01 pieces of emoji": "tests/server/test_detokenize.py::test_real_text_never_shows_a_replacement_character",
    "A02 a stop that ends inside a token": "tests/server/test_stops.py::test_every_substring_is_found",
    "A03 a stop of several tokens leaks": "tests/server/test_stops.py::test_a_stop_over_several_tokens_leaks_nothing",
    "A04 the stop stays in chats": "tests/server/test_openai.py::test_stops_are_left_out",
    "A05 contractions lose characters": "tests/server/test_detokenize.py::test_spaces_before_punctuation_are_kept",
    "A06 a leading space is lost": "tests/server/test_detokenize.py::test_pieces_continue_their_context",
    "A07 all spaces are lost": "tests/server/test_detokenize.py::test_spaces_of_sentencepiece_are_kept",
    "A10 text before the stop is not sent": "tests/server/test_stops.py::test_text_before_the_stop_in_the_same_token_is_sent",
    "A11 a stop over several tokens is ignored": "tests/server/test_stops.py::test_a_stop_over_several_tokens_leaks_nothing",
    "A12 log-probabilities behind the filter": "tests/server/test_reports.py::test_log_probabilities_do_not_depend_on_the_filter",
    "A13 prompt details are empty": "tests/server/test_native.py::test_prompt_details_have_one_entry_a_token_and_bypass_the_prefix_cache",
    "A15 temperature 0": "tests/server/test_reports.py::test_temperature_0_is_greedy_everywhere",
    "A16 truncate is ignored": "tests/server/test_native.py::test_truncate_equals_sending_the_last_tokens",
    "A17 truncate above the limit": "tests/server/test_reports.py::test_truncate_at_the_limit_and_above",
    "A18 no truncation on chat": "tests/server/test_openai.py::test_too_long_a_conversation_is_shortened_only_when_asked",
    "A19 best_of on streams": "tests/server/test_streams.py::test_refusals_have_their_own_status",
    "A20 chats without max_tokens end early": "tests/server/test_reports.py::test_without_a_limit_answers_fill_the_context",
    "A21 max_completion_tokens": "tests/server/test_reports.py::test_both_names_of_the_limit",
    "A23 auto always calls a tool": "tests/server/test_reports.py::test_with_tools_at_hand_plain_text_is_plain_text",
    "A23 none, required and named tools": "tests/e2e/test_grammars.py::test_forced_calls",
    "A24 deltas of tool calls": "tests/server/test_openai.py::test_tools_are_called",
    "A25 an invalid schema kills the server": "tests/e2e/test_grammars.py::test_an_invalid_schema",
    "A25 bad grammars beside a stream": "tests/e2e/test_grammars.py::test_hostile_grammars_harm_nobody",
    "A26 a huge schema": "tests/e2e/test_grammars.py::test_three_hundred_fields",
    "A27 several grammars at once": "tests/e2e/test_grammars.py::test_a_mixture_at_once_is_as_each_alone",
    "A30 errors of streams": "tests/e2e/test_openai_clients.py::test_errors_have_their_classes",
    "A31 a failure in the middle": "tests/server/test_streams.py::test_failure_behind_it_is_the_last_event",
    "A32 framing": "tests/server/test_streams.py::test_golden_bytes",
    "A33 a failure and no end": "tests/server/test_openai.py::test_failures_before_and_after_the_first_token",
    "A34 the chunk with the usage": "tests/server/test_openai.py::test_a_stream_says_the_same_and_ends_as_openais",
    "A35 chats cannot be counted": "tests/server/test_openai.py::test_chat_tokenize_counts_what_usage_says",
    "A37 metrics are empty": "tests/server/test_metrics.py::test_every_series_is_there_from_the_first_scrape",
    "A38 no metric of the first token": "tests/server/test_metrics.py::test_every_series_is_there_from_the_first_scrape",
    "A39 roles must alternate": "tests/server/test_reports.py::test_what_a_template_raises_is_its_own_kind_of_error",
    "A40 the key locks health": "tests/server/test_edge.py::test_probes_and_pages_need_no_key",
    "A41 seeds on every route": "tests/server/test_reports.py::test_a_seed_counts_on_every_route",
    "A42 ids out of the vocabulary": "tests/server/test_reports.py::test_ids_that_do_not_exist_are_refused",
}


@pytest.mark.parametrize("case", CASES)
def test_the_test_of_a_case_exists(case: str) -> None:
    path, _, name = CASES[case].partition("::")
    assert re.search(rf"^ *(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), CASES[case]


async def test_log_probabilities_do_not_depend_on_the_filter() -> None:
    """A12: with top_p they were 0 and the alternatives shrank to one; here they are the model's own, so the worker is asked for those."""
    async with serve() as front:
        has(front)
        body = {**ASK, "max_tokens": 1, "logprobs": True, "top_logprobs": 3, "seed": 1}
        plain, filtered = [(await front.post("/v1/chat/completions", {**body, **more}))[1] for more in ({}, {"top_p": 0.4, "top_k": 1})]
        for answer in (plain, filtered):
            (one,) = answer["choices"][0]["logprobs"]["content"]
            assert len(one["top_logprobs"]) == 3 and one["logprob"] < 0
        assert [sequence.params.raw_logprobs for sequence in front.router.submitted] == [True, True]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "hello", "parameters": {"temperature": 0, "do_sample": True, "max_new_tokens": 3}}),
        ("/v1/chat/completions", {**ASK, "temperature": 0, "max_tokens": 3}),
        ("/v1/completions", {"prompt": "hello", "temperature": 0, "max_tokens": 3}),
    ],
)
async def test_temperature_0_is_greedy_everywhere(path: str, body: dict[str, Any]) -> None:
    async with serve() as front:
        has(front)
        assert (await front.post(path, body))[0] == 200 and not front.router.submitted[0].params.sample


@pytest.mark.parametrize("choice", ["auto", None])
async def test_with_tools_at_hand_plain_text_is_plain_text(choice: str | None) -> None:
    eos = byte_level().eos_ids[0]
    async with serve(script=runs([*ids("hello the"), eos])) as front:
        has(front, TOOLS)
        _, answer = await front.post("/v1/chat/completions", {**ASK, "tools": [TOOL], "tool_choice": choice, "max_tokens": 20})
        (one,) = answer["choices"]
        assert one["message"] == {"role": "assistant", "content": "hello the"} and one["finish_reason"] == "stop"
        assert len(front.router.submitted) == 1


async def test_truncate_at_the_limit_and_above() -> None:
    """A17: clients match on TGI's words, and find the true limit in /info."""
    async with serve() as front:
        limit = LIMITS.max_input_tokens
        body = {"inputs": "hello the", "parameters": {"max_new_tokens": 2, "truncate": limit}}
        assert (await front.post("/generate", body))[0] == 200
        body["parameters"] = {"max_new_tokens": 2, "truncate": limit + 1}
        status, error = await front.post("/generate", body)
        words = f"Input validation error: `truncate` must be strictly positive and less than {limit}. Given: {limit + 1}"
        assert (status, error["error"]) == (422, words)
        assert f'"max_input_tokens":{limit}'.encode() in (await front.get("/info"))[1]


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}])
async def test_without_a_limit_answers_fill_the_context(limit: dict[str, Any]) -> None:
    async with serve() as front:
        has(front)
        _, answer = await front.post("/v1/chat/completions", {**ASK, **limit, "seed": 1})
        usage = answer["usage"]
        assert answer["choices"][0]["finish_reason"] == "length" and usage["total_tokens"] == LIMITS.max_total_tokens
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_both_names_of_the_limit() -> None:
    async with serve() as front:
        has(front)
        for given, count in (({"max_completion_tokens": 1}, 1), ({"max_tokens": 3}, 3), ({"max_tokens": 3, "max_completion_tokens": 2}, 2)):
            _, answer = await front.post("/v1/chat/completions", {**ASK, **given, "seed": 1})
            assert answer["usage"]["completion_tokens"] == count and answer["choices"][0]["finish_reason"] == "length"


async def test_what_a_template_raises_is_its_own_kind_of_error() -> None:
    wrong = "(m.role == 'user') != (loop.index0 % 2 == 0)"
    strict = f"{{% for m in messages %}}{{% if {wrong} %}}{{{{ raise_exception('roles must alternate') }}}}{{% endif %}}{{% endfor %}}"
    async with serve() as front:
        has(front, strict)
        status, error = await front.post("/v1/chat/completions", {"messages": [*ASK["messages"], *ASK["messages"]]})
        assert (status, error["error_type"]) == (422, "template_error") and "roles must alternate" in error["error"]["message"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_a_seed_counts_on_every_route(path: str) -> None:
    async with serve() as front:
        has(front)

        async def text(seed: int, stream: bool) -> str:
            if path == "/generate":
                asked = {"inputs": "hello", "parameters": {"do_sample": True, "seed": seed, "max_new_tokens": 8}}
                if stream:
                    return str((await front.events("/generate_stream", asked))[-1]["generated_text"])
                return str((await front.post(path, asked))[1]["generated_text"])
            body = {"max_tokens": 8, "temperature": 1, "seed": seed, **(ASK if "chat" in path else {"prompt": "hello"})}
            if stream:
                events = await chunks(front, path, body)
                return said(events) if "chat" in path else "".join(choice["text"] for event in events for choice in event["choices"])
            choice = (await front.post(path, body))[1]["choices"][0]
            return str(choice["message"]["content"] if "chat" in path else choice["text"])

        first, again, streamed, other = [await text(seed, stream) for seed, stream in ((1, False), (1, False), (1, True), (2, False))]
        assert first == again == streamed != other


@pytest.mark.parametrize("wild", [-1, "vocab", "vocab + 1", 2**31, 2**63, "cat"])
async def test_ids_that_do_not_exist_are_refused(wild: int | str) -> None:
    """A42: and a stream that runs beside them is not touched."""
    vocab = byte_level().vocab_size
    token = {"vocab": vocab, "vocab + 1": vocab + 1}.get(str(wild), wild)
    script = runs(*([one] for one in ids("hello the quick")))
    async with serve(script=script) as front:
        has(front)
        assert (await front.post("/v1/chat/completions", {**ASK, "logit_bias": {str(token): 1}}))[0] == 422
        assert (await front.post("/v1/completions", {"prompt": [token, 1]}))[0] == 422
        assert not front.router.submitted and not front.router.inside
