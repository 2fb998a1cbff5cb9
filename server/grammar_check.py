"""The process that reads grammars for the front: `python -m forerun.server.grammar_check`, asked on standard input.

    4 bytes length │ JSON {"kind", "value", "strict"}   ─▶   4 bytes length │ JSON {"grammar": …} or {"error": …}

A grammar is a program of a stranger. Here it is translated into the form that workers compile (llguidance's), compiled once, and asked for
its first character, under limits of time and memory that end this process and nothing else. The front has no library and waits for no lock.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import llguidance
import msgspec
from llguidance import LLMatcher, LLTokenizer

from forerun.server.grammar_calls import Calls, CallsError, lark

SECONDS = 2.0
"""of computing, for one grammar"""
MEMORY_BYTES = 1 << 30
NICER = 5
"""of this process: while decoding takes all cores it gets a quarter of one, not half"""
MOST_DEPTH = 64
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)
_TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
_ROOTS = frozenset(
    ("properties", "type", "$ref", "anyOf", "allOf", "oneOf", "enum", "const", "items", "prefixItems", "additionalProperties", "pattern")
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS = ("pattern", "format", "$ref")


class Wrong(Exception):
    """A grammar that cannot be used; the message is for the client."""


class Asked(msgspec.Struct):
    """`kind`: schema (`value`: JSON text), regex, choice (JSON list of texts), ebnf (Lark or GBNF), calls (JSON of `Calls`). `strict`:
    what a schema says and the library cannot hold is an error, and not left out. `thought`: what may come first: nothing (""), a thought
    between its marks ("may"), the rest of one ("inside")."""

    kind: str
    value: str
    strict: bool = False
    thought: str = ""


def translate(asked: Asked) -> str:
    """The form that workers compile. Raises Wrong."""
    made = _behind_thought(_KINDS[asked.kind](asked), asked.thought)
    failed, told = LLMatcher.validate_grammar_with_warnings(made, limits=_LIMITS)
    if failed:
        raise Wrong(_plain(told[0]))
    matcher = LLMatcher(LLTokenizer("byte"), made, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        why = _plain(matcher.get_error())
        raise Wrong("nothing can satisfy it" if why.startswith("NoExtension") else why)
    return made


def _regex(asked: Asked) -> str:
    return LLMatcher.grammar_from_regex(asked.value)


def _choice(asked: Asked) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(asked.value)))


def _ebnf(asked: Asked) -> str:
    try:
        return llguidance.grammar_from("grammar", asked.value)
    except ValueError as wrong:
        raise Wrong(str(wrong)) from None


def _schema(asked: Asked) -> str:
    try:
        schema = json.loads(asked.value, parse_constant=_refuse)
    except RecursionError:
        raise Wrong("it is nested too deeply") from None
    except ValueError as wrong:
        raise Wrong(str(wrong)) from None
    if not isinstance(schema, dict):
        raise Wrong(f"a schema is an object, not {json.dumps(schema)[:60]}")
    if schema and not _ROOTS & schema.keys():
        raise Wrong("Grammar must have a 'properties' field")
    return LLMatcher.grammar_from_json_schema(json.dumps(_sound(schema, "")), overrides=cast(Any, _options(asked)))


def _calls(asked: Asked) -> str:
    calls = msgspec.json.decode(asked.value, type=Calls)
    for tool in calls.tools:
        tool.schema = _sound(tool.schema, tool.name)
    try:
        return LLMatcher.grammar_from_lark(lark(calls, _options(asked)))
    except CallsError as wrong:
        raise Wrong(str(wrong)) from None


_KINDS: dict[str, Callable[[Asked], str]] = {"schema": _schema, "regex": _regex, "choice": _choice, "ebnf": _ebnf, "calls": _calls}


def _options(asked: Asked) -> dict[str, Any]:
    return {"whitespace_pattern": "[ ]?", "coerce_one_of": True, "lenient": not asked.strict}


def _sound(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Closed, unless its parts are to be joined: closed one by one they would allow nothing. Raises Wrong for what is no schema."""
    for fault in faults(schema, place):
        raise Wrong(fault)
    made: dict[str, Any] = schema if _joins(schema) else closed(schema)
    return made


def _joins(schema: dict[str, Any]) -> bool:
    """Whether parts are to be joined somewhere. What only says `allOf`, such as a property of that name, does not."""
    left: list[Any] = [schema]
    while left:
        at = left.pop()
        if isinstance(at, dict):
            if "allOf" in at:
                return True
            left += [one for one, _ in _inside(at)]
    return False


def _behind_thought(made: str, thought: str) -> str:
    if not thought:
        return made
    body = json.loads(made)["grammars"][0] if made.startswith("{") else {"lark_grammar": made}
    begin = {"may": 'start: thought? @body\nthought: "<think>" inside gap', "inside": "start: inside gap @body"}[thought]
    first = begin + '\ninside[suffix="</think>"]: /(?s:.*)/\ngap: /\\n{0,2}/\n'
    return json.dumps({"grammars": [{"lark_grammar": first}, {**body, "name": "body"}]})


def faults(schema: dict[str, Any], place: str = "") -> Iterator[str]:
    """What is no JSON schema, with the place (a JSON pointer)."""
    left: list[tuple[Any, str, int]] = [(schema, place, 0)]
    while left:
        at, place, depth = left.pop()
        if isinstance(at, bool):
            continue
        if not isinstance(at, dict):
            yield f"{place}: a schema is an object or a boolean"
            continue
        if depth > MOST_DEPTH:
            yield f"{place[:80]}…: it is nested too deeply, {MOST_DEPTH} levels are the most"
            return
        yield from _keywords(at, place)
        left += [(one, f"{place}/{where}", depth + 1) for one, where in _inside(at)]


def _inside(schema: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """What ought to be schemas right inside of this one, each with its place there."""
    for name in _MAPS:
        if isinstance(inner := schema.get(name), dict):
            yield from ((one, f"{name}/{key}") for key, one in inner.items())
    for name in _LISTS:
        if isinstance(inner := schema.get(name), list):
            yield from ((one, f"{name}/{index}") for index, one in enumerate(inner))
    yield from ((schema[name], name) for name in _SCHEMAS if name in schema and not isinstance(schema[name], list))


def _keywords(at: dict[str, Any], place: str) -> Iterator[str]:
    """Keywords with values of another type than theirs."""
    kinds = at.get("type", "object")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            yield f"{place}/type: {json.dumps(kind)[:60]} is not one of {', '.join(_TYPES)}"
    tests: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
        (_MAPS, lambda value: isinstance(value, dict), "an object"),
        (_LISTS, lambda value: isinstance(value, list) and bool(value), "a list that is not empty"),
        (("enum",), lambda value: isinstance(value, list) and bool(value), "a list that is not empty"),
        (("required",), lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of names"),
        (_COUNTS, lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value >= 0, "a number from 0 on"),
        (_NUMBERS, lambda value: isinstance(value, int | float) and not isinstance(value, bool), "a number"),
        (_TEXTS, lambda value: isinstance(value, str), "a text"),
    ]
    for names, fits, what in tests:
        for name in names:
            if name in at and not fits(at[name]):
                yield f"{place}/{name}: {json.dumps(at[name])[:60]} is not {what}"


def closed(schema: Any) -> Any:
    """What lists properties is an object, and has no others unless it says so: as in TGI, and as models need it to come to an end."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name in _MAPS:
        if isinstance(inner := made.get(name), dict):
            made[name] = {key: closed(one) for key, one in inner.items()}
    base = "properties" in made
    for name in (*_LISTS, *_SCHEMAS):
        if name in made and not (base and name in ("anyOf", "oneOf")):
            made[name] = closed(made[name])
    open_ = ("additionalProperties", "patternProperties", "unevaluatedProperties", "anyOf", "oneOf", "if", "$ref")
    if base and not any(name in made for name in ("type", "anyOf", "oneOf", "$ref")):
        made["type"] = "object"
    if base and not any(name in made for name in open_):
        made["additionalProperties"] = False
    return made


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _plain(text: str) -> str:
    """The library's message in one line, without its pictures of the place."""
    lines = [line.strip() for line in text.strip().splitlines()]
    if (mark := next((place for place, line in enumerate(lines) if line and not line.strip("^ ")), 0)) and lines[mark - 1]:
        column = text.splitlines()[mark].index("^") - (len(text.splitlines()[mark - 1]) - len(text.splitlines()[mark - 1].lstrip()))
        said = next((line.removeprefix("error: ") for line in lines[mark + 1 :] if line), "")
        return f"{said} at character {column + 1} of {lines[mark - 1][:80]!r}"
    return lines[0] if lines else "the library does not say why"


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until there is nothing more to read."""
    while head := source.read(4):
        asked = msgspec.json.decode(source.read(int.from_bytes(head, "big")), type=Asked)
        # The signal ends this process wherever it is, in the library too.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            told = {"grammar": translate(asked)}
        except (Wrong, ValueError) as wrong:  # ValueError: the library's, of what it cannot even parse
            told = {"error": str(wrong)}
        except (MemoryError, RecursionError):
            told = {"error": "it is too large"}
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answer = msgspec.json.encode(told)
        sink.write(len(answer).to_bytes(4, "big") + answer)
        sink.flush()


if __name__ == "__main__":
    os.setpgid(0, 0)  # what a terminal sends to the server is not for this process, which ends with its input
    os.nice(NICER)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer)
