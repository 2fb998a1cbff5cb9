"""The `/v1` routes over a real socket: shapes, streams, and every way in which OpenAI's clients ask differently from TGI's."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from forerun.engine import echo
from forerun.router.request import Failure, Run, Sequence
from forerun.server.chat import shortened
from forerun.server.openai_schema import ChatRequest
from forerun.server.template import ChatTemplates
from forerun.server.text import Tokenizer
from tests.server import tiny
from tests.server.front import LIMITS, Front, byte_level, runs, serve
from tests.server.test_native import ids

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if strict is defined %}{{ raise_exception('no ' ~ strict) }}{% endif %}"
)
TOOLS = CHATML + "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
WIDE = dataclasses.replace(LIMITS, max_input_tokens=1000, max_total_tokens=2000)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def has(front: Front, template: str = CHATML) -> Front:
    assert front.services.tokenizer is not None
    front.services.tokenizer.templates = ChatTemplates({"default": template})
    return front


async def chunks(front: Front, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream that ends with `[DONE]`."""
    response, raw = await front.raw(path, {**body, "stream": True})
    assert response.status == 200, raw
    *events, done, rest = raw.removeprefix(b":\n\n").split(b"\n\n")
    assert done == b"data: [DONE]" and rest == b""
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def said(events: list[Any], index: int = 0) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"] if choice["index"] == index)


async def test_a_whole_answer() -> None:
    eos = byte_level().eos_ids[0]
    async with serve(script=runs(ids("hello"), [*ids(" the"), eos])) as front:
        has(front)
        response, raw = await front.raw("/v1/chat/completions", {**ASK, "model": "mine"})
        answer = json.loads(raw)
        assert list(answer) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
        assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-") and answer["model"] == "mine"
        message = {"role": "assistant", "content": "hello the"}
        assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
        prompt = len(ids("<|user|>hello\n<|assistant|>"))
        assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}
        assert response.headers["x-prompt-tokens"] == str(prompt)
        assert front.router.submitted[0].request.tokens == ids("<|user|>hello\n<|assistant|>")
        await front.settled()


async def test_a_stream_says_the_same_and_ends_as_openais() -> None:
    eos = byte_level().eos_ids[0]
    async with serve(script=runs(ids("hello"), [*ids(" the"), eos])) as front:
        has(front)
        events = await chunks(front, "/v1/chat/completions", {**ASK, "stream_options": {"include_usage": True}})
        assert said(events) == "hello the" and len({event["id"] for event in events}) == 1
        assert all(event["object"] == "chat.completion.chunk" for event in events)
        *spoken, usage = events
        assert [event["choices"][0]["finish_reason"] for event in spoken] == [None] * (len(spoken) - 1) + ["stop"]
        assert all(event["usage"] is None for event in spoken)
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3
        assert all(event["choices"] for event in await chunks(front, "/v1/chat/completions", {**ASK, "stream_options": None}))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"), [(" quick", "hello the"), (["lo th"], "hel"), ("</s>", "hello the quick"), ("zzz", "hello the quick")]
)
async def test_stops_are_left_out(stop: str | list[str], text: str, streamed: bool) -> None:
    eos = byte_level().eos_ids[0]
    async with serve(script=runs(*([token] for token in ids("hello the quick")), [eos])) as front:
        has(front)
        body = {**ASK, "stop": stop}
        if streamed:
            events = await chunks(front, "/v1/chat/completions", body)
            assert said(events) == text and events[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            choice = (await front.post("/v1/chat/completions", body))[1]["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


async def test_several_answers_have_seeds_of_their_own_and_one_stream() -> None:
    async with serve() as front:
        has(front)
        body = {**ASK, "n": 3, "seed": 7, "max_tokens": 6, "stream_options": {"include_usage": True}}
        status, whole = await front.post("/v1/chat/completions", body)
        assert status == 200 and [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in whole["choices"]]
        assert len(set(texts)) == 3
        events = await chunks(front, "/v1/chat/completions", body)
        assert [said(events, index) for index in range(3)] == texts
        assert events[-1]["usage"] == whole["usage"] and whole["usage"]["completion_tokens"] == 18
        _, alone = await front.post("/v1/chat/completions", {**body, "n": 1})
        assert alone["choices"][0]["message"]["content"] == texts[0]
        front.router.inside = LIMITS.max_concurrent_requests - 2
        assert (await front.post("/v1/chat/completions", body))[0] == 429
        front.router.inside = 0
        await front.settled()


async def test_logprobs() -> None:
    async with serve() as front:
        has(front)
        body = {**ASK, "max_tokens": 4, "seed": 1, "logprobs": True, "top_logprobs": 2}
        _, whole = await front.post("/v1/chat/completions", body)
        content = whole["choices"][0]["logprobs"]["content"]
        assert len(content) == 4 and all(len(one["top_logprobs"]) == 2 and one["logprob"] < 0 for one in content)
        events = await chunks(front, "/v1/chat/completions", body)
        assert [one for event in events for one in event["choices"][0]["logprobs"]["content"]] == content
        params = front.router.submitted[0].params
        assert params.raw_logprobs and params.top_n == 2 and params.logprobs
        _, plain = await front.post("/v1/chat/completions", {**ASK, "max_tokens": 4})
        assert plain["choices"][0]["logprobs"] is None and not front.router.submitted[-1].params.logprobs


@pytest.mark.parametrize("streamed", [False, True])
async def test_tools_are_called(streamed: bool) -> None:
    eos = byte_level().eos_ids[0]
    async with serve(script=runs(*([token] for token in ids(f"hello\n{CALL}\n{CALL}")), [eos]), limits=WIDE) as front:
        has(front, TOOLS)
        body = {**ASK, "tools": [TOOL]}
        if not streamed:
            choice = (await front.post("/v1/chat/completions", body))[1]["choices"][0]
            calls = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "hello"
            assert [call["function"] for call in calls] == [{"name": "f", "arguments": '{"a": 1}'}] * 2
            assert len({call["id"] for call in calls}) == 2 and all(call["id"].startswith("call_") for call in calls)
        else:
            events = await chunks(front, "/v1/chat/completions", body)
            assert said(events) == "hello" and events[-1]["choices"][0]["finish_reason"] == "tool_calls"
            deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
            begun = [call for call in deltas if "id" in call]
            assert [(call["index"], call["function"]) for call in begun] == [
                (0, {"name": "f", "arguments": ""}),
                (1, {"name": "f", "arguments": ""}),
            ]
            assert len({call["id"] for call in begun}) == 2 and all(call["type"] == "function" for call in begun)
            for index in (0, 1):
                own = [call for call in deltas if call["index"] == index]
                assert own[0] is begun[index] and len(own) > 5, "piece by piece"
                assert "".join(call["function"]["arguments"] for call in own) == '{"a": 1}'
                assert all(call.keys() == {"index", "function"} and "name" not in call["function"] for call in own[1:])
        prompt = front.services.tokenizer.decode(front.router.submitted[0].request.tokens)  # type: ignore[union-attr]
        assert '"description": "d"' in prompt


async def test_developers_are_a_system_where_the_template_does_not_know_them() -> None:
    strict = (
        "{% for m in messages %}{% if m.role not in ('system', 'user') %}{{ raise_exception('no ' ~ m.role) }}{% endif %}"
        "{{ m.role }},{% endfor %}"
    )
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    async with serve() as front:
        for template, shown in ((strict, "system,user,"), (strict.replace("'system'", "'developer'"), "developer,user,")):
            has(front, template)
            assert (await front.post("/chat_tokenize", {"messages": messages}))[1]["templated_text"] == shown


async def test_the_heads_of_several_prompts_are_sums() -> None:
    async with serve() as front:
        response, raw = await front.raw("/v1/completions", {"prompt": ["hello", "hello the"], "max_tokens": 3, "n": 2, "user": 5})
        usage = json.loads(raw)["usage"]
        assert response.headers["x-prompt-tokens"] == str(usage["prompt_tokens"]) == str(len(ids("hello")) + len(ids("hello the")))
        assert response.headers["x-generated-tokens"] == str(usage["completion_tokens"])


async def test_a_template_that_does_not_know_tools_is_told_of_them() -> None:
    eos = byte_level().eos_ids[0]
    async with serve(script=runs(ids('{"name": "f", "parameters": {}}'), [eos]), limits=WIDE) as front:
        has(front)
        _, answer = await front.post("/v1/chat/completions", {**ASK, "tools": [TOOL], "tool_choice": "auto"})
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"arguments": "{}", "name": "f"}
        assert answer["choices"][0]["message"]["content"] is None
        prompt = front.services.tokenizer.decode(front.router.submitted[0].request.tokens)  # type: ignore[union-attr]
        assert "\n---\n" in prompt and '"name":"f"' in prompt
        await front.post("/v1/chat/completions", {**ASK, "tools": [TOOL], "tool_choice": "none"})
        assert front.router.submitted[1].request.tokens == ids("<|user|>hello\n<|assistant|>")


@pytest.mark.parametrize(
    ("changes", "status", "kind", "words"),
    [
        ({"messages": "x"}, 422, "validation", "expected sequence"),
        ({"messages": [{"role": "user"}]}, 422, "validation", "did not match any variant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            422,
            "validation",
            "reads text only",
        ),
        ({"chat_template_kwargs": {"strict": "way"}}, 422, "template_error", "Template error: no way"),
        ({"tools": [TOOL], "tool_choice": "g"}, 422, "tool_error", "Tool error: Tool with name g not found"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, 422, "tool_error", "mutually exclusive"),
        ({"tools": [], "response_format": {"type": "json_object", "value": {}}}, 422, "tool_error", "mutually exclusive"),
        ({"response_format": {"type": "xml"}}, 422, "validation", "`response_format.type` must be"),
        ({"guided_regex": "("}, 422, "validation", "grammar is not valid: unclosed group at character 1"),
        ({"n": 0}, 422, "validation", "`n` must be"),
        ({"n": 9}, 422, "validation", "9 answers were asked for"),
        ({"top_logprobs": 21, "logprobs": True}, 422, "validation", "`top_logprobs` must be"),
        ({"temperature": -1}, 422, "validation", "`temperature`"),
        ({"top_p": 1.5}, 422, "validation", "`top_p`"),
        ({"presence_penalty": 3}, 422, "validation", "`presence_penalty`"),
        ({"logit_bias": {"cat": 1}}, 422, "validation", "no token id"),
        ({"logit_bias": {"99999": 1}}, 422, "validation", "no token id"),
        ({"logit_bias": {"-1": 1}}, 422, "validation", "no token id"),
        ({"logit_bias": {"9" * 5000: 1}}, 422, "validation", "no token id"),
        ({"logit_bias": {"1": 101}}, 422, "validation", "`logit_bias` must be >= -100"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 422, "validation", "`stop` supports up to 4"),
        ({"max_tokens": 1000}, 422, "validation", "must be <= 256"),
        ({"max_tokens": 0}, 422, "validation", "`max_new_tokens` must be strictly positive"),
        ({"messages": [{"role": "user", "content": "x" * 190}]}, 422, "validation", "`inputs` must have less than"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_refusals(changes: dict[str, Any], status: int, kind: str, words: str, streamed: bool) -> None:
    async with serve() as front:
        has(front)
        got, error = await front.post("/v1/chat/completions", {**ASK, "max_tokens": 4, "stream": streamed, **changes})
        assert (got, error["error_type"]) == (status, kind) and words in error["error"]["message"]
        assert not front.router.submitted and not front.router.inside


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {"guided_choice": ["yes", "no"]},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
)
async def test_what_the_text_must_follow_reaches_the_worker(asked: dict[str, Any]) -> None:
    async with serve(limits=WIDE) as front:
        has(front)
        status, _ = await front.post("/v1/chat/completions", {**ASK, "max_tokens": 4, "n": 2, **asked})
        assert status == 200
        first, second = (sequence.params.grammar for sequence in front.router.submitted)
        assert first == second != ""


async def test_without_a_template_there_is_no_chat() -> None:
    async with serve() as front:
        told = {"message": "Template error: template not found", "type": "invalid_request_error", "code": "template_error", "param": None}
        assert await front.post("/v1/chat/completions", ASK) == (
            422,
            {"error": {**told, "http_status_code": 422}, "error_type": "template_error"},
        )
        assert await front.post("/chat_tokenize", ASK) == (
            422,
            {"error": "Template error: template not found", "error_type": "template_error"},
        )


async def test_too_long_a_conversation_has_openais_code() -> None:
    async with serve() as front:
        has(front)
        for more in ({"messages": [{"role": "user", "content": "x" * 190}]}, {"max_tokens": 1000}):
            _, error = await front.post("/v1/chat/completions", {**ASK, **more})
            assert (error["error"]["code"], error["error_type"]) == ("context_length_exceeded", "validation")


async def test_what_openais_clients_send_and_tgi_refused_is_taken() -> None:
    async with serve() as front:
        has(front)
        body = {
            **ASK,
            "top_p": 1,
            "stop": None,
            "stream_options": None,
            "logit_bias": {"65": 5, "66": -100},
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "response_format": {"type": "text"},
            "max_tokens": 9,
            "max_completion_tokens": 3,
            "parallel_tool_calls": True,
            "user": "me",
            "store": False,
        }
        status, answer = await front.post("/v1/chat/completions", body)
        assert status == 200 and answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["finish_reason"] == "length"
        params = front.router.submitted[0].params
        assert params.logit_bias == ((65, 5.0), (66, -100.0)) and (params.presence_penalty, params.count_penalty) == (0.5, 0.25)
        assert params.sample and (params.temperature, params.top_p, params.frequency_penalty) == (1.0, 1.0, 0.0)
        await front.post("/v1/chat/completions", {**ASK, "temperature": 0, "top_p": 0.3, "max_tokens": 3})
        assert not front.router.submitted[1].params.sample


async def test_the_assistants_last_message_is_continued() -> None:
    async with serve() as front:
        has(front)
        body = {"messages": [*ASK["messages"], {"role": "assistant", "content": "I am "}], "max_tokens": 3}
        await front.post("/v1/chat/completions", body)
        await front.post("/v1/chat/completions", {**body, "continue_final_message": False})
        texts = [front.services.tokenizer.decode(one.request.tokens) for one in front.router.submitted]  # type: ignore[union-attr]
        assert texts == ["<|user|>hello\n<|assistant|>I am ", "<|user|>hello\n<|assistant|>I am \n<|assistant|>"]


@pytest.mark.parametrize(("policy", "kept"), [("oldest", [4, 5, 6, 7]), ("middle", [0, 1, 6, 7])])
async def test_too_long_a_conversation_is_shortened_only_when_asked(policy: str, kept: list[int]) -> None:
    async with serve() as front:
        has(front)
        messages = [{"role": "user", "content": f"{n}" * 30} for n in range(8)]
        body = {"messages": [{"role": "system", "content": "s"}, *messages], "max_tokens": 40}
        assert (await front.post("/v1/chat/completions", body))[0] == 422
        assert (await front.post("/v1/chat/completions", {**body, "truncate": "refuse"}))[0] == 422
        assert (await front.post("/v1/chat/completions", {**body, "truncate": policy}))[0] == 200
        prompt = front.services.tokenizer.decode(front.router.submitted[0].request.tokens)  # type: ignore[union-attr]
        assert prompt.startswith("<|system|>s\n") and [n for n in range(8) if f"{n}" * 30 in prompt] == kept


TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
)


@pytest.mark.parametrize("policy", ["oldest", "middle"])
async def test_a_conversation_of_turns_is_shortened_by_turns(policy: str) -> None:
    async with serve() as front:
        has(front, TURNS)
        messages = [{"role": ("user", "assistant")[n % 2], "content": f"{n}" * 25} for n in range(9)]
        assert (await front.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "truncate": policy}))[0] == 200
        prompt = front.services.tokenizer.decode(front.router.submitted[0].request.tokens)  # type: ignore[union-attr]
        kept = [n for n in range(9) if f"{n}" * 25 in prompt]
        assert kept == ([4, 5, 6, 7, 8] if policy == "oldest" else [0, 1, 6, 7, 8])


def test_shortening_a_long_conversation_renders_it_a_few_times() -> None:
    body = msgspec.convert({"messages": [{"role": "user", "content": "a"}] * 5000, "truncate": "oldest"}, ChatRequest)
    looked: list[int] = []
    prompt = shortened(body, ChatTemplates({"default": CHATML}), lambda text: not looked.append(len(text)) and len(text) < 1000)
    assert 900 < len(prompt.text) < 1000 and len(looked) < 20


async def test_halves_of_surrogate_pairs_in_earlier_calls_are_shown_as_they_were_written() -> None:
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    async with serve() as front:
        has(front, template)
        call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
        said_before = {"role": "assistant", "content": None, "tool_calls": [call]}
        status, answer = await front.post("/chat_tokenize", {"messages": [said_before, {"role": "tool", "content": "1"}]})
        assert (status, answer["templated_text"]) == (200, '{"a": "\\ud800"}1')


async def test_a_tool_nested_as_deeply_as_a_body_may_be_is_an_answer_or_a_refusal() -> None:
    async with serve() as front:
        has(front)
        head, tail = '{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "f", "parameters": ', "}}]}"
        for depth in range(850, 1000, 5):
            body = head + "[" * depth + "]" * depth + tail
            sent = {"data": body, "headers": {"content-type": "application/json"}}
            async with front.session.post(front.url + "/chat_tokenize", **sent) as response:
                assert response.status in (200, 400, 422), await response.read()


async def test_a_refusal_in_the_conversation_is_text() -> None:
    async with serve() as front:
        has(front)
        parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
        status, answer = await front.post("/chat_tokenize", {"messages": [{"role": "user", "content": parts}]})
        assert status == 200 and "ano" in answer["templated_text"]


async def test_chat_tokenize_counts_what_usage_says() -> None:
    async with serve() as front:
        has(front)
        status, told = await front.post("/chat_tokenize", ASK)
        assert (
            status == 200
            and told["templated_text"] == "<|user|>hello\n<|assistant|>"
            and list(told) == ["tokenize_response", "templated_text"]
        )
        assert [token["id"] for token in told["tokenize_response"]] == ids(told["templated_text"])
        _, answer = await front.post("/v1/chat/completions", {**ASK, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == len(told["tokenize_response"])


async def test_completions_of_several_prompts_texts_and_ids() -> None:
    async with serve() as front:
        body = {"max_tokens": 4, "seed": 3, "n": 2}
        status, whole = await front.post("/v1/completions", {**body, "prompt": ["hello", " the"]})
        assert status == 200 and [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert whole["object"] == "text_completion" and whole["usage"]["prompt_tokens"] == len(ids("hello")) + len(ids(" the"))
        _, by_ids = await front.post("/v1/completions", {**body, "prompt": [ids("hello"), ids(" the")]})
        assert by_ids["choices"] == whole["choices"]
        _, one = await front.post("/v1/completions", {**body, "prompt": ids("hello"), "n": 1, "echo": True})
        assert one["choices"][0]["text"] == "hello" + whole["choices"][0]["text"]
        events = await chunks(front, "/v1/completions", {**body, "prompt": ["hello", " the"], "stream_options": {"include_usage": True}})
        for index in range(4):
            mine = [event["choices"][0] for event in events if event["choices"] and event["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in mine) == whole["choices"][index]["text"]
            assert mine[-1]["finish_reason"] == "length"
        assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]


async def test_the_last_chunk_of_a_streamed_completion_has_the_usage_of_its_prompt_as_in_tgi() -> None:
    async with serve() as front:
        prompts = ["hello", " the quick"]
        body = {"max_tokens": 4, "prompt": prompts}
        for asked, told in ((None, [1, 1]), ({"include_usage": True}, [0, 0])):
            events = [one for one in await chunks(front, "/v1/completions", {**body, "stream_options": asked}) if one["choices"]]
            for index, prompt in enumerate(prompts):
                mine = [event for event in events if event["choices"][0]["index"] == index]
                usages = [event["usage"] for event in mine if "usage" in event]
                expected = {"prompt_tokens": len(ids(prompt)), "completion_tokens": 4, "total_tokens": len(ids(prompt)) + 4}
                assert usages == [expected] * told[index] and all("usage" not in event for event in mine[:-1])


async def test_completion_logprobs_are_of_the_older_form() -> None:
    async with serve() as front:
        _, whole = await front.post("/v1/completions", {"prompt": "hello", "max_tokens": 3, "logprobs": 2})
        likely = whole["choices"][0]["logprobs"]
        assert [len(likely[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [3] * 4
        assert likely["text_offset"][0] == 0


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"prompt": []}, 422, "Empty array detected"),
        *(({"prompt": nothing}, 422, "cannot be empty") for nothing in ("", [""], ["a", ""], [[]], [[1], []])),
        ({"prompt": ["a", 1]}, 422, "must not mix"),
        ({"prompt": [1, 10**9]}, 422, "not in the model's vocabulary"),
        ({"prompt": [-1]}, 422, "not in the model's vocabulary"),
        ({"prompt": ["a"] * 5}, 422, "Number of prompts exceeds the maximum allowed batch size of 4"),
        ({"prompt": ["a"] * 3, "n": 3}, 422, "9 answers were asked for, this server makes 8 at a time"),
        ({"suffix": "x"}, 422, "Suffix is not supported"),
        ({"best_of": 2, "stream": True}, 422, "`best_of` > `n` is not supported when streaming"),
        ({"best_of": 9}, 422, "9 answers were asked for, this server makes 8 at a time"),
        ({"logprobs": 9}, 422, "`top_logprobs` must be"),
    ],
)
async def test_completion_refusals(changes: dict[str, Any], status: int, words: str) -> None:
    async with serve() as front:
        got, error = await front.post("/v1/completions", {"prompt": "x", "max_tokens": 2, **changes})
        assert got == status and words in error["error"]["message"] and not front.router.inside


@pytest.mark.parametrize("likely", [{}, {"logprobs": 0}])
async def test_the_best_of_several_completions_are_told(likely: dict[str, int]) -> None:
    """Those of the highest mean log-probability, the best first, of each prompt; all that were generated are paid for."""
    body = {"prompt": ["hello", "the quick"], "max_tokens": 5, "seed": 3}
    async with serve() as front:
        _, all_ = await front.post("/v1/completions", {**body, "n": 4, "logprobs": 0})
        _, best = await front.post("/v1/completions", {**body, "n": 2, "best_of": 4, **likely})
        await front.settled()
        expected = []
        for first in (0, 4):
            made = sorted(all_["choices"][first : first + 4], key=lambda one: -sum(one["logprobs"]["token_logprobs"]))
            expected += [one["text"] for one in made[:2]]
        assert [one["text"] for one in best["choices"]] == expected and [one["index"] for one in best["choices"]] == [0, 1, 2, 3]
        assert all((one["logprobs"] is not None) == bool(likely) for one in best["choices"])
        assert best["usage"] == all_["usage"]


@pytest.mark.parametrize("more", [{"best_of": 0}, {"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": 1, "n": 2, "stream": True}])
async def test_as_many_as_are_told_are_not_chosen_from(more: dict[str, Any]) -> None:
    async with serve() as front:
        response, _ = await front.raw("/v1/completions", {"prompt": "hello", "max_tokens": 2, **more})
        assert response.status == 200 and len(front.router.submitted) == more.get("n", 1)
        assert not any(sequence.params.logprobs for sequence in front.router.submitted)


async def test_nothing_is_no_prompt_although_the_tokenizer_adds_to_it() -> None:
    """One text as several: of a tokenizer that begins each with `<s>`, the empty one has a token too."""
    async with serve() as front:
        front.services.tokenizer = Tokenizer(tiny.llama())
        for prompt in ("", [""]):
            got, error = await front.post("/v1/completions", {"prompt": prompt})
            assert got == 422 and "cannot be empty" in error["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", ASK), ("/v1/completions", {"prompt": "hello"})])
async def test_failures_before_and_after_the_first_token(path: str, body: dict[str, Any]) -> None:
    failure = Failure("Request failed during generation: no", "generation", 424)
    async with serve(script=runs(failure=failure)) as front:
        has(front)
        for streamed in (False, True):
            assert (await front.post(path, {**body, "stream": streamed}))[0] == 424
    async with serve(script=runs(ids("hello"), failure=failure)) as front:
        has(front)
        *_, last = await chunks(front, path, {**body, "n": 2})
        assert last["error"]["message"] == failure.message and last["error"]["http_status_code"] == 424
        assert last["error_type"] == "generation"
        await front.settled()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", ASK), ("/v1/completions", {"prompt": "x"})])
async def test_what_other_answers_say_behind_a_failure_is_not_sent(path: str, body: dict[str, Any], before: int) -> None:
    first: list[Sequence] = []

    def one_fails(sequence: Sequence) -> Iterator[Run | Failure]:
        first.append(sequence)
        said = [Run([token], [-0.5], [], []) for token in ids("hello the quick")]
        yield from [*said[:before], Failure("no", "generation", 424)] if sequence is first[0] else said

    async with serve(script=one_fails) as front:
        has(front)
        if not before:
            assert (await front.post(path, {**body, "n": 3, "stream": True}))[0] == 424
            return
        *_, last = await chunks(front, path, {**body, "n": 3})
        assert last["error"]["http_status_code"] == 424
        await front.settled()


async def test_the_list_of_models() -> None:
    async with serve() as front:
        listed = json.loads((await front.get("/v1/models"))[1])
        assert listed["object"] == "list" and [one["id"] for one in listed["data"]] == ["tiny"]
        assert json.loads((await front.get("/v1/models/tiny"))[1]) == listed["data"][0]
        assert (await front.get("/v1/models/other"))[0].status == 404
        assert (await front.get("/v1/embeddings"))[0].status == 404


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", ASK), ("/v1/completions", {"prompt": "hello"})])
async def test_where_tokens_come_from_is_told_if_asked(path: str, body: dict[str, Any]) -> None:
    async with serve(script=runs(ids("a"), ids("bcd"))) as front:
        has(front)
        asked = {**body, "max_tokens": 4}
        told = [event["choices"][0]["origin"] for event in await chunks(front, path, {**asked, "origins": True})]
        assert [(one["step"], one["guessed"]) for one in told] == [(1, False), (2, True), (2, True), (2, False)]
        assert not any("origin" in event["choices"][0] for event in await chunks(front, path, asked))
        whole = (await front.post(path, {**asked, "origins": True}))[1]["choices"][0]
        assert whole["origins"] == told and whole["logprobs"] is None
        assert "origins" not in (await front.post(path, asked))[1]["choices"][0]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["hello the", ids("hello the")])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_echo_tells_the_log_probabilities_of_the_prompt(prompt: str | list[int], tokens: int, streamed: bool) -> None:
    async with serve() as front:
        known = ids("hello the")
        body = {"prompt": prompt, "max_tokens": tokens, "echo": True, "logprobs": 2, "seed": 1}
        if streamed:
            events = [*await chunks(front, "/v1/completions", body)]
            parts = [choice for event in events for choice in event["choices"]]
            text, usage = "".join(part["text"] for part in parts), events[-1]["usage"]
            told = {name: [one for part in parts for one in part["logprobs"][name] or []] for name in parts[0]["logprobs"]}
        else:
            answer = (await front.post("/v1/completions", body))[1]
            choice, usage = answer["choices"][0], answer["usage"]
            text, told = choice["text"], choice["logprobs"]
        assert text.startswith("hello the") and (text == "hello the") == (tokens == 0)
        assert usage == {"prompt_tokens": len(known), "completion_tokens": tokens, "total_tokens": len(known) + tokens}
        assert "".join(told["tokens"][: len(known)]) == "hello the" and len(told["tokens"]) == len(known) + tokens
        assert told["token_logprobs"][: len(known)] == [None, *map(echo.logprob, known[1:])]
        assert all(one is not None for one in told["token_logprobs"][len(known) :])
        begin = [sum(map(len, told["tokens"][:i])) for i in range(len(known) + 1)]
        assert told["text_offset"][: len(known) + 1] == begin[: len(known) + tokens]
        assert told["top_logprobs"][0] is None and all(len(top) == 2 for top in told["top_logprobs"][1:])
        for text, own, top in list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"]))[1:]:
            assert top[text] == own == max(top.values()), "so harnesses find out whether a text is what the model would have said"
        params = front.router.submitted[0].params
        assert params.prompt_logprobs and not front.router.submitted[0].request.cache
        await front.settled()


async def test_without_echo_nothing_to_generate_is_refused() -> None:
    async with serve() as front:
        status, error = await front.post("/v1/completions", {"prompt": "hello", "max_tokens": 0})
        assert status == 422 and "`max_new_tokens` must be strictly positive" in error["error"]["message"]
        assert (await front.post("/v1/completions", {"prompt": "hello", "max_tokens": 0, "echo": True}))[1]["choices"][0]["text"] == "hello"
        assert not front.router.submitted[0].params.prompt_logprobs


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", ASK), ("/v1/completions", {"prompt": "hello"})])
async def test_usage_in_every_chunk_when_it_is_asked_for(path: str, body: dict[str, Any]) -> None:
    async with serve(script=runs(ids("hello the"), ids(" quick"), [0])) as front:
        has(front)
        options = {"include_usage": True, "continuous_usage_stats": True}
        *spoken, last = await chunks(front, path, {**body, "max_tokens": 4, "stream_options": options})
        counts = [event["usage"]["completion_tokens"] for event in spoken]
        assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == last["usage"]["completion_tokens"]
        assert all(event["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for event in spoken)
        assert last["choices"] == []
        without = await chunks(front, path, {**body, "max_tokens": 4, "stream_options": {"continuous_usage_stats": True}})
        assert all(not event.get("usage") for event in without[:-1])


LONG = "word " * 4000
LONG_BODIES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "x"}] * 10_000},
    {"messages": [{"role": "user", "content": LONG}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1000}]},
    {**ASK, "tools": [{**TOOL, "function": {**TOOL["function"], "description": LONG}}]},
    {**ASK, "tools": [TOOL] * 200},
    {**ASK, "documents": [{"text": LONG}]},
    {**ASK, "chat_template_kwargs": {"told": LONG}},
    {"messages": [*ASK["messages"], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": LONG}}}]}]},
]


async def test_whatever_is_long_is_rendered_beside_the_loop() -> None:
    """Messages, parts, tools, documents …: whoever comes meanwhile does not wait for the template."""
    seen: list[str] = []
    async with serve() as front:
        has(front)
        templates = front.services.tokenizer.templates  # type: ignore[union-attr]
        render = templates.render

        def rendering(*given: Any, **more: Any) -> str:
            seen.append(threading.current_thread().name)
            return render(*given, **more)

        templates.render = rendering  # type: ignore[method-assign]
        for body in LONG_BODIES:
            for path, more in (("/chat_tokenize", {}), ("/v1/chat/completions", {}), ("/v1/chat/completions", {"truncate": "oldest"})):
                seen.clear()
                await front.post(path, {**body, **more})
                assert seen and all(name.startswith("tokenize-") for name in seen), (path, more, str(body)[:100], seen)
        seen.clear()
        await front.post("/v1/chat/completions", {**ASK, "max_tokens": 2})
        assert seen == [threading.current_thread().name]
        await front.settled()


async def test_a_full_server_renders_nothing() -> None:
    """Of a body of megabytes there is only the refusal, whatever its template would have said."""
    async with serve() as front:
        has(front, "{{ raise_exception('rendered') }}")
        permit = front.router.enter(LIMITS.max_concurrent_requests)
        for more in ({}, {"truncate": "oldest"}, {"stream": True}):
            status, answer = await front.post("/v1/chat/completions", {**ASK, **more})
            assert (status, answer["error_type"]) == (429, "overloaded")
        permit.leave()
        assert (await front.post("/v1/chat/completions", ASK))[0] == 422
        await front.settled()


NEVER = {"type": "regex", "value": "a"}
WAITS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "x", "parameters": {"deadline_ms": 50, "grammar": NEVER}}),
    ("/generate_stream", {"inputs": "x", "parameters": {"deadline_ms": 50, "grammar": NEVER}}),
    ("/v1/chat/completions", {**ASK, "deadline_ms": 50, "response_format": NEVER}),
    ("/v1/chat/completions", {**ASK, "deadline_ms": 50, "response_format": NEVER, "stream": True}),
    ("/v1/completions", {"prompt": ["x", "y"], "deadline_ms": 50, "guided_regex": "a", "stream": True, "n": 2}),
]


@pytest.mark.parametrize(("path", "body"), WAITS)
async def test_a_deadline_counts_before_there_is_a_sequence(path: str, body: dict[str, Any]) -> None:
    """While a grammar is read, behind those of others, which may take half a minute."""

    async def never(_: object) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async with serve() as front:
        has(front).services.grammars.read = never  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            status, answer = await front.post(path, body)
        assert (status, answer["error_type"]) == (504, "deadline_exceeded") and not front.router.submitted
        await front.settled()
        metrics = (await front.get("/metrics"))[1].decode()
        assert 'tgi_request_failure{err="dropped"} 1' in metrics


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain text", "hello the quick", {}),
    ("alternatives", "hello the quick", {"logprobs": True, "top_logprobs": 2}),
    ("several answers", "hello", {"n": 3}),
    ("a thought", "<think>hm, so</think>\n\nhello", {}),
    ("calls behind text", f"hello\n{CALL}\n{CALL}", {"tools": [TOOL]}),
    ("calls alone, with alternatives", CALL, {"tools": [TOOL], "logprobs": True}),
    ("a call that is cut off", CALL, {"tools": [TOOL], "max_tokens": 40}),
    ("nothing", "", {}),
]


@pytest.mark.parametrize(("text", "more"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_openais_helper_makes_the_whole_answer_of_a_stream(text: str, more: dict[str, Any]) -> None:
    """It adds up whatever texts the deltas have: what belongs to the answer once must come once."""
    eos = byte_level().eos_ids[0]
    async with serve(script=runs(*([token] for token in ids(text)), [eos]), limits=WIDE) as front:
        has(front, TOOLS + "{% if false %}</think>{% endif %}")
        ask = openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="x", max_retries=0)
        asked = {"model": "tgi", "messages": ASK["messages"], "max_tokens": 200, **more}
        whole = await ask.chat.completions.create(**asked)
        async with ask.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            made = stream.current_completion_snapshot
        for one, other in zip(made.choices, whole.choices, strict=True):
            assert one.finish_reason == other.finish_reason and one.index == other.index
            left, right = one.message.to_dict(), other.message.to_dict()
            for message in (left, right):
                for call in message.get("tool_calls") or []:
                    assert call.pop("id").startswith("call_")
                    call.pop("index", None)
                    call["function"].pop("parsed_arguments", None)
            assert {k: v for k, v in left.items() if v is not None and k != "parsed"} == {k: v for k, v in right.items() if v is not None}
            if other.logprobs:
                assert one.logprobs and [x.to_dict() for x in one.logprobs.content or []] == [
                    x.to_dict() for x in other.logprobs.content or []
                ]
        await ask.close()
        await front.settled()
