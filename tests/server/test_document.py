"""The OpenAPI document says what the server does, and the page that shows it needs nothing from elsewhere."""

from __future__ import annotations

import json
import re
from typing import Any

from forerun.server.template import ChatTemplates
from tests.server.front import Front, serve

CHAT = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/chat_tokenize": CHAT,
    "/v1/completions": {"prompt": "x"},
    "/vertex": {"instances": [{"inputs": "x"}, CHAT]},
}


async def document(front: Front) -> dict[str, Any]:
    return json.loads((await front.get("/api-doc/openapi.json"))[1])


async def test_every_operation_answers_and_every_reference_resolves() -> None:
    async with serve() as front:
        made = await document(front)
        text = json.dumps(made)
        for name in re.findall(r'"#/components/schemas/(\w+)"', text):
            assert name in made["components"]["schemas"]
        assert front.services.tokenizer is not None
        front.services.tokenizer.templates = ChatTemplates({"default": "{{ messages[0].content }}"})
        for path, methods in made["paths"].items():
            for method in methods:
                body = BODIES.get(path, {"inputs": "x"}) if method == "post" else None
                if path.endswith("/infer"):
                    body = {"inputs": [{"name": "x", "data": ["x"]}]}
                place = path.replace("{id}", "tiny").replace("{model}", "m").replace("{version}", "1")
                async with front.session.request(method, front.url + place, json=body) as response:
                    assert response.status == 200, path
        operations = [one["operationId"] for methods in made["paths"].values() for one in methods.values()]
        assert len(operations) == len(set(operations))


async def test_parameters_are_described_with_their_ranges_and_defaults() -> None:
    async with serve() as front:
        fields = (await document(front))["components"]["schemas"]["GenerateParameters"]["properties"]
        assert fields["details"]["default"] is False
        assert fields["max_new_tokens"]["default"] is None
        for name, field in fields.items():
            assert "description" in json.dumps(field), name
        assert "exclusiveMaximum" in json.dumps(fields["top_p"])
        assert '"minimum": -100' in json.dumps(fields["priority"]) and "10 seconds" in json.dumps(fields["priority"])


async def test_security_is_declared_only_with_a_key() -> None:
    async with serve() as front:
        assert "securitySchemes" not in (await document(front))["components"]
    async with serve("--api-key", "k") as front:
        made = await document(front)
        assert made["paths"]["/generate"]["post"]["security"] == [{"key": []}]
        assert "security" not in made["paths"]["/health"]["get"]


async def test_the_page_is_self_contained() -> None:
    async with serve() as front:
        for path in ("/docs", "/docs/"):
            response, body = await front.get(path)
            assert response.headers["content-type"] == "text/html; charset=utf-8"
            assert not re.search(rb"(src|href)=\"(?!/api-doc)|https?://|import ", body)
