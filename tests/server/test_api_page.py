"""docs/api.md is made from the OpenAPI document, and is current: `make docs-api` writes it anew."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.server.front import serve

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
HEAD = """# The HTTP interface

Made from the OpenAPI document by `make docs-api`. A running server has it at `/api-doc/openapi.json`, and to look at under `/docs`.
What differs from TGI, and why: [differences](tgi-differences.md). First lines for each client: [clients](clients.md).

Streams are server-sent events (`data: {…}`), on `/v1` with `data: [DONE]` at the end. Every error is JSON with `error` and `error_type`.

| route | what it does | takes | answers |
|---|---|---|---|
"""


def page(document: dict[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    return HEAD + "".join(_routes(document)) + "".join(_struct(name, schemas[name]) for name in sorted(schemas))


def _routes(document: dict[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            asked = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            told = operation["responses"]["200"].get("content", {})
            names = {"application/json": "", "text/event-stream": " (stream)"}
            answers = [_type(content["schema"]) + names.get(media, "") for media, content in told.items()]
            cells = [f"`{method.upper()} {path}`", operation["summary"], _type(asked) if asked else "", ", ".join(answers)]
            yield "| " + " | ".join(cell.replace("|", "or") for cell in cells) + " |\n"


def _struct(name: str, schema: dict[str, Any]) -> str:
    rows = "".join(_row(field, one, schema) for field, one in schema.get("properties", {}).items())
    words = schema.get("description", "")
    return (
        f"\n## {name}\n\n"
        + (f"{words}\n\n" if words else "")
        + ("| field | type | default | meaning |\n|---|---|---|---|\n" + rows if rows else "")
    )


def _row(field: str, one: dict[str, Any], schema: dict[str, Any]) -> str:
    if field in schema.get("required", ()):
        default = "required"
    else:
        default = "" if "default" not in one else f"`{json.dumps(one['default'], ensure_ascii=False)}`"
    meaning = one.get("description", "").replace("|", "\\|").replace("\n", " ")
    return f"| `{field}` | {_type(one)} | {default} | {meaning} |\n"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower().replace('.', '')})"
    if parts := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, parts)))
    if "enum" in schema:
        return " or ".join(f"`{choice}`" for choice in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        inside = schema.get("items")
        return f"list of {_type(inside)}" if isinstance(inside, dict) and inside else "list"
    return str(schema.get("type", "anything"))


async def made() -> str:
    async with serve() as front:
        return page(json.loads((await front.get("/api-doc/openapi.json"))[1]))


async def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == await made(), "docs/api.md is old: make docs-api"


if __name__ == "__main__":
    PAGE.write_text(asyncio.run(made()), encoding="utf-8")
