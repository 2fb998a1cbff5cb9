"""Thoughts, calls and text, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.server.reading import HERMES, JSON, MISTRAL, PYTHONIC, Call, Dialect, Reader, dialect_of, parse, thinks

DIALECTS = [HERMES, MISTRAL, JSON, PYTHONIC]
F = Call("f", '{"a": 1}')
G = Call("g", "{}")


def read(text: str, dialect: Dialect | None, cuts: list[int] | None = None, **more: bool) -> list[tuple[str, object]]:
    """The pieces, those of a kind put together."""
    reader = Reader(dialect, **more)
    edges = [0, *sorted(cuts or []), len(text)]
    pieces = [piece for start, end in itertools.pairwise(edges) for piece in reader.push(text[start:end])] + reader.finish()
    found: list[tuple[str, object]] = []
    for piece in pieces:
        if piece.call is None and found and found[-1][0] == piece.kind:
            found[-1] = (piece.kind, str(found[-1][1]) + piece.text)
        else:
            found.append((piece.kind, piece.call or piece.text))
    return found


HERMES_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HERMES_G = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("dialect", "text", "expected"),
    [
        (HERMES, HERMES_F, [("call", F)]),
        (HERMES, f"Sure.\n{HERMES_F}\n{HERMES_G}\n", [("text", "Sure."), ("call", F), ("call", G), ("text", "")][:3]),
        (HERMES, "a <tool_call> b", [("text", "a "), ("text", "<tool_call> b")]),
        (HERMES, "<tool_call>no</tool_call> b", [("text", "<tool_call>no</tool_call> b")]),
        (HERMES, "1 < 2 <tool", [("text", "1 < 2 <tool")]),
        (HERMES, '<tool_call>{"name": "g", "arguments": {}}', [("call", G)]),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', [("call", F), ("call", G)]),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [("call", F), ("call", G)]),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}', [("call", F)]),
        (MISTRAL, "[TOOL", [("text", "[TOOL")]),
        (JSON, '{"name": "f", "parameters": {"a": 1}}', [("call", F)]),
        (JSON, ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', [("call", F), ("call", G)]),
        (JSON, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [("call", F)]),
        (JSON, '{"function": {"_name": "f", "a": 1}}', [("call", F)]),
        (JSON, '{"name": "f", "arguments": "{\\"a\\": 1}"}', [("call", F)]),
        (JSON, '{"colour": "red"}', [("text", '{"colour": "red"}')]),
        (JSON, '{"name": "Anna", "age": 3}', [("text", '{"name": "Anna", "age": 3}')]),
        (JSON, "<b>bold</b>", [("text", "<b>bold</b>")]),
        (JSON, '{"name": "f", "parameters": {"a"', [("text", '{"name": "f", "parameters": {"a"')]),
        (PYTHONIC, "[f(a=1), g()]", [("call", F), ("call", G)]),
        (PYTHONIC, "[1] as in the list", [("text", "[1] as in the list")]),
        (PYTHONIC, "[f(1)]", [("text", "[f(1)]")]),
        (PYTHONIC, "[f(a=open('x'))]", [("text", "[f(a=open('x'))]")]),
        (None, HERMES_F, [("text", HERMES_F)]),
    ],
)
@settings(deadline=None)
@given(data=st.data())
def test_calls(data: st.DataObject, dialect: Dialect | None, text: str, expected: list[tuple[str, object]]) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    joined: list[tuple[str, object]] = []
    for kind, value in expected:
        if joined and kind == "text" == joined[-1][0]:
            joined[-1] = (kind, str(joined[-1][1]) + str(value))
        else:
            joined.append((kind, value))
    found = read(text, dialect, cuts)
    assert [item for item in found if item != ("text", "\n")] == joined


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, [("thought", "hm"), ("text", "Yes.")]),
        ("hm\n</think>\n\nYes.", True, [("thought", "hm"), ("text", "Yes.")]),
        ("hm, still", True, [("thought", "hm, still")]),
        ("Yes, <think>", False, [("text", "Yes, <think>")]),
        ("<thin ice", False, [("text", "<thin ice")]),
        (f"<think>hm</think>{HERMES_F}", False, [("thought", "hm"), ("call", F)]),
    ],
)
@settings(deadline=None)
@given(data=st.data())
def test_thoughts(data: st.DataObject, text: str, inside: bool, expected: list[tuple[str, object]]) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert read(text, HERMES, cuts, thinking=True, inside=inside) == expected


@settings(deadline=None)
@given(text=st.text(alphabet='<>|/tool_call[]{}"namef:,1 \n', max_size=80), data=st.data())
def test_nothing_is_lost_and_cuts_do_not_matter(text: str, data: st.DataObject) -> None:
    for dialect in (None, *DIALECTS):
        whole = read(text, dialect)
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
        assert read(text, dialect, cuts) == whole
        if all(kind == "text" for kind, _ in whole):
            said = "".join(str(value) for _, value in whole)
            assert said.replace("\n", "") == text.replace("\n", "")


@settings(deadline=None)
@given(st.text(max_size=60))
def test_what_is_parsed_has_a_name_and_json_arguments(text: str) -> None:
    for dialect in DIALECTS:
        for call in parse(dialect, text):
            assert call.name and isinstance(json.loads(call.arguments), dict)


def test_deep_nesting_is_text() -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000):
        assert read(text, JSON)[-1][0] == "text" and not parse(PYTHONIC, text)


def test_the_template_tells_the_dialect() -> None:
    assert dialect_of("…<tool_call>…") is HERMES and dialect_of("…[TOOL_CALLS]…") is MISTRAL
    assert dialect_of("[func_name1(params_name1=params_value1…") is PYTHONIC and dialect_of("") is JSON
    assert thinks("{% if '</think>' in content %}") and not thinks("{{ content }}")


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("dialect", "form"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>'),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": %s}}]'),
        (JSON, '{"name": "f", "parameters": {"a": %s}}'),
        (PYTHONIC, "[f(a=%s)]"),
    ],
)
def test_a_call_with_what_json_cannot_say_is_text(dialect: Dialect, form: str, value: str) -> None:
    text = form % value
    assert "".join(str(said) for _, said in read(text, dialect)) == text
    assert [kind for kind, _ in read(text, dialect)] == ["text"]


def test_only_names_are_called() -> None:
    assert parse(PYTHONIC, "[a.b(c=1)]") == [Call("a.b", '{"c": 1}')]
    assert not parse(PYTHONIC, "[f(a=1)(b=1)]") and not parse(PYTHONIC, "[(lambda: 1)(b=1)]")
