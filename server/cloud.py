"""The routes that cloud platforms call: SageMaker's `/invocations`, Vertex AI's `/vertex`.

Both carry the bodies of other routes; what a body means is theirs. Knows only how to tell them apart and how to put answers together.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from forerun.server import errors
from forerun.server.body import decode, read, read_bytes
from forerun.server.errors import ApiError
from forerun.server.native import Native
from forerun.server.openai import OpenAI
from forerun.server.openai_schema import ChatRequest, CompletionRequest
from forerun.server.schema import CompatGenerateRequest, GenerateParameters, GenerateRequest

_encode = msgspec.json.Encoder().encode


class _Shape(msgspec.Struct):
    """Which kind of body came."""

    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class VertexRequest(msgspec.Struct):
    instances: list[msgspec.Raw]


class VertexResponse(msgspec.Struct):
    predictions: list[str]


_shape = msgspec.json.Decoder(_Shape)
_native = msgspec.json.Decoder(GenerateRequest)
_compat = msgspec.json.Decoder(CompatGenerateRequest)
_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_vertex = msgspec.json.Decoder(VertexRequest)


class Cloud:
    def __init__(self, native: Native, openai: OpenAI) -> None:
        self._native = native
        self._openai = openai

    async def invocations(self, http: web.Request) -> web.StreamResponse:
        """The shape of the body decides; native bodies are answered as on `/`."""
        raw = await read_bytes(http)
        shape = decode(raw, _shape)
        if not _given(shape.inputs) and _given(shape.messages):
            return await self._openai.chat_body(http, decode(raw, _chat))
        if not _given(shape.inputs) and _given(shape.prompt):
            return await self._openai.completion_body(http, decode(raw, _completion))
        return await self._native.compat_body(http, decode(raw, _compat))

    async def vertex(self, http: web.Request) -> web.Response:
        """One text for each instance, all of them at once. The first that fails is the answer; the others are cancelled."""
        body = await read(http, _vertex)
        if not body.instances:
            raise ApiError(422, "Input validation error", "Input validation error", label="validation")
        self._native.allow(len(body.instances))
        tasks = [asyncio.ensure_future(self._text(http, bytes(raw))) for raw in body.instances]
        try:
            texts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return web.Response(body=_encode(VertexResponse(list(texts))), content_type="application/json")

    async def _text(self, http: web.Request, raw: bytes) -> str:
        if _given(decode(raw, _shape).messages):
            chat = decode(raw, _chat)
            if chat.stream:
                raise errors.invalid("`stream` is not supported on this route")
            return _said(await self._openai.chat_body(http, chat))
        asked = decode(raw, _native)
        given = asked.parameters or GenerateParameters()
        # As TGI: of the parameters only these two are read, and tokens are sampled.
        parameters = GenerateParameters(do_sample=True, max_new_tokens=given.max_new_tokens, seed=given.seed)
        whole = await self._native.whole(http, GenerateRequest(asked.inputs, parameters))
        text: str = _body(whole)["generated_text"]
        return text


def _given(value: msgspec.Raw | msgspec.UnsetType) -> bool:
    """Whether a field is there and says something: clients that know all shapes send null for the others."""
    return value is not msgspec.UNSET and bytes(value) != b"null"


def _said(response: web.StreamResponse) -> str:
    """The text of a chat answer; where it only calls tools, the calls, as JSON."""
    message = _body(response)["choices"][0]["message"]
    return message["content"] if message["content"] is not None else _encode(message.get("tool_calls", [])).decode()


def _body(response: web.StreamResponse) -> Any:
    assert isinstance(response, web.Response) and isinstance(response.body, bytes), "an answer that is not streamed"
    return msgspec.json.decode(response.body)
