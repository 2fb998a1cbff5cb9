"""Our OpenAPI document is valid, and every way in which it says something else than TGI's is explained in docs/tgi-differences.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openapi_spec_validator
import pytest

from tests.server.contract import differences, facts
from tests.server.front import serve

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tgi-differences.md"
TITLE = "## Field by field"
THEIRS = Path(__file__).with_name("tgi_openapi.json")
"""what TGI 3.3.6's document says, made with `facts`"""


async def document(*flags: str) -> dict[str, Any]:
    async with serve(*flags) as front:
        made: dict[str, Any] = json.loads((await front.get("/api-doc/openapi.json"))[1])
        return made


@pytest.mark.parametrize("flags", [(), ("--api-key", "k")])
async def test_the_document_is_valid(flags: tuple[str, ...]) -> None:
    openapi_spec_validator.validate(await document(*flags))


def explained() -> dict[str, tuple[str, str, str]]:
    """The table of the page: by field, what TGI says, what we say, and why."""
    table = PAGE.read_text(encoding="utf-8").partition(TITLE)[2].partition("\n## ")[0]
    rows = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
    return {row[0].strip("`"): (row[1], row[2], row[3]) for row in rows if len(row) == 4 and row[0].startswith("`")}


def row(field: str, pair: tuple[str, str], why: str) -> str:
    theirs, ours = (one.replace("|", "\\|") for one in pair)
    return f"| `{field}` | {theirs} | {ours} | {why} |"


async def test_every_difference_from_tgis_document_is_explained() -> None:
    found = differences(json.loads(THEIRS.read_text(encoding="utf-8")), facts(await document()))
    said = explained()
    missing = [row(field, pair, "?") for field, pair in found.items() if field not in said or said[field][:2] != pair]
    assert not missing, f"{PAGE.name} should say why:\n" + "\n".join(missing)
    assert not said.keys() - found.keys(), f"{PAGE.name} explains what is no difference: {sorted(said.keys() - found.keys())}"
    assert all(len(why) > 3 for *_, why in said.values())


def test_nothing_is_told_twice() -> None:
    """A row that a newer one was put beside contradicts it."""
    for part in PAGE.read_text(encoding="utf-8").split("\n## "):
        told = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| ")]
        assert len(told) == len(set(told)), sorted({one for one in told if told.count(one) > 1})


def test_a_difference_is_found_wherever_it_is() -> None:
    """The comparison itself: types, enums, bounds, defaults, required, nested fields, whole routes."""

    def said(schema: dict[str, Any]) -> dict[str, dict[str, str]]:
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        return facts({"paths": {"/x": {"post": {"requestBody": body, "responses": {"200": {}}}}}, "components": {"schemas": {}}})

    base = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "integer"}}}}}}
    inner = base["properties"]["a"]["items"]["properties"]["b"]  # type: ignore[index]
    plain = said(base)
    assert differences(plain, plain) == {} and list(plain["POST /x in"]) == ["a", "a[].b"]
    for change in ({"type": "string"}, {"minimum": 1}, {"default": 5}, {"enum": [1]}, {"nullable": True}):
        other = json.loads(json.dumps(base))
        other["properties"]["a"]["items"]["properties"]["b"] = inner | change
        assert list(differences(plain, said(other))) == ["in a[].b"], change
    assert list(differences(plain, said({**base, "required": ["a"]}))) == ["in a"]
    assert list(differences(plain, {**plain, "GET /y statuses": {"200": ""}})) == ["GET /y"]
