"""Grammars, formats and forced calls through real clients on a real server: what comes out holds, and bad ones harm nobody."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
import text_generation
from huggingface_hub import InferenceClient
from text_generation.errors import ValidationError

from forerun.bench.grammars import HOSTILE
from tests.e2e.server import Server, running
from tests.e2e.test_life import kill_worker

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*Pydantic.*")
PROMPT = "the quick brown hello"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
WORD = {"type": "string", "maxLength": 5, "pattern": "^[a-z ]*$"}
SCHEMA = {
    "type": "object",
    "properties": {"name": WORD, "size": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["small", "big"]}},
    "required": ["name", "size", "kind"],
}
DAYS = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "days", "parameters": DAYS}},
    {"type": "function", "function": {"name": "now"}},
]
"""short: the tiny model has 512 positions"""


@pytest.fixture(scope="module")
def guessing(llama_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a drafter, a few rows and a small pool, so that guesses, waiting and preemption are part of the test."""
    flags = ("--device", "cpu", "--threads", "1", "--max-batch-total-tokens", "4096", "--speculator", "suffix", "--speculate", "6")
    with running(llama_model, tmp_path_factory.mktemp("log") / "guessing.log", *flags) as server:
        yield server


def api(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=60, max_retries=0)


def fits(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


class TestNative:
    def test_the_old_client(self, llama: Server) -> None:
        client = text_generation.Client(llama.url, timeout=60)
        grammar = text_generation.types.Grammar(type="regex", value="[a-c]{3}-[0-9]{2}")
        answer = client.generate(PROMPT, max_new_tokens=40, grammar=grammar)
        assert re.fullmatch("[a-c]{3}-[0-9]{2}", answer.generated_text) and answer.details.finish_reason.value == "eos_token"
        said = list(client.generate_stream(PROMPT, max_new_tokens=40, grammar=grammar))
        assert said[-1].generated_text == answer.generated_text == "".join(event.token.text for event in said if not event.token.special)

    def test_the_hubs_client(self, llama: Server) -> None:
        client = InferenceClient(llama.url, timeout=60)
        for grammar in ({"type": "json", "value": SCHEMA}, {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}):
            assert fits(client.text_generation(PROMPT, max_new_tokens=80, grammar=grammar, return_full_text=False))  # type: ignore[arg-type]

    @pytest.mark.parametrize("text", [" 'm", " 's", " n't", " ,", "see 'more"])
    def test_stream_and_text_are_the_same(self, llama: Server, text: str) -> None:
        client = text_generation.Client(llama.url, timeout=60)
        grammar = text_generation.types.Grammar(type="regex", value=text)
        said = list(client.generate_stream(PROMPT, max_new_tokens=40, grammar=grammar))
        assert said[-1].generated_text == text == "".join(event.token.text for event in said if not event.token.special)

    def test_an_invalid_schema(self, llama: Server) -> None:
        client = text_generation.Client(llama.url, timeout=60)
        with pytest.raises(ValidationError, match="grammar is not valid: Grammar must have a 'properties' field"):
            client.generate(PROMPT, grammar=text_generation.types.Grammar(type="json", value={"abc": "def"}))

    def test_three_hundred_fields(self, llama: Server) -> None:
        wide = {f"field_{i}": {"type": "boolean"} for i in range(300)}
        body = {"type": "json", "value": {"type": "object", "properties": wide, "required": list(wide)}}
        status, answer = llama.ask("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 60, "grammar": body}}, timeout=60)
        assert status == 200 and json.loads(answer)["generated_text"].startswith("{")


class Step(pydantic.BaseModel):
    kind: Literal["small", "big"]
    size: int = pydantic.Field(ge=0, le=99)


class Plan(pydantic.BaseModel):
    first: Step
    more: list[Step] = pydantic.Field(max_length=2)


class TestOpenAI:
    def test_formats(self, llama: Server) -> None:
        ask = api(llama).chat.completions
        strict: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
        whole = ask.create(model="tgi", messages=MESSAGES, max_tokens=80, temperature=0, response_format=strict)
        assert fits(whole.choices[0].message.content or "") and whole.choices[0].finish_reason == "stop"
        with ask.create(model="tgi", messages=MESSAGES, max_tokens=80, temperature=0, response_format=strict, stream=True) as stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
        free = ask.create(model="tgi", messages=MESSAGES, max_tokens=30, response_format={"type": "json_object"}, seed=1)
        assert (free.choices[0].message.content or "").startswith("{")

    def test_parse(self, llama: Server) -> None:
        parsed = api(llama).chat.completions.parse(model="tgi", messages=MESSAGES, max_tokens=300, temperature=0, response_format=Plan)
        assert isinstance(parsed.choices[0].message.parsed, Plan)

    def test_as_other_servers_are_asked(self, llama: Server) -> None:
        ask = api(llama)
        chosen = ask.chat.completions.create(model="tgi", messages=MESSAGES, max_tokens=9, extra_body={"guided_choice": ["yes", "no"]})
        assert chosen.choices[0].message.content in ("yes", "no")
        text = ask.completions.create(model="tgi", prompt=PROMPT, max_tokens=20, extra_body={"guided_regex": "[ab]{4}"})
        assert re.fullmatch("[ab]{4}", text.choices[0].text)
        text = ask.completions.create(model="tgi", prompt=PROMPT, max_tokens=20, extra_body={"guided_grammar": 'root ::= "ab" "c"?'})
        assert text.choices[0].text in ("ab", "abc")

    def test_the_hubs_chat(self, llama: Server) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        answer = InferenceClient(llama.url, timeout=60).chat_completion(MESSAGES, max_tokens=80, response_format=form, temperature=0)
        assert fits(answer.choices[0].message.content or "")

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "days"}}])
    def test_forced_calls(self, llama: Server, choice: Any) -> None:
        ask = api(llama).chat.completions
        asked: dict[str, Any] = {"model": "tgi", "messages": MESSAGES, "max_tokens": 90, "seed": 3, "tools": TOOLS, "tool_choice": choice}
        asked["extra_body"] = {"tool_prompt": "Call one."}
        whole = ask.create(**asked).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.tool_calls and not whole.message.content
        (call,) = whole.message.tool_calls
        assert call.function.name == "days" or choice == "required"
        arguments = json.loads(call.function.arguments)
        assert arguments["n"] in range(10) if call.function.name == "days" else arguments == {}
        with ask.create(**asked, stream=True) as stream:
            deltas = [(chunk.choices[0].delta, chunk.choices[0].finish_reason) for chunk in stream]
        calls = [delta.tool_calls[0] for delta, _ in deltas if delta.tool_calls]
        assert calls[0].id and calls[0].function and calls[0].function.name == call.function.name and calls[0].function.arguments == ""
        assert "".join(one.function.arguments or "" for one in calls if one.function) == call.function.arguments
        assert not any(delta.content for delta, _ in deltas) and deltas[-1][1] == "tool_calls"


def generate(server: Server, **parameters: Any) -> tuple[int, dict[str, Any]]:
    asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 60, "details": True, **parameters}}
    status, answer = server.ask("/generate", asked, timeout=90)
    found: dict[str, Any] = json.loads(answer)
    return status, found


def told(answer: dict[str, Any]) -> list[Any]:
    return [(token["id"], token["logprob"]) for token in answer["details"]["tokens"]]


def test_a_mixture_at_once_is_as_each_alone(llama: Server, guessing: Server) -> None:
    """Five schemas, three regular expressions, two without: alone, together, and together with guesses."""
    asked: list[dict[str, Any]] = [{"grammar": {"type": "json", "value": SCHEMA}, "seed": seed, "do_sample": True} for seed in range(5)]
    asked += [{"grammar": {"type": "regex", "value": f"[a-f]{{{n}}}( and [0-9]+)?"}} for n in (2, 3, 4)]
    asked += [{"max_new_tokens": 30}, {"max_new_tokens": 30, "do_sample": True, "seed": 9}]
    alone = [generate(llama, **one) for one in asked]
    assert all(status == 200 for status, _ in alone)
    assert all(fits(answer["generated_text"]) for _, answer in alone[:5])
    for server in (llama, guessing):
        with ThreadPoolExecutor(10) as pool:
            together = list(pool.map(lambda one, server=server: generate(server, **one), asked))
        assert [told(answer) for _, answer in together] == [told(answer) for _, answer in alone]


def test_hostile_grammars_harm_nobody(guessing: Server) -> None:
    """Each is refused with a reason, ends with an error of its own, or is followed; a bystander's stream goes on and says the same."""
    plain = {"max_new_tokens": 40, "do_sample": True, "seed": 4}
    expected = told(generate(guessing, **plain)[1])
    told_by, over = [], threading.Event()

    def bystand() -> None:
        while not over.is_set():
            told_by.append(told(generate(guessing, **plain)[1]))

    watcher = threading.Thread(target=bystand)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = dict(zip(HOSTILE, pool.map(lambda grammar: generate(guessing, grammar=grammar, max_new_tokens=12), HOSTILE.values())))
    finally:
        over.set()
        watcher.join()
    for name, (status, answer) in answers.items():
        assert status in (200, 422, 424), (name, status, answer)
        assert status == 200 or "grammar" in answer["error"], (name, answer)
    for name in ("deep", "loop", "two loops", "contradiction", "a megabyte", "unreadable", "a lot of text", "combinations"):
        assert answers[name][0] == 422, (name, answers[name])
    assert told_by and all(one == expected for one in told_by)
    assert fits(generate(guessing, grammar={"type": "json", "value": SCHEMA}, max_new_tokens=80)[1]["generated_text"])


def test_a_grammar_goes_on_where_a_worker_died(llama_model: Path, tmp_path: Path) -> None:
    """The new worker reads what was said and goes on, token for token."""
    flags = ("--device", "cpu", "--threads", "1", "--max-batch-total-tokens", "2048")
    with running(llama_model, tmp_path / "log", *flags) as server:
        client = text_generation.Client(server.url, timeout=90)
        grammar = text_generation.types.Grammar(type="regex", value="([a-f]+[,;:] ){300}")
        asked: dict[str, Any] = {"grammar": grammar, "do_sample": True, "seed": 5, "max_new_tokens": 300}
        expected = [event.token.id for event in client.generate_stream(PROMPT, **asked)]
        heard = []
        for event in client.generate_stream(PROMPT, **asked):
            heard.append(event.token.id)
            if len(heard) == 20:
                kill_worker(server)
        assert heard == expected and len(heard) == 300
