"""KServe's v2 protocol, as TGI has it where it was built for that platform: a text is a tensor of bytes.

    POST /v2/models/m/versions/1/infer
    {"id": "7", "parameters": {…}, "inputs": [{"name", "shape", "datatype": "BYTES", "data": …}], "outputs": [{"name"}]}
    {"id": "7", "model_name": "m", "outputs": [{"name", "shape": [1], "datatype": "BYTES", "data": …}]}

`data` is a list of the text's bytes, as TGI reads it, or a list of one text, as KServe's own clients send it in JSON; the answer has
the form of the question. Names and versions are echoed, never checked: there is one model. What a parameter means is the native routes'
business.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from aiohttp import web

from forerun import __version__
from forerun.server.body import read
from forerun.server.document import Operation, inference
from forerun.server.errors import ApiError
from forerun.server.health import Health
from forerun.server.native import Native
from forerun.server.schema import GenerateParameters, GenerateRequest, HealthError

MODEL = "/v2/models/{model}"
VERSION = "/v2/models/{model}/versions/{version}"
_encode = msgspec.json.Encoder().encode

Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]


class InputTensor(msgspec.Struct):
    """A prompt."""

    name: str
    data: list[Byte | str]
    shape: list[int] = []
    datatype: str = "BYTES"


class OutputName(msgspec.Struct):
    name: str


class InferRequest(msgspec.Struct):
    """As many outputs as inputs, or none: then they are named as the inputs."""

    inputs: list[InputTensor]
    id: str = ""
    parameters: GenerateParameters | msgspec.UnsetType = msgspec.UNSET
    outputs: list[OutputName] = []


class OutputTensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[int | str]


class InferResponse(msgspec.Struct):
    id: str
    model_name: str
    outputs: list[OutputTensor]


class Alive(msgspec.Struct):
    live: bool
    ready: bool


class ServerMetadata(msgspec.Struct):
    name: str
    version: str
    extensions: list[str]


class ModelMetadata(msgspec.Struct):
    name: str
    versions: list[str]
    platform: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]


_infer = msgspec.json.Decoder(InferRequest)
_TENSOR = {"datatype": "BYTES", "shape": [1]}


class KServe:
    def __init__(self, native: Native, health: Health) -> None:
        self._native = native
        self._health = health

    def operations(self) -> list[Operation]:
        def ask(path: str, name: str, handler: Any, summary: str, answer: Any) -> Operation:
            return Operation("GET", path, name, handler, summary, answer=answer)

        def probe(path: str, name: str, handler: Any, summary: str) -> Operation:
            return Operation("GET", path, name, handler, summary, answer=Alive, errors={503: "No"}, error=HealthError)

        made = [
            ask("/v2", "kserve_server", self.server, "This server (KServe)", ServerMetadata),
            probe("/v2/health/live", "kserve_live", self.live, "Is the process worth keeping? (KServe)"),
            probe("/v2/health/ready", "kserve_ready", self.ready, "Should new requests be routed here? (KServe)"),
        ]
        for base, name in ((MODEL, "kserve_model"), (VERSION, "kserve_version")):
            made += [
                ask(base, name, self.model, "The model (KServe)", ModelMetadata),
                probe(f"{base}/ready", f"{name}_ready", self.ready, "Should new requests be routed here? (KServe)"),
                inference(f"{base}/infer", f"{name}_infer", self.infer, "Generate (KServe)", InferRequest, answer=InferResponse),
            ]
        return made

    async def server(self, http: web.Request) -> web.Response:
        return _json(ServerMetadata("text-generation-inference", __version__, ["health", "models", "metrics"]))

    async def model(self, http: web.Request) -> web.Response:
        version = http.match_info.get("version", "1")
        said = [{"name": name, **_TENSOR} for name in ("input", "output")]
        return _json(ModelMetadata(http.match_info["model"], [version], "forerun", said[:1], said[1:]))

    async def live(self, http: web.Request) -> web.Response:
        told = await self._health.live(http)
        return _json(Alive(True, (await self._health.health(http)).status == 200)) if told.status == 200 else told

    async def ready(self, http: web.Request) -> web.Response:
        told = await self._health.health(http)
        return _json(Alive(True, True)) if told.status == 200 else told

    async def infer(self, http: web.Request) -> web.Response:
        """A text for each input, all at once. The first that fails is the answer; the others are cancelled."""
        body = await read(http, _infer)
        if not body.inputs or (body.outputs and len(body.outputs) != len(body.inputs)):
            raise ApiError(422, "Inputs and outputs length mismatch", "length mismatch", label="validation")
        self._native.allow(len(body.inputs))
        texts = [_text(tensor) for tensor in body.inputs]
        parameters = body.parameters or GenerateParameters()
        tasks = [asyncio.ensure_future(self._native.whole(http, GenerateRequest(text, parameters))) for text in texts]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        names = [output.name for output in body.outputs or body.inputs]
        said = [_tensor(name, tensor, answer) for name, tensor, answer in zip(names, body.inputs, answers)]
        return _json(InferResponse(body.id, http.match_info["model"], said))


def _text(tensor: InputTensor) -> str:
    """Raises ApiError (422)."""
    data = tensor.data
    if len(data) == 1 and isinstance(data[0], str):
        return data[0]
    if not all(isinstance(one, int) for one in data):
        raise ApiError(422, "`data` is a list of bytes or of one text", "validation", label="validation")
    try:
        return bytes(one for one in data if isinstance(one, int)).decode()
    except UnicodeDecodeError as wrong:
        raise ApiError(422, str(wrong), "utf8", label="validation") from None


def _tensor(name: str, asked: InputTensor, answer: web.StreamResponse) -> OutputTensor:
    assert isinstance(answer, web.Response) and isinstance(answer.body, bytes), "an answer that is not streamed"
    text: str = msgspec.json.decode(answer.body)["generated_text"]
    whole = bool(asked.data) and isinstance(asked.data[0], str)
    return OutputTensor(name, [1], "BYTES", [text] if whole else list(text.encode()))


def _json(value: Any) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")
