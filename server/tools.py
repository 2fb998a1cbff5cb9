"""What the text of a `/v1` answer must follow: a format that the body asks for in one of its many ways, or calls that it forces.

OpenAI says `response_format`, TGI says it otherwise under the same name, vLLM says `guided_*`; all of them become one `Constraint`. Where
the model thinks first, it may do so as ever: only what it says behind its thoughts is held to anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from forerun.server.chat import Prompt, tool_error
from forerun.server.dialects import ARGS, HERMES, JSON, MISTRAL, PYTHONIC, TOOL_CALLS, Dialect
from forerun.server.errors import invalid
from forerun.server.grammar import Constraint, json_text, of_native
from forerun.server.grammar_calls import Calls, Style
from forerun.server.grammar_calls import Tool as CalledTool
from forerun.server.openai_schema import ChatRequest, CompletionRequest, ResponseFormat, StructuredOutputs, Tool
from forerun.server.schema import Grammar

ANY_OBJECT = {"type": "object"}
_STYLES: list[tuple[Dialect, Style]] = [(HERMES, "hermes"), (JSON, "json"), (PYTHONIC, "pythonic")]
_MARKS = (HERMES.opens, HERMES.closes, TOOL_CALLS, ARGS)


def constraint_of(body: ChatRequest, prompt: Prompt, special_id: Callable[[str], int | None]) -> Constraint | None:
    """`special_id`: of a special token. Raises ApiError (422)."""
    must = _forced(body, prompt, special_id) if prompt.forced else of_body(body)
    if must is None or not prompt.thinking:
        return must
    return dataclasses.replace(must, thought="inside" if prompt.inside else "may")


def of_body(body: ChatRequest | CompletionRequest) -> Constraint | None:
    """Raises ApiError (422) where there are several, or one that is none."""
    more = body.structured_outputs or StructuredOutputs()
    said: list[tuple[str, Any, Callable[[Any], Constraint | None]]] = [
        ("response_format", body.response_format, _format),
        ("guided_json", body.guided_json, _schema),
        ("guided_regex", body.guided_regex, _regex),
        ("guided_choice", body.guided_choice, _choice),
        ("guided_grammar", body.guided_grammar, _ebnf),
        ("structured_outputs.json", more.json, _schema),
        ("structured_outputs.regex", more.regex, _regex),
        ("structured_outputs.choice", more.choice, _choice),
        ("structured_outputs.grammar", more.grammar, _ebnf),
        ("grammar", body.grammar, _grammar),
    ]
    found = [(name, made) for name, value, make in said if value is not None and (made := make(value)) is not None]
    if len(found) > 1:
        raise invalid(f"only one of `{found[0][0]}` and `{found[1][0]}` can be followed")
    return found[0][1] if found else None


def _format(given: ResponseFormat) -> Constraint | None:
    kind = given.type
    if kind == "text":
        return None
    if kind == "regex":
        return of_native(Grammar("regex", given.value))
    if kind in ("json", "json_object"):
        value = given.value if given.value is not None else given.schema
        return of_native(Grammar("json", ANY_OBJECT if value is None else value))
    if kind != "json_schema":
        raise invalid(f"`response_format.type` must be text, json_object, json_schema or regex. Given: {kind[:40]}")
    form = given.json_schema if given.json_schema is not None else given.value
    if not isinstance(form, dict):
        raise invalid("`response_format.json_schema` must be an object with a `schema`")
    schema = form.get("schema", ANY_OBJECT)
    return dataclasses.replace(of_native(Grammar("json", schema)), strict=form.get("strict") is True)


def _schema(given: Any) -> Constraint:
    return of_native(Grammar("json", given))


def _regex(given: str) -> Constraint:
    return Constraint("regex", given)


def _choice(given: list[str]) -> Constraint:
    if not given:
        raise invalid("a choice needs something to choose from")
    return Constraint("choice", json_text(given))


def _ebnf(given: str) -> Constraint:
    return Constraint("ebnf", given)


def _grammar(given: Any) -> Constraint:
    if isinstance(given, str):
        return Constraint("ebnf", given)
    try:
        return of_native(msgspec.convert(given, Grammar))
    except msgspec.ValidationError as wrong:
        raise invalid(f"`grammar`: {wrong}") from None


def _forced(body: ChatRequest, prompt: Prompt, special_id: Callable[[str], int | None]) -> Constraint:
    """A call of one of these tools."""
    if of_body(body) is not None:
        raise tool_error("Grammar and tools are mutually exclusive")
    style: Style = "args" if prompt.named else "mistral"
    if prompt.dialect is not MISTRAL:
        style = next(style for dialect, style in _STYLES if dialect is prompt.dialect)
    special = {mark: token for mark in _MARKS if (token := special_id(mark)) is not None}
    calls = Calls(style, [_called(tool) for tool in prompt.forced], body.parallel_tool_calls is True and len(prompt.forced) > 1, special)
    return Constraint("calls", json_text(calls), strict=any(tool.function.strict for tool in prompt.forced))


def _called(tool: Tool) -> CalledTool:
    function = tool.function
    given = function.parameters if function.parameters is not None else function.arguments
    schema = {"properties": {}} if given is None else given
    if not isinstance(schema, dict):
        raise tool_error(f"the parameters of tool {function.name} are no JSON schema")
    return CalledTool(function.name, {"type": "object", **schema} if "type" not in schema and "$ref" not in schema else schema)
