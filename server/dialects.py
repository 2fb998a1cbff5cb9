"""How models write the calls of tools: each family in its own way, known by the model's chat template.

    hermes     <tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>, any number, text before and between   (Hermes, Qwen)
    mistral    [TOOL_CALLS][{"name": …, "arguments": {…}}, …]  or  [TOOL_CALLS]name[ARGS]{…}, up to the end
    json       the whole message is {"name": …, "parameters": {…}}, several divided by `;`, or behind <|python_tag|>   (Llama 3.1 …)
    pythonic   the whole message is [name(key=value, …), …]   (Llama 3.2, Llama 4)

Reads calls that are there from the first to the last character; `calls.py` reads them as they arrive. Knows no HTTP and no tokens.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from typing import Any, ClassVar

PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """`arguments`: JSON text."""

    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class Dialect:
    """`opens`: the text that begins a call; empty = a message that begins with one of `first` is one as a whole. `closes`: ends it; empty =
    it goes to the end of the message. `special`: marks that are special tokens, so that they must not be hidden."""

    name: str
    opens: str
    closes: str
    first: str = ""
    special: frozenset[str] = frozenset()


HERMES = Dialect("hermes", "<tool_call>", "</tool_call>", special=frozenset({"<tool_call>", "</tool_call>"}))
MISTRAL = Dialect("mistral", TOOL_CALLS, "", special=frozenset({TOOL_CALLS, ARGS}))
JSON = Dialect("json", "", "", "{<", special=frozenset({PYTHON_TAG}))
PYTHONIC = Dialect("pythonic", "", "", "[<", special=frozenset({PYTHON_TAG}))


def dialect_of(template: str) -> Dialect:
    """How a model with this chat template writes calls; JSON alone where the template says nothing of tools."""
    if TOOL_CALLS in template:
        return MISTRAL
    if HERMES.opens in template:
        return HERMES
    return PYTHONIC if "[func_name1(" in template else JSON


def parse(dialect: Dialect, text: str) -> list[Call]:
    """The calls that the text is; none if it is not calls from the first to the last character, or if they hold what JSON cannot say:
    NaN, infinities, halves of surrogate pairs."""
    text = text.strip().removeprefix(PYTHON_TAG).strip()
    try:
        found = _calls(dialect, text)
        "".join(call.name + call.arguments for call in found).encode()
    except (ValueError, RecursionError):
        return []
    return found


def _calls(dialect: Dialect, text: str) -> list[Call]:
    if dialect is PYTHONIC:
        return _pythonic(text)
    if dialect is MISTRAL and (named := _named(text)):
        return named
    return _objects(text)


def _named(text: str) -> list[Call]:
    """name[ARGS]{…}, several divided by [TOOL_CALLS]."""
    found: list[Call] = []
    for one in text.split(TOOL_CALLS):
        name, mark, arguments = one.strip().partition(ARGS)
        if not mark and (brace := one.find("{")) > 0:
            name, mark, arguments = one[:brace].strip(), "{", one[brace:]
        if not mark or not name or not _is_object(arguments):
            return []
        found.append(Call(name, arguments.strip()))
    return found


def _objects(text: str) -> list[Call]:
    """JSON objects, alone, in a list, or one after the other with `;`, `,` or space between."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    found: list[Call] = []
    at = 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        for one in value if isinstance(value, list) else [value]:
            call = _call(one)
            if call is None:
                return []
            found.append(call)
        while at < len(text) and text[at] in "; ,\n\t\r":
            at += 1
    return found


def _call(value: Any) -> Call | None:
    """{"name", "arguments" | "parameters"}, or one of them inside {"function": …}, or TGI's {"function": {"_name", …}}."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        if isinstance(inner.get("_name"), str):
            return Call(inner["_name"], _json({key: given for key, given in inner.items() if key != "_name"}))
        value = inner
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return None
    for key in ("arguments", "parameters"):
        if key in value:
            arguments = value[key]
            if isinstance(arguments, str) and _is_object(arguments):
                return Call(name, arguments)
            return Call(name, _json(arguments)) if isinstance(arguments, dict) else None
    return Call(name, "{}") if value.keys() <= {"name", "type", "id"} else None


def _pythonic(text: str) -> list[Call]:
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    calls = tree.elts if isinstance(tree, ast.List) else [tree]
    found: list[Call] = []
    for one in calls:
        if not isinstance(one, ast.Call) or one.args or not isinstance(one.func, ast.Name | ast.Attribute):
            return []
        try:
            arguments = {keyword.arg: ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in one.keywords}
            found.append(Call(ast.unparse(one.func), _json(arguments)))
        except (ValueError, TypeError, RecursionError):
            return []
        if None in arguments:
            return []
    return found


class _JsonNames(ast.NodeTransformer):
    """Models of this dialect mix the two languages."""

    NAMES: ClassVar[dict[str, bool | None]] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.NAMES[node.id]) if node.id in self.NAMES else node


def _json(value: Any) -> str:
    """Raises ValueError for what JSON cannot say."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False
