"""From what clients write to what workers compile: shapes, errors that name the place, and limits that a hostile grammar meets."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import llguidance
import msgspec
import pytest

from forerun.server import grammar, grammar_check
from forerun.server.errors import ApiError
from forerun.server.grammar import Constraint, GrammarReader, Reading, of_native
from forerun.server.grammar_check import Asked, Wrong, closed, translate
from forerun.server.schema import Grammar

NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TABLES = llguidance.LLTokenizer("byte")


def accepts(kind: str, value: Any, text: str, strict: bool = False) -> bool:
    """Whether the text follows the grammar from its first to its last character."""
    value = value if isinstance(value, str) else json.dumps(value)
    matcher = llguidance.LLMatcher(TABLES, translate(Asked(kind, value, strict)), log_level=0)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


def refusal(kind: str, value: Any, strict: bool = False) -> str:
    with pytest.raises(Wrong) as caught:
        translate(Asked(kind, value if isinstance(value, str) else json.dumps(value), strict))
    return str(caught.value)


class TestTranslate:
    def test_a_schema(self) -> None:
        assert accepts("schema", NAME, '{"name":"Jo"}') and accepts("schema", NAME, '{ "name": "Jo" }')
        assert not accepts("schema", NAME, '{"name":1}') and not accepts("schema", NAME, "{}")

    def test_at_most_one_space(self) -> None:
        assert not accepts("schema", NAME, '{  "name": "Jo"}') and not accepts("schema", NAME, '{\n"name": "Jo"}')

    def test_listed_properties_are_all(self) -> None:
        more = '{"name":"Jo","x":1}'
        assert not accepts("schema", NAME, more)
        assert accepts("schema", NAME | {"additionalProperties": True}, more)
        assert accepts("schema", {"type": "object"}, more), "a schema without a list allows any"
        assert not accepts("schema", {"properties": {"name": {"type": "string"}}}, "3"), "what lists properties is an object"
        nested = {"type": "object", "properties": {"a": {"type": "array", "items": NAME}}, "required": ["a"]}
        assert accepts("schema", nested, '{"a":[{"name":"x"}]}') and not accepts("schema", nested, '{"a":[{"name":"x","y":1}]}')

    def test_alternatives_stay_possible(self) -> None:
        """Closing each of them alone would leave nothing."""
        either = {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "anyOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]}],
        }
        assert accepts("schema", either, '{"a":1,"b":1}')
        both = {"allOf": [NAME, {"properties": {"age": {"type": "integer"}}, "required": ["age"]}]}
        assert accepts("schema", both, '{"name":"x","age":1}')

    @pytest.mark.parametrize(
        "says",
        [{"properties": {"allOf": {"const": 1}}}, {"properties": {"a": {"enum": ["allOf"]}}}, {"properties": {}, "description": '"allOf"'}],
    )
    def test_what_only_says_all_of_is_closed(self, says: dict[str, Any]) -> None:
        """Whatever else is in it: a property, a value or a text of that name joins nothing."""
        assert not accepts("schema", {"type": "object"} | says, '{"x":1}')

    def test_parts_are_joined_wherever_they_stand(self) -> None:
        inner = {"allOf": [NAME, {"properties": {"age": {"type": "integer"}}}]}
        for place in ({"properties": {"a": inner}, "required": ["a"]}, {"anyOf": [{"properties": {"a": inner}, "required": ["a"]}]}):
            assert accepts("schema", place, '{"a":{"name":"x","age":1}}')

    def test_one_of_is_read_as_any_of(self) -> None:
        schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
        assert accepts("schema", schema, "1") and accepts("schema", schema, "1.5")

    def test_what_cannot_be_held_is_left_out_unless_strict(self) -> None:
        unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
        assert accepts("schema", unique, "[1,1]")
        assert "uniqueItems" in refusal("schema", unique, strict=True)

    def test_settings_in_a_schema_do_not_count(self) -> None:
        assert not accepts("schema", NAME | {"x-guidance": {"whitespace_pattern": "[ ]*"}}, '{   "name":"x"}')

    def test_regular_expressions(self) -> None:
        assert accepts("regex", r"\d{2}-[a-z]+", "12-ab") and not accepts("regex", r"\d{2}-[a-z]+", "12-ab ")
        assert accepts("regex", "^(a|b)$", "a"), "anchors are allowed where the ends are"

    def test_choices(self) -> None:
        words = ['a"b', "naïve\n", "c\\d", "x"]
        assert all(accepts("choice", words, word) for word in words) and not accepts("choice", words, "y")

    def test_grammars_of_both_notations(self) -> None:
        assert accepts("ebnf", 'start: "a" (b | "c")*\nb: /[0-9]/', "a1c2")
        assert accepts("ebnf", 'root ::= "a" digit*\ndigit ::= [0-9]', "a12")

    @pytest.mark.parametrize(
        ("kind", "value", "message"),
        [
            ("schema", {"abc": "def"}, "Grammar must have a 'properties' field"),
            ("schema", "{", "Expecting property name"),
            ("schema", "[1]", "a schema is an object, not [1]"),
            ("schema", {"properties": {"a": {"type": "strin"}}}, '/properties/a/type: "strin" is not one of'),
            ("schema", {"properties": [1]}, "/properties: [1] is not an object"),
            ("schema", {"properties": {"a": 3}}, "/properties/a: a schema is an object or a boolean"),
            ("schema", {"anyOf": []}, "/anyOf: [] is not a list that is not empty"),
            ("schema", {"type": "string", "minLength": -1}, "/minLength: -1 is not a number from 0 on"),
            ("schema", {"type": "object", "properties": {}, "required": "a"}, '/required: "a" is not a list of names'),
            ("schema", {"type": "string", "pattern": "("}, "unclosed group at character 1 of '('"),
            ("schema", {"type": "integer", "minimum": 5, "maximum": 3}, "nsatisfiable"),
            ("schema", {"$ref": "#"}, "nothing can satisfy it"),
            ("schema", {"$ref": "#/nothing"}, "Pointer '/nothing' does not exist"),
            ("schema", {"$ref": "file:///etc/passwd"}, "not present in a registry"),
            ("schema", '{"minimum": NaN, "type": "integer"}', "NaN is not JSON"),
            ("regex", "a(bc", "unclosed group at character 2 of 'a(bc'"),
            ("regex", "(?=a)b", "look-around, including look-ahead and look-behind, is not supported at character 1"),
            ("regex", r"(a)\1", "backreferences are not supported at character 4"),
            ("ebnf", "start: missing", "missing"),
            ("ebnf", 'root ::= "a', "GBNF"),
        ],
    )
    def test_errors_name_the_place(self, kind: str, value: Any, message: str) -> None:
        assert message in refusal(kind, value)

    def test_depth(self) -> None:
        deep: Any = {"type": "string"}
        for _ in range(100):
            deep = {"type": "object", "properties": {"a": deep}}
        assert "nested too deeply" in refusal("schema", deep)
        assert "nested too deeply" in refusal("schema", "[" * 100_000 + "]" * 100_000)

    def test_closing_leaves_the_schema_alone(self) -> None:
        before = json.dumps(NAME)
        assert closed(NAME)["additionalProperties"] is False and json.dumps(NAME) == before
        assert closed({"properties": {"a": True}, "$ref": "#/x"}) == {"properties": {"a": True}, "$ref": "#/x"}


def test_serving_reads_one_question_after_the_other() -> None:
    asked = [Asked("regex", "a"), Asked("regex", "("), Asked("schema", '{"const": "\\ud800"}'), Asked("schema", "{}")]
    bodies = [msgspec.json.encode(one) for one in asked]
    sink = io.BytesIO()
    grammar_check.serve(io.BytesIO(b"".join(len(body).to_bytes(4, "big") + body for body in bodies)), sink)
    told, data = [], sink.getvalue()
    while data:
        size = int.from_bytes(data[:4], "big")
        told.append(json.loads(data[4 : 4 + size]))
        data = data[4 + size :]
    assert [list(one) for one in told] == [["grammar"], ["error"], ["error"], ["grammar"]]


class TestNative:
    @pytest.mark.parametrize(
        ("type", "value", "kind", "text"),
        [
            ("json", NAME, "schema", None),
            ("json_object", NAME, "schema", None),
            ("json", json.dumps(NAME), "schema", None),
            ("json_schema", {"name": "x", "schema": NAME, "strict": True}, "schema", None),
            ("regex", "a+", "regex", "a+"),
        ],
    )
    def test_forms(self, type: Any, value: Any, kind: str, text: str | None) -> None:
        made = of_native(Grammar(type, value))
        assert made.kind == kind and not made.strict
        assert made.value == text if text else json.loads(made.value) == NAME

    @pytest.mark.parametrize(
        ("type", "value", "message"),
        [
            ("json", 7, "Input validation error: grammar is not supported"),
            ("json", [NAME], "Input validation error: grammar is not supported"),
            ("json", None, "Input validation error: grammar is not supported"),
            ("json_schema", {"name": "x"}, "missing field `schema`"),
            ("json_schema", "x", "missing field `schema`"),
            ("regex", {"a": 1}, "invalid type, expected a string"),
        ],
    )
    def test_refused(self, type: Any, value: Any, message: str) -> None:
        with pytest.raises(ApiError) as caught:
            of_native(Grammar(type, value))
        assert caught.value.status == 422 and message in caught.value.message


@pytest.fixture
async def reader() -> AsyncIterator[GrammarReader]:
    made = GrammarReader()
    yield made
    await made.close()


def schema(value: Any) -> Constraint:
    return Constraint("schema", json.dumps(value))


async def refused(reader: GrammarReader, constraint: Constraint) -> str:
    with pytest.raises(ApiError) as caught:
        await reader.read(constraint)
    assert (caught.value.status, caught.value.kind) == (422, "validation")
    return caught.value.message


class TestReader:
    async def test_reads_and_remembers(self, reader: GrammarReader) -> None:
        first, second = await asyncio.gather(reader.read(schema(NAME)), reader.read(schema(NAME)))
        assert first == second and not llguidance.LLMatcher.validate_grammar(first)
        process = reader._process
        assert process is not None
        process.kill()
        await process.wait()
        assert await reader.read(schema(NAME)) == first, "what is known is not asked again"

    async def test_its_process_gives_way_to_the_server(self, reader: GrammarReader) -> None:
        """Niceness counts within a session only. A terminal's signals go to a group."""
        await reader.read(Constraint("regex", "a"))
        process = reader._process
        assert process is not None
        assert os.getsid(process.pid) == os.getsid(0) and os.getpgid(process.pid) == process.pid
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + grammar_check.NICER, 19)

    async def test_refusals_are_remembered_too(self, reader: GrammarReader) -> None:
        wrong = Constraint("regex", "(")
        message = await refused(reader, wrong)
        assert message == "Input validation error: grammar is not valid: unclosed group at character 1 of '('"
        process = reader._process
        assert await refused(reader, wrong) == message and reader._process is process
        with pytest.raises(ApiError) as first:
            await reader.read(wrong)
        with pytest.raises(ApiError) as second:
            await reader.read(wrong)
        assert first.value is not second.value, "what is raised keeps the stack of whoever got it"

    async def test_size(self, reader: GrammarReader) -> None:
        message = await refused(reader, Constraint("regex", "ä" * (grammar.MOST_BYTES // 2 + 1)))
        assert f"it has {grammar.MOST_BYTES + 2} bytes, {grammar.MOST_BYTES} are the most" in message
        assert reader._process is None, "nobody read it"

    async def test_memory_is_bounded(self, reader: GrammarReader, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammar, "KEPT", 3)
        for letter in "abcdef":
            await reader.read(Constraint("regex", letter))
        assert [one.value for one in reader._known] == ["d", "e", "f"]
        monkeypatch.setattr(grammar, "KEPT_BYTES", 200)
        await reader.read(Constraint("regex", "g" * 60))
        assert reader._bytes <= 200

    async def test_hostile_grammars_are_refused_or_read(self, reader: GrammarReader) -> None:
        """A forced run of a million characters; the next question is answered."""
        hostile = [Constraint("regex", f"(a{{1000000}}){{{n}}}b") for n in range(2)] + [schema({"const": "y" * 250_000})]
        told = [await refused(reader, one) for one in hostile if not await passes(reader, one)]
        assert all("grammar is not valid" in one for one in told)
        assert await reader.read(schema(NAME))

    async def test_what_takes_too_long_ends_the_process_alone(self, reader: GrammarReader, monkeypatch: pytest.MonkeyPatch) -> None:
        for limit, words in (("signal.setitimer(signal.ITIMER_PROF, 0.01)", "too long"), ("signal.raise_signal(6)", "too much memory")):
            with monkeypatch.context() as patched:
                patched.setattr(grammar, "COMMAND", (sys.executable, "-c", f"import signal\n{limit}\nwhile True: pass"))
                assert f"it takes {words} to read" in await refused(reader, Constraint("regex", limit))
        assert await reader.read(schema(NAME))

    async def test_a_process_that_dies_is_replaced(self, reader: GrammarReader) -> None:
        await reader.read(Constraint("regex", "a"))
        process = reader._process
        assert process is not None
        process.kill()
        assert "it takes too" in await refused(reader, Constraint("regex", "b"))
        assert await reader.read(Constraint("regex", "c"))

    async def test_a_client_that_leaves(self, reader: GrammarReader) -> None:
        """The others get their own answers."""
        tasks = [asyncio.create_task(reader.read(Constraint("regex", letter))) for letter in "abc"]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[1].cancel()
        made = await tasks[2]
        assert llguidance.LLMatcher(TABLES, made, log_level=0).consume_tokens(list(b"c"))
        again = await reader.read(Constraint("regex", "a"))
        assert llguidance.LLMatcher(TABLES, again, log_level=0).consume_tokens(list(b"a"))

    async def test_what_nobody_waits_for_is_not_begun(self, reader: GrammarReader, monkeypatch: pytest.MonkeyPatch) -> None:
        """Clients that ask and leave make no queue, also where they come back at once."""
        begun, may_go_on = list[str](), asyncio.Event()

        async def ask(constraint: Constraint) -> Reading:
            begun.append(constraint.value)
            await may_go_on.wait()
            return Reading("made of " + constraint.value)

        monkeypatch.setattr(reader, "_ask", ask)
        first = asyncio.create_task(reader.read(Constraint("regex", "first")))
        gone = [asyncio.create_task(reader.read(Constraint("regex", f"x{n // 2}"))) for n in range(1000)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        back = asyncio.create_task(reader.read(Constraint("regex", "x7")))
        first.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        assert await back == "made of x7" and begun == ["first", "x7"]
        assert await reader.read(Constraint("regex", "first")) == "made of first", "what was begun is kept"
        assert begun == ["first", "x7"] and not reader._reading and not reader._waiting

    async def test_who_waits_too_long_behind_others_is_told_so(self, reader: GrammarReader, monkeypatch: pytest.MonkeyPatch) -> None:
        may_go_on = asyncio.Event()

        async def ask(constraint: Constraint) -> Reading:
            await may_go_on.wait()
            return Reading(constraint.value)

        monkeypatch.setattr(reader, "_ask", ask)
        slow = asyncio.create_task(reader.read(Constraint("regex", "slow")))
        await asyncio.sleep(0)
        with monkeypatch.context() as patched, pytest.raises(ApiError) as caught:
            patched.setattr(grammar, "WAIT_SECONDS", 0.01)
            await reader.read(Constraint("regex", "next"))
        assert caught.value.status == 429 and "Retry-After" in caught.value.headers
        may_go_on.set()
        assert await slow == "slow" and await reader.read(Constraint("regex", "next")) == "next", "it was no answer to be kept"

    async def test_the_loop_does_not_wait(self, reader: GrammarReader) -> None:
        wide = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": f"^a{{1,{i + 1}}}$"} for i in range(3000)}}
        task = asyncio.create_task(passes(reader, schema(wide)))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 5

    async def test_it_ends_with_what_it_reads(self) -> None:
        reader = GrammarReader()
        await reader.read(Constraint("regex", "a"))
        process = reader._process
        assert process is not None
        task = asyncio.create_task(reader.read(Constraint("regex", "(.*a.{40}){30}")))
        await asyncio.sleep(0.01)
        await reader.close()
        with contextlib.suppress(asyncio.CancelledError, ApiError):
            await task
        assert process.returncode is not None


async def passes(reader: GrammarReader, constraint: Constraint) -> bool:
    try:
        await reader.read(constraint)
    except ApiError:
        return False
    return True
