"""KServe's protocol: bytes in, bytes out, and probes that tell the truth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.router.request import Failure
from forerun.router.service import Phase
from tests.server.front import runs, serve
from tests.server.test_native import ids

PATH = "/v2/models/mine/versions/3"
PARAMETERS = {"max_new_tokens": 5}


def tensor(text: str, name: str = "in") -> dict[str, Any]:
    data = text.encode()
    return {"name": name, "shape": [len(data)], "datatype": "BYTES", "data": list(data)}


@pytest.mark.parametrize("path", [f"{PATH}/infer", "/v2/models/mine/infer"])
async def test_each_input_has_its_output(path: str) -> None:
    async with serve() as front:
        body = {
            "id": "7",
            "parameters": PARAMETERS,
            "inputs": [tensor("hello"), tensor("the ü")],
            "outputs": [{"name": "a"}, {"name": "b"}],
        }
        status, answer = await front.post(path, body)
        assert status == 200 and (answer["id"], answer["model_name"]) == ("7", "mine")
        for name, text, output in zip("ab", ("hello", "the ü"), answer["outputs"]):
            _, plain = await front.post("/generate", {"inputs": text, "parameters": PARAMETERS})
            assert output == {"name": name, "shape": [1], "datatype": "BYTES", "data": list(plain["generated_text"].encode())}
        await front.settled()


async def test_a_text_is_answered_by_a_text() -> None:
    async with serve(script=runs(ids("hello"), [*ids(" the"), 0])) as front:
        body = {"inputs": [{"name": "in", "shape": [1], "datatype": "BYTES", "data": ["quick"]}], "parameters": {"max_new_tokens": 2}}
        status, answer = await front.post(f"{PATH}/infer", body)
        assert status == 200 and answer["id"] == "" and answer["outputs"][0]["name"] == "in"
        assert isinstance(answer["outputs"][0]["data"][0], str)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"inputs": []}, "length mismatch"),
        ({"inputs": [tensor("x")], "outputs": [{"name": "a"}, {"name": "b"}]}, "length mismatch"),
        ({"inputs": [{"name": "in", "data": [255]}]}, "utf8"),
        ({"inputs": [{"name": "in", "data": [256]}]}, "validation"),
        ({"inputs": [{"name": "in", "data": [-1]}]}, "validation"),
        ({"inputs": [{"name": "in", "data": [1, "a"]}]}, "validation"),
        ({"inputs": [{"name": "in", "data": ["a", "b"]}]}, "validation"),
        ({"inputs": [{"name": "in", "data": []}]}, "validation"),
        ({"inputs": [tensor("x")], "parameters": {"top_p": 3}}, "validation"),
        ({"inputs": [tensor("x"), tensor("")]}, "validation"),
        ({}, "validation"),
    ],
)
async def test_refusals(body: dict[str, Any], kind: str) -> None:
    async with serve() as front:
        status, error = await front.post(f"{PATH}/infer", body)
        assert (status, error["error_type"]) == (422, kind)
        await front.settled()


async def test_one_failure_is_the_answer() -> None:
    async with serve(script=runs(failure=Failure("no", "generation", 424))) as front:
        assert (await front.post(f"{PATH}/infer", {"inputs": [tensor("x"), tensor("y")]}))[0] == 424
        await front.settled()


async def test_the_key_guards_inference_and_leaves_probes_open() -> None:
    async with serve("--api-key", "k") as front:
        assert (await front.post(f"{PATH}/infer", {"inputs": [tensor("x")]}))[0] == 401
        assert (await front.get("/v2/health/live"))[0].status == 200


@pytest.mark.parametrize(
    ("path", "body"), [(f"{PATH}/infer", {"inputs": [tensor("x")] * 9}), ("/vertex", {"instances": [{"inputs": "x"}] * 9})]
)
async def test_more_than_can_ever_run_is_refused_before_anything_is_begun(path: str, body: dict[str, Any]) -> None:
    """Also while the model loads: a body of two megabytes has room for a hundred thousand inputs, each of them a task."""
    async with serve() as front:
        status, error = await front.post(path, body)
        assert status == 422 and "this server makes 8 at a time" in error["error"]
        assert not front.router.submitted and front.router.inside == 0
        front.router.limits = None
        before = front.services.metrics.requests.counts()
        many = {name: given * 20 for name, given in body.items()}
        assert (await front.post(path, many))[0] == 422 and front.services.metrics.requests.counts() == before


async def test_probes() -> None:
    ready = [f"{PATH}/ready", "/v2/models/mine/ready", "/v2/health/ready"]
    async with serve() as front:
        for path in ["/v2/health/live", *ready]:
            response, body = await front.get(path)
            assert response.status == 200 and json.loads(body) == {"live": True, "ready": True}
        front.router.phase = Phase.DRAINING
        assert json.loads((await front.get("/v2/health/live"))[1]) == {"live": True, "ready": False}
        assert [(await front.get(path))[0].status for path in ready] == [503] * 3
        front.router.phase, front.router.failure = Phase.FAILED, Failure("died", "generation", 500)
        assert (await front.get("/v2/health/live"))[0].status == 503


async def test_metadata() -> None:
    async with serve() as front:
        assert json.loads((await front.get("/v2"))[1])["extensions"] == ["health", "models", "metrics"]
        told = json.loads((await front.get(PATH))[1])
        assert (told["name"], told["versions"]) == ("mine", ["3"])
        assert json.loads((await front.get("/v2/models/mine"))[1])["versions"] == ["1"]
