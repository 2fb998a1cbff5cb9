"""The grammar of an answer that must call tools, in the dialect that the model writes and `reading.py` reads.

    hermes     <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>
    mistral    [TOOL_CALLS][{"name": "f", "arguments": {…}}]      args   [TOOL_CALLS]f[ARGS]{…}
    json       {"name": "f", "parameters": {…}}
    pythonic   [f(key=value, …)]

Writes Lark, in which a JSON schema stands as it is (`%json`), so that references inside it keep their root. Knows no HTTP and no library.
"""

from __future__ import annotations

import json
import keyword
from typing import Any, Literal

import msgspec

BESIDE = ("$ref", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "minProperties", "maxProperties")
"""what a schema says of its properties together"""
Style = Literal["hermes", "mistral", "args", "json", "pythonic"]


class CallsError(Exception):
    """Tools that cannot be called in this dialect."""


class Tool(msgspec.Struct):
    """`schema`: of its arguments, an object."""

    name: str
    schema: dict[str, Any]


class Calls(msgspec.Struct):
    """`many`: more than one call is allowed. `special`: ids of marks that are special tokens."""

    style: Style
    tools: list[Tool]
    many: bool = False
    special: dict[str, int] = {}


def lark(calls: Calls, options: dict[str, Any]) -> str:
    """`options`: how JSON is written, for the library. Raises CallsError."""
    style, count = calls.style, len(calls.tools)
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(count))}"]
    for i, tool in enumerate(calls.tools):
        if style == "pythonic":
            rules += _python(i, tool, options)
            continue
        rules.append(f"call_{i}: {_opening(style, tool.name, calls)} arguments_{i}{'' if style == 'args' else ' ' + _quoted('}')}")
        rules.append(f"arguments_{i}: {_json(tool.schema, options)}")
    return "\n".join([f"start: {_whole(calls)}", *rules]) + "\n"


def _whole(calls: Calls) -> str:
    """One call, or several, with what stands around and between them."""
    if calls.style == "hermes":
        one = f'{_mark("<tool_call>", calls)} "\\n" call "\\n" {_mark("</tool_call>", calls)}'
        return f'{one} ("\\n" {one})*' if calls.many else one
    if calls.style == "args":
        one = f"{_mark('[TOOL_CALLS]', calls)} call"
        return f"({one})+" if calls.many else one
    if calls.style == "json":
        return 'call ("; " call)*' if calls.many else "call"
    inside = '"[" call (", " call)* "]"' if calls.many else '"[" call "]"'
    return f"{_mark('[TOOL_CALLS]', calls)} {inside}" if calls.style == "mistral" else inside


def _opening(style: Style, name: str, calls: Calls) -> str:
    if style == "args":
        return f"{_quoted(name)} {_mark('[ARGS]', calls)}"
    key = "parameters" if style == "json" else "arguments"
    return _quoted(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')


def _python(i: int, tool: Tool, options: dict[str, Any]) -> list[str]:
    """Keyword arguments in the order of the schema. `first_i_k`: nothing was said yet, `next_i_k`: something was."""
    arguments, required = _arguments(tool.schema, tool.name)
    if impossible := [name for name in sorted(required) if False in arguments[name]]:
        raise CallsError(f"{impossible[0]!r} of tool {tool.name!r} must be there and must not: nothing can satisfy it")
    properties = {name: _together(parts) for name, parts in arguments.items() if False not in parts}
    for name in (*tool.name.split("."), *properties):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise CallsError(f"{name!r} of tool {tool.name!r} is no name in Python, in which this model writes its calls")
    shared: dict[str, Any] = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
    escapes = options | {"json_allowed_escapes": 'nrbtf"\\'}
    rules = [f'call_{i}: {_quoted(tool.name + "(")} first_{i}_0 ")"']
    for k, (name, schema) in enumerate(properties.items()):
        said = f"{_quoted(name + '=')} value_{i}_{k} next_{i}_{k + 1}"
        skip = "" if name in required else " | "
        rules.append(f"first_{i}_{k}: {said}{skip}{f'first_{i}_{k + 1}' if skip else ''}")
        rules.append(f'next_{i}_{k}: ", " {said}{skip}{f"next_{i}_{k + 1}" if skip else ""}')
        rules.append(f"value_{i}_{k}: {_json({**shared, **schema}, escapes)}")
    last = len(properties)
    return [*rules, f'first_{i}_{last}: ""', f'next_{i}_{last}: ""']


def _arguments(schema: bool | dict[str, Any], tool: str) -> tuple[dict[str, list[bool | dict[str, Any]]], set[str]]:
    """All that is said of each argument, and the names of those that must be there: in `properties`, and in the parts of an `allOf`, which
    may have such parts in turn (as deep as a schema may be, `grammar_check.MOST_DEPTH`)."""
    if schema is True:
        return {}, set()
    if schema is False:
        raise CallsError(f"the arguments of tool {tool!r} are `false`: nothing can satisfy it")
    together = [key for key in BESIDE if key in schema]
    if together:
        why = f"this model writes the arguments of {tool!r} one by one, so {together[0]!r} of them together cannot be followed"
        raise CallsError(f"{why}: say it in `properties` and `required`, or let `tool_choice` be auto")
    said = {name: [given] for name, given in schema.get("properties", {}).items()}
    required = set(schema.get("required", ()))
    for part in schema.get("allOf", ()):
        more, needed = _arguments(part, tool)
        for name, parts in more.items():
            said.setdefault(name, []).extend(parts)
        required |= needed
    for name in sorted(required - said.keys()):
        said[name] = []
    return said, required


def _together(parts: list[bool | dict[str, Any]]) -> dict[str, Any]:
    """One schema of parts that all hold, none of them false."""
    schemas = [part for part in parts if not isinstance(part, bool)]
    return {"allOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else {}


def _json(schema: dict[str, Any], options: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def _mark(text: str, calls: Calls) -> str:
    token = calls.special.get(text)
    return _quoted(text) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
