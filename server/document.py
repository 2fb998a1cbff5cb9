"""The OpenAPI document, made from the table of routes and the structs of their bodies: it cannot say anything else than the code."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from forerun.server.openai_schema import OpenAIErrorResponse
from forerun.server.schema import ErrorResponse

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_REF = "#/components/schemas/{name}"
_EVENT_STREAM = "text/event-stream"
_GENERATION_ERRORS = {
    400: "The body is not JSON",
    401: "The API key is missing or wrong",
    408: "The body takes too long",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    422: "Input validation error",
    424: "Generation error",
    429: "Model is overloaded; `Retry-After` says for how long to stay away",
    500: "Incomplete generation",
    504: "The request's own `deadline_ms` was missed",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One route. `name`: the operation's id, TGI's where it has one. `answer`: type of the JSON answer (None: empty or text). `event`:
    type of each server-sent event. A body, an answer or an event of several kinds is a tuple of their types."""

    method: str
    path: str
    name: str
    handler: Handler
    summary: str
    body: Any = None
    answer: Any = None
    event: Any = None
    text: str = ""
    """media type of an answer that is not JSON"""
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    error: type = ErrorResponse


def inference(path: str, name: str, handler: Handler, summary: str, body: Any, *, answer: Any = None, event: Any = None) -> Operation:
    """A route that generates: a POST under the API key, with the errors they all have."""
    error = OpenAIErrorResponse if path.startswith("/v1/") else ErrorResponse
    return Operation("POST", path, name, handler, summary, body, answer, event, errors=_GENERATION_ERRORS, error=error)


def document(operations: Sequence[Operation], *, title: str, version: str, secured: bool) -> bytes:
    """The document as JSON. `secured`: an API key is asked for on every POST."""
    kinds = {
        kind: None
        for one in operations
        for said in (one.body, one.answer, one.event, one.error)
        if said is not None
        for kind in _each(said)
    }
    schemas, components = msgspec.json.schema_components(list(kinds), ref_template=_REF)
    shapes = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path.replace(":.+}", "}"), {})[one.method.lower()] = _operation(one, shapes, secured)
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components},
    }
    if secured:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(made)


def _each(said: Any) -> tuple[Any, ...]:
    return said if isinstance(said, tuple) else (said,)


def _shape(said: Any, shapes: dict[Any, Any]) -> Any:
    """None for what is not said."""
    if said is None:
        return None
    found = [shapes[kind] for kind in _each(said)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _operation(one: Operation, shapes: dict[Any, Any], secured: bool) -> dict[str, Any]:
    good = {
        media: {"schema": shape}
        for media, shape in (
            ("application/json", _shape(one.answer, shapes)),
            (_EVENT_STREAM, _shape(one.event, shapes)),
            (one.text, {"type": "string"} if one.text else None),
        )
        if shape
    }
    bad = {"application/json": {"schema": shapes[one.error]}}
    made: dict[str, Any] = {
        "summary": one.summary,
        "operationId": one.name,
        "responses": {
            "200": {"description": "OK", **({"content": good} if good else {})},
            **{str(status): {"description": words, "content": bad} for status, words in one.errors.items()},
        },
    }
    if names := re.findall(r"{(\w+)", one.path):
        made["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if one.body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": _shape(one.body, shapes)}}}
    if secured and one.method == "POST":
        made["security"] = [{"key": []}]
    return made
