"""Thoughts, calls and text, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.server import calls
from forerun.server.dialects import HERMES, JSON, MISTRAL, PYTHONIC, Call, Dialect, dialect_of, parse
from forerun.server.reading import Reader, thinks

DIALECTS = [HERMES, MISTRAL, JSON, PYTHONIC]
F = Call("f", '{"a": 1}')
G = Call("g", "{}")
H = '{"a": "],)", "b": "[g(1), {}]"}'


def read(text: str, dialect: Dialect | None, cuts: list[int] | None = None, **more: bool) -> list[tuple[str, object]]:
    """The pieces, those of a kind put together, and each call with its arguments."""
    reader = Reader(dialect, **more)
    edges = [0, *sorted(cuts or []), len(text)]
    pieces = [piece for start, end in itertools.pairwise(edges) for piece in reader.push(text[start:end])] + reader.finish()
    found: list[tuple[str, object]] = []
    for piece in pieces:
        kind, last = found[-1] if found else ("", None)
        if piece.kind == "arguments":
            assert isinstance(last, Call)
            found[-1] = (kind, Call(last.name, last.arguments + piece.text))
        elif piece.kind == "call":
            found.append(("call", Call(piece.text, "")))
        elif piece.kind == kind:
            found[-1] = (kind, str(last) + piece.text)
        else:
            found.append((piece.kind, piece.text))
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
        (JSON, '{"name": "f", "parameters": {"a"', [("call", Call("f", '{"a"'))]),
        (JSON, '{"name": "f", "parameters": {', [("text", '{"name": "f", "parameters": {')]),
        (JSON, '{"type": "function", "name": "f", "parameters": {"a": 1}}', [("call", F)]),
        (JSON, '{"name": "f", "parameters": {"a": 1}, "id": {"b": "}"}}', [("call", F)]),
        (JSON, '{"name": "f", "parameters": {"a": 1}} That is all.', [("call", F), ("text", "That is all.")]),
        (JSON, '{"name": "f", "parameters": {"a": 1}}; {"b": 2}', [("call", F), ("text", '{"b": 2}')]),
        (JSON, '{"parameters": {"a": 1}, "name": "f"}', [("call", F)]),
        (JSON, '[{"name": "f", "parameters": {"a": 1}}]', [("text", '[{"name": "f", "parameters": {"a": 1}}]')]),
        (JSON, '{"name": "f", "parameters": {"a": "\\"}{]"}}', [("call", Call("f", '{"a": "\\"}{]"}'))]),
        (JSON, '{"name": "\\ud800", "parameters": {}}', [("text", '{"name": "\\ud800", "parameters": {}}')]),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            [("call", Call("f", '{"a": "</tool_call>"}'))],
        ),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>ok', [("call", Call("f", '{"a": 1}')), ("text", "ok")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}} so</tool_call>', [("call", F), ("text", "so</tool_call>")]),
        (HERMES, HERMES_F + "\nDone.\n" + HERMES_G, [("call", F), ("text", "Done."), ("call", G)]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{}"} {"name": "g"}</tool_call>', [("call", Call("f", "{}")), ("call", G)]),
        (MISTRAL, "[TOOL_CALLS]so {it} is", [("text", "[TOOL_CALLS]so {it} is")]),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}] and [TOOL_CALLS]g{}', [("call", F), ("text", "and "), ("call", G)]),
        (PYTHONIC, "[f(a=1), g()]", [("call", F), ("call", G)]),
        (PYTHONIC, "[1] as in the list", [("text", "[1] as in the list")]),
        (PYTHONIC, "[f(1)]", [("text", "[f(1)]")]),
        (PYTHONIC, "[f(a=open('x'), b=lambda: 1)]", [("call", Call("f", '{"a": "open(\'x\')", "b": "lambda: 1"}'))]),
        (PYTHONIC, "[f(a=1,), h(a='],)', b=[g(1), {}]), g()] So.", [("call", F), ("call", Call("h", H)), ("call", G), ("text", "So.")]),
        (PYTHONIC, "[f(a=1), [2]]", [("call", F), ("text", "[2]]")]),
        (PYTHONIC, '[f(a=1, b="cut', [("call", Call("f", '{"a": 1'))]),
        (PYTHONIC, "[f(a==1)]", [("text", "[f(a==1)]")]),
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


@pytest.mark.parametrize(
    ("dialect", "text", "behind"),
    [
        (HERMES, f"So.\n{HERMES_F}\n{HERMES_G}\nDone.", "Done."),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', ""),
        (JSON, '{"parameters": {"a": 1}, "name": "f"}; {"name": "g", "parameters": {}}', ""),
        (PYTHONIC, "[f(a=1), g(), f(a=1)]", ""),
    ],
)
@settings(deadline=None)
@given(data=st.data())
def test_of_several_calls_the_first_alone_if_one_is_wanted(data: st.DataObject, dialect: Dialect, text: str, behind: str) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert [call for kind, call in read(text, dialect, cuts, single=True) if kind == "call"] == [F]
    assert read(text, dialect, cuts, single=True)[-1] == (("text", behind) if behind else ("call", F))


CALLS_OF = [HERMES_F, HERMES_G, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', '[TOOL_CALLS]f[ARGS]{"a": "x"}']
CALLS_OF += ['{"name": "f", "parameters": {"a": [1, {}]}}', "[f(a=1, b='],'), g()]", "<|python_tag|>", "; ", ", ", "]", " so ", "\n"]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(CALLS_OF), min_size=1, max_size=4), st.data())
def test_broken_calls_read_alike_however_they_are_cut(parts: list[str], data: st.DataObject) -> None:
    """Calls with a character left out, doubled or put in; the calls' pieces belong to a call, and all can be sent."""
    text = "".join(parts)
    at, put = data.draw(st.integers(0, len(text))), data.draw(st.sampled_from(["", *'"\\{}[](),=<x']))
    text = text[:at] + put + text[at + data.draw(st.integers(0, 2)) :]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    for dialect in DIALECTS:
        whole = read(text, dialect)
        assert read(text, dialect, cuts) == whole
        for kind, said in whole:
            (str(said.name + said.arguments) if isinstance(said, Call) else str(said)).encode()
            assert kind != "call" or (isinstance(said, Call) and said.name)


def test_heads_are_matched_in_linear_time() -> None:
    """A match that fails goes through the text once: nothing that repeats gives back what it took."""
    for pattern in (calls._OBJECT, calls._NAMED, calls._PYTHON):
        assert not set("*+") & set(pattern.pattern.replace("*+", "").replace("++", "").replace("?+", "")), pattern.pattern


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
def test_what_json_cannot_say_is_an_argument_as_it_was_written(dialect: Dialect, form: str, value: str) -> None:
    """It may be on its way when that shows. Calls that are read as a whole are none, then."""
    ((kind, call),) = read(form % value, dialect)
    assert kind == "call" and isinstance(call, Call) and call.name == "f" and value.strip('"') in call.arguments.replace("\\\\", "\\")
    call.arguments.encode()
    unusual = (form % value).replace('"name": "f", ', "").replace("}}", '}, "name": "f"}')
    assert dialect is PYTHONIC or read(unusual, dialect) == [("text", unusual)]


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (HERMES, f"{HERMES_F}\n{HERMES_G}"),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'),
        (JSON, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'),
        (PYTHONIC, "[f(a=1), g()]"),
    ],
)
def test_names_and_arguments_come_as_soon_as_they_are_clear(dialect: Dialect, text: str) -> None:
    """Character by character: the name before its arguments, JSON without waiting, nothing of it kept for the end."""
    reader = Reader(dialect)
    pieces = [(at, piece.kind, piece.text) for at, char in enumerate(text, 1) for piece in reader.push(char)]
    assert [(kind, said) for _, kind, said in pieces if kind == "call"] == [("call", "f"), ("call", "g")]
    opens = "(a=" if dialect is PYTHONIC else '{"a'
    begun = next(at for at, kind, _ in pieces if kind == "call")
    assert begun <= text.index(opens) + len(opens) + 1
    arguments = [at for at, kind, _ in pieces if kind == "arguments" and at <= text.index("1") + 2]
    if dialect is not PYTHONIC:
        assert len(arguments) > 4
    assert arguments[-1] <= text.index("1") + 2 and not reader.finish()


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(
        st.text(max_size=5), st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), st.lists, max_leaves=5)
    ),
    st.booleans(),
    st.data(),
)
def test_arguments_are_given_as_they_were_written(arguments: dict[str, object], escaped: bool, data: st.DataObject) -> None:
    written = json.dumps(arguments, ensure_ascii=escaped)
    for dialect, form in (
        (HERMES, '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": %s}]'),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]%s"),
        (JSON, '{"name": "f", "parameters": %s}'),
    ):
        text = form.replace("%s", written)
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
        assert read(text, dialect, cuts) == [("call", Call("f", written))]
    named = {f"k{place}": value for place, value in enumerate(arguments.values())}
    text = f"[f({', '.join(f'{key}={value!r}' for key, value in named.items())})]"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    ((_, call),) = read(text, PYTHONIC, cuts)
    assert isinstance(call, Call) and json.loads(call.arguments) == named


def test_only_names_are_called() -> None:
    assert parse(PYTHONIC, "[a.b(c=1)]") == [Call("a.b", '{"c": 1}')]
    assert not parse(PYTHONIC, "[f(a=1)(b=1)]") and not parse(PYTHONIC, "[(lambda: 1)(b=1)]")
