"""OpenAPI documents as flat lists of facts, so that two can be compared whatever their structs are called.

    "POST /v1/chat/completions in"     {"messages[].role": "string, required", "stop": "array|null", …}
    "GET /info out"                    {"version": "string, required", …}

`/invocations`, which takes the bodies of three routes, is compared as these. `in` is the body of a request, `out` a JSON answer,
`event` an event of a stream. Bounds and defaults are facts of requests only: in answers they say nothing that a client could break.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Facts = dict[str, dict[str, str]]
Schema = dict[str, Any]
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
DEPTH = 8


def facts(document: Schema) -> Facts:
    """What a document says, by body."""
    found: Facts = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            route = f"{method.upper()} {path}"
            responses = operation["responses"]
            found[f"{route} statuses"] = dict.fromkeys(sorted(responses), "")
            if path == "/invocations":
                continue
            asked = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if asked:
                found[f"{route} in"] = dict(_fields(document, asked["schema"], True))
            for media, name in (("application/json", "out"), ("text/event-stream", "event")):
                told = responses.get("200", {}).get("content", {}).get(media)
                if told:
                    found[f"{route} {name}"] = dict(_fields(document, told["schema"], False))
    return found


def differences(theirs: Facts, ours: Facts) -> dict[str, tuple[str, str]]:
    """By field: what they say and what we say, empty for nothing. A field that differs alike in several bodies is one difference."""
    found: dict[str, tuple[str, str]] = {}
    routes = {body.rpartition(" ")[0] for body in theirs}
    for body, fields in theirs.items():
        route, _, kind = body.rpartition(" ")
        mine = ours.get(body, {})
        for field in fields.keys() | mine.keys():
            pair = fields.get(field), mine.get(field)
            if pair[0] == pair[1] or _inside_of_a_difference(field, fields, mine):
                continue
            told = ("" if pair[0] is None else pair[0] or "there", "" if pair[1] is None else pair[1] or "there")
            name = f"{kind} {field}"
            found[name if found.get(name, told) == told else f"{route} {name}"] = told
    for body in ours.keys() - theirs.keys():
        route, _, kind = body.rpartition(" ")
        found[body if route in routes else route] = ("", "there")
    return dict(sorted(found.items()))


def _inside_of_a_difference(field: str, theirs: dict[str, str], ours: dict[str, str]) -> bool:
    """Of an object that only one of them has, the object says enough."""
    return any(char in ".[" and (field[:at] in theirs) != (field[:at] in ours) for at, char in enumerate(field))


def _fields(document: Schema, schema: Schema, asked: bool, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    properties: dict[str, list[Schema]] = {}
    shapes = list(_alternatives(document, schema))
    required = [set(shape.get("required", ())) for shape in shapes if shape.get("properties")]
    always = set.intersection(*required) if required else set()
    for shape in shapes:
        for name, one in shape.get("properties", {}).items():
            properties.setdefault(name, []).append(one)
        if "items" in shape and depth < DEPTH:
            yield from _fields(document, shape["items"], asked, f"{path}[]", depth + 1)
    for name, given in properties.items():
        whole = {"anyOf": given}
        place = f"{path}.{name}" if path else name
        yield place, _said(document, whole, name in always, asked)
        if depth < DEPTH:
            yield from _fields(document, whole, asked, place, depth + 1)


def _said(document: Schema, schema: Schema, required: bool, asked: bool) -> str:
    shapes = list(_alternatives(document, schema))
    words = ["|".join(sorted({_type(shape) for shape in shapes}))]
    if choices := sorted({str(choice) for shape in shapes for choice in shape.get("enum", [shape["const"]] if "const" in shape else [])}):
        words.append("one of " + " ".join(choices))
    if required and (asked or "null" not in words[0].split("|")):
        words.append("required")
    if asked:
        bounds = {_BOUNDS[name]: shape[name] for shape in shapes for name in _BOUNDS if name in shape}
        if ">" in bounds:
            bounds.pop(">=", None)
        words += [f"{sign} {value:g}" for sign, value in sorted(bounds.items()) if abs(value) < 2**31 - 1]
        default = next((shape["default"] for shape in shapes if "default" in shape), schema.get("default"))
        default = next((one["default"] for one in schema.get("anyOf", []) if "default" in one), default)
        if (default := _plain(default)) not in (None, False, []):
            words.append(f"default {default}")
    return ", ".join(words)


def _plain(default: Any) -> Any:
    """TGI's document has its defaults as texts."""
    try:
        return json.loads(default) if isinstance(default, str) else default
    except ValueError:
        return default


def _type(shape: Schema) -> str:
    if "type" in shape:
        return str(shape["type"])
    kinds = {"str": "string", "int": "integer"}
    return next((kinds[type(one).__name__] for one in shape.get("enum", [shape.get("const")]) if type(one).__name__ in kinds), "any")


def _alternatives(document: Schema, schema: Schema) -> Iterator[Schema]:
    """The plain schemas that a schema may be."""
    if isinstance(schema, bool):  # anything, or nothing
        return
    if "$ref" in schema:
        yield from _alternatives(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
        return
    parts = [part for name in ("anyOf", "oneOf") for part in schema.get(name, [])]
    if "allOf" in schema:
        shapes = [list(_alternatives(document, part)) for part in schema["allOf"]]
        yield from shapes[0] if len(shapes) == 1 else [_merged([one for each in shapes for one in each])]
    elif not parts:
        yield {**schema, "type": "number"} if schema.get("format") == "float" else schema
    beside = {name: value for name, value in schema.items() if name in _BOUNDS}
    for part in parts:
        for one in _alternatives(document, part):
            yield {**one, **beside} if one.get("type") in ("number", "integer") else one
    if schema.get("nullable"):
        yield {"type": "null"}


def _merged(shapes: list[Schema]) -> Schema:
    made: Schema = {"type": "object", "properties": {}, "required": []}
    for shape in shapes:
        if "properties" not in shape:
            return shape
        made["properties"] |= shape["properties"]
        made["required"] += shape.get("required", [])
    return made
