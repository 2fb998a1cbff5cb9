"""What `/v1` bodies ask of the text, and the calls that they force: what the grammar allows, the reader reads."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.server import chat, tools
from forerun.server.dialects import HERMES, JSON, MISTRAL, PYTHONIC, Dialect
from forerun.server.errors import ApiError
from forerun.server.grammar import Constraint
from forerun.server.grammar_calls import BESIDE
from forerun.server.grammar_check import Asked, Wrong, translate
from forerun.server.openai_schema import ChatRequest
from forerun.server.reading import Reader
from forerun.server.template import ChatTemplates

TABLES = llguidance.LLTokenizer("byte")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "fine": {"type": "boolean"},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "no arguments"}},
]


def body(**more: Any) -> ChatRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "hi"}], **more}, ChatRequest)


def must(**more: Any) -> Constraint | None:
    return tools.of_body(body(**more))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


@pytest.mark.parametrize(
    ("asked", "kind", "value", "strict"),
    [
        ({"response_format": {"type": "json_object"}}, "schema", '{"type":"object"}', False),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, "schema", TEXT, False),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "schema", TEXT, False),
        ({"response_format": {"type": "json", "value": SCHEMA}}, "schema", TEXT, False),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}}, "schema", TEXT, True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "schema", TEXT, False),
        ({"response_format": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}}, "schema", TEXT, False),
        ({"response_format": {"type": "regex", "value": "a+"}}, "regex", "a+", False),
        ({"guided_json": SCHEMA}, "schema", TEXT, False),
        ({"guided_json": TEXT}, "schema", TEXT, False),
        ({"guided_regex": "a+"}, "regex", "a+", False),
        ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]', False),
        ({"guided_grammar": 'start: "a"'}, "ebnf", 'start: "a"', False),
        ({"structured_outputs": {"json": SCHEMA}}, "schema", TEXT, False),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]', False),
        ({"grammar": {"type": "regex", "value": "a+"}}, "regex", "a+", False),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"', False),
    ],
)
def test_ways_to_say_it(asked: dict[str, Any], kind: str, value: str, strict: bool) -> None:
    assert must(**asked) == Constraint(kind, value, strict)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [{}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}])
def test_nothing_said(asked: dict[str, Any]) -> None:
    assert must(**asked) is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"response_format": {"type": "xml"}}, "`response_format.type` must be text, json_object, json_schema or regex. Given: xml"),
        ({"response_format": {"type": "json_schema"}}, "`response_format.json_schema` must be an object with a `schema`"),
        ({"response_format": {"type": "json_object", "value": 3}}, "grammar is not supported"),
        ({"guided_json": 7}, "grammar is not supported"),
        ({"guided_choice": []}, "a choice needs something to choose from"),
        ({"grammar": {"type": "bnf", "value": ""}}, "`grammar`: Invalid enum value 'bnf'"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "only one of `guided_json` and `guided_regex` can be followed"),
    ],
)
def test_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        must(**asked)
    assert caught.value.status == 422 and message in caught.value.message


TEMPLATES: dict[str, tuple[str, Dialect]] = {
    "hermes": ("{{ tools }}<tool_call>", HERMES),
    "mistral": ("{{ tools }}[TOOL_CALLS]", MISTRAL),
    "args": ("{{ tools }}[TOOL_CALLS][ARGS]", MISTRAL),
    "json": ("{{ tools }}", JSON),
    "pythonic": ("{{ tools }}[func_name1(", PYTHONIC),
}


def forced(
    style: str, given_tools: list[Any] = TOOLS, special: dict[str, int] | None = None, **more: Any
) -> tuple[chat.Prompt, Constraint]:
    asked = body(tools=given_tools, **{"tool_choice": "required", **more})
    prompt = chat.prompt_of(asked, ChatTemplates({"default": TEMPLATES[style][0]}))
    made = tools.constraint_of(asked, prompt, (special or {}).get)
    assert made is not None
    return prompt, made


def compiled(made: Constraint) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(TABLES, translate(Asked(made.kind, made.value, made.strict, made.thought)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepted(made: Constraint, text: str) -> bool:
    matcher = compiled(made)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


class TestForced:
    @pytest.mark.parametrize(
        ("style", "text"),
        [
            ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'),
            ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]'),
            ("args", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'),
            ("json", '{"name": "weather", "parameters": {"city": "Rome"}}'),
            ("pythonic", '[weather(city="Rome")]'),
        ],
    )
    def test_the_model_writes_as_it_was_trained(self, style: str, text: str) -> None:
        prompt, made = forced(style)
        assert accepted(made, text) and not accepted(made, "Rome is fine.") and not accepted(made, text + text)
        assert _called(_finished(prompt.reader(), text)) == [("weather", {"city": "Rome"})]

    @pytest.mark.parametrize("style", TEMPLATES)
    def test_only_the_named_one(self, style: str) -> None:
        prompt, made = forced(style, tool_choice={"type": "function", "function": {"name": "now"}})
        assert [tool.function.name for tool in prompt.forced] == ["now"]
        spoken = text_of(compiled(made), [0] * 200)
        assert _called(_finished(prompt.reader(), spoken)) == [("now", {})]

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(sorted(TEMPLATES)), st.lists(st.integers(0, 255), min_size=40, max_size=40), st.booleans())
    def test_whatever_the_grammar_allows_is_read_as_calls(self, style: str, choices: list[int], many: bool) -> None:
        """Random walks through the grammar to its end."""
        prompt, made = forced(style, parallel_tool_calls=many)
        pieces = _finished(prompt.reader(), text_of(compiled(made), choices))
        assert pieces and all(piece.kind in ("call", "arguments") for piece in pieces)
        calls = _called(pieces)
        assert many or len(calls) == 1
        for name, arguments in calls:
            if name == "now":
                assert arguments == {}
                continue
            assert name == "weather" and isinstance(arguments["city"], str) and len(arguments["city"]) <= 6
            assert arguments.keys() <= {"city", "days", "fine"}
            assert arguments.get("days", 1) in range(1, 10) and arguments.get("fine") in (None, True, False)

    def test_marks_that_are_special_tokens(self) -> None:
        _, made = forced("hermes", special={"<tool_call>": 7, "</tool_call>": 8})
        assert "<[7]>" in translate(Asked(made.kind, made.value)) and "<[8]>" in translate(Asked(made.kind, made.value))

    @pytest.mark.parametrize(("prompt", "text"), [("", "<think>so</think>\n\n"), ("", ""), ("<think>", "so\n</think>\n")])
    def test_it_may_think_first(self, prompt: str, text: str) -> None:
        template = "{{ tools }}<tool_call>{% if false %}</think>{% endif %}" + prompt
        asked = body(tools=TOOLS, tool_choice="required")
        made = tools.constraint_of(asked, chat.prompt_of(asked, ChatTemplates({"default": template})), {}.get)
        assert made is not None and made.thought == ("inside" if prompt else "may")
        call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        assert accepted(made, text + call)

    def test_thoughts_before_a_format(self) -> None:
        asked = body(guided_choice=["yes", "no"])
        made = tools.constraint_of(asked, chat.prompt_of(asked, ChatTemplates({"default": "{{ messages }}</think>"})), {}.get)
        assert made is not None and accepted(made, "<think>hm</think>\nyes") and accepted(made, "no") and not accepted(made, "maybe")

    def test_schemas_keep_their_own_references(self) -> None:
        schema = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"], "$defs": {"P": {"enum": [1, 2]}}}
        both = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
        assert accepted(forced("json", both)[1], '{"name": "g", "parameters": {"p": 2}}')
        assert accepted(forced("pythonic", both)[1], "[f(p=1)]") and not accepted(forced("pythonic", both)[1], "[f(p=3)]")

    def test_names_that_the_dialect_cannot_write(self) -> None:
        _, made = forced("pythonic", [{"type": "function", "function": {"name": "get-it", "parameters": WEATHER}}])
        with pytest.raises(Wrong, match="'get-it' of tool 'get-it' is no name in Python"):
            translate(Asked(made.kind, made.value))

    def test_arguments_that_the_dialect_cannot_list(self) -> None:
        """Said so, instead of a call without any."""
        schema = {"$ref": "#/$defs/P", "$defs": {"P": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
        tool = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        with pytest.raises(Wrong, match=r"'\$ref' of them together cannot be followed.*tool_choice"):
            translate(Asked("calls", forced("pythonic", tool)[1].value))
        assert accepted(forced("json", tool)[1], '{"name": "f", "parameters": {"a": 1}}')

    @pytest.mark.parametrize("key", sorted(BESIDE))
    @pytest.mark.parametrize("inside", [False, True])
    def test_what_holds_for_arguments_together_is_not_left_out(self, key: str, inside: bool) -> None:
        counts, maps = ("minProperties", "maxProperties"), ("dependentRequired", "dependentSchemas", "dependencies")
        beside = {key: 1 if key in counts else {} if key in maps else [{"required": ["a"]}] if key.endswith("Of") else {"required": ["a"]}}
        beside = {"$ref": "#"} if key == "$ref" else beside
        both = {"allOf": [beside]} if inside else beside
        schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, **both}
        _, made = forced("pythonic", [{"type": "function", "function": {"name": "f", "parameters": schema}}])
        with pytest.raises(Wrong, match=re.escape(repr(key))):
            translate(Asked("calls", made.value))

    def test_parts_that_all_hold_are_one_list_of_arguments(self) -> None:
        schema = {
            "properties": {"a": {"type": "integer"}, "never": False, "any": True},
            "required": ["a", "unsaid"],
            "allOf": [{"properties": {"a": {"minimum": 3, "maximum": 4}, "b": {"enum": ["x"]}}, "required": ["b"]}, {"required": ["any"]}],
        }
        _, made = forced("pythonic", [{"type": "function", "function": {"name": "f", "parameters": schema}}])
        assert accepted(made, '[f(a=3, any=[1], b="x", unsaid="u")]')
        for wrong in (
            "a=2, any=1, b='x', unsaid=1",
            'a=3, b="x", unsaid=1',
            'a=3, any=1, b="y", unsaid=1',
            'a=3, never=1, any=1, b="x", unsaid=1',
        ):
            assert not accepted(made, f"[f({wrong})]")
        assert not accepted(made, '[f(a=3, any=1, b="x")]')

    def test_an_argument_may_be_spoken_of_in_many_parts(self) -> None:
        """Side by side, however many: each part in the one before it would soon be deeper than anybody reads."""
        parts = [{"properties": {"a": {"minimum": least}}} for least in range(1000)]
        schema = {"properties": {"a": {"type": "integer", "maximum": 1001}}, "required": ["a"], "allOf": parts}
        _, made = forced("pythonic", [{"type": "function", "function": {"name": "f", "parameters": schema}}])
        assert accepted(made, "[f(a=1000)]") and not accepted(made, "[f(a=998)]") and not accepted(made, "[f(a=1002)]")

    @pytest.mark.parametrize(
        "schema",
        [
            {"properties": {"a": False}, "required": ["a"]},
            {"properties": {"a": False}, "allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
            {"properties": {}, "allOf": [True, False]},
        ],
    )
    def test_an_argument_that_must_be_there_and_may_not_is_nothing_that_can_be_said(self, schema: dict[str, Any]) -> None:
        _, made = forced("pythonic", [{"type": "function", "function": {"name": "f", "parameters": schema}}])
        with pytest.raises(Wrong, match="nothing can satisfy it"):
            translate(Asked("calls", made.value))

    def test_a_wrong_schema_names_tool_and_place(self) -> None:
        wrong = {"type": "object", "properties": {"a": {"type": "strin"}}}
        _, made = forced("json", [{"type": "function", "function": {"name": "f", "parameters": wrong}}])
        with pytest.raises(Wrong, match='f/properties/a/type: "strin" is not one of'):
            translate(Asked(made.kind, made.value))

    @pytest.mark.parametrize("more", [{"response_format": {"type": "json_object"}}, {"guided_regex": "a"}])
    def test_not_together_with_a_format(self, more: dict[str, Any]) -> None:
        with pytest.raises(ApiError, match="Grammar and tools are mutually exclusive"):
            forced("json", **more)

    def test_an_unknown_name(self) -> None:
        with pytest.raises(ApiError, match="Tool with name nope not found"):
            forced("json", tool_choice="nope")


def _finished(reader: Reader, text: str) -> list[Any]:
    return [*reader.push(text), *reader.finish()]


def _called(pieces: list[Any]) -> list[tuple[str, Any]]:
    """The names, with the arguments read."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append((piece.text, ""))
        elif piece.kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return [(name, json.loads(arguments)) for name, arguments in calls]


def text_of(matcher: llguidance.LLMatcher, choices: list[int]) -> str:
    """A walk: each choice takes one of the printable characters that are allowed; afterwards the first one always, until it may end."""
    said: list[int] = []
    while len(said) < 2000:
        bits = matcher.compute_bitmask()
        ways = [byte for byte in range(256) if (bits[byte >> 3] >> (byte & 7) & 1 and 32 <= byte < 127) or (byte == 10 and bits[1] & 4)]
        if matcher.is_accepting() and (len(said) >= len(choices) or not ways):
            break
        ends = [byte for byte in ways if chr(byte) in '"}])'] if len(said) >= len(choices) else []
        byte = (ends or ways)[choices[len(said)] % len(ways) if len(said) < len(choices) else 0]
        said.append(byte)
        assert matcher.consume_token(byte)
    return bytes(said).decode()
