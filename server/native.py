"""TGI's own routes: `POST /`, `/generate`, `/generate_stream`, `/tokenize`.

The order of what happens to a request is TGI's: body, checks of the route, permit, parameters, tokenizer, queue. Handlers only arrange it.
A client that leaves cancels its handler at any of the awaits; what was taken by then is given back on the way out.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec
from aiohttp import web

from forerun.config import Config
from forerun.router import request as asked
from forerun.server import answer
from forerun.server.answer import Collector, Form
from forerun.server.body import read
from forerun.server.desk import Desk
from forerun.server.events import Channel, EventStream, Outbox
from forerun.server.identity import REQUEST_ID
from forerun.server.schema import CompatGenerateRequest, GenerateParameters, GenerateRequest
from forerun.server.speak import chunked, speak
from forerun.server.transcript import prefill
from forerun.server.validate import Question, check_route, derived_seed, parameters_of, sequences
from forerun.server.voice import NativeVoice

_generate = msgspec.json.Decoder(GenerateRequest)
_compat = msgspec.json.Decoder(CompatGenerateRequest)
_encode = msgspec.json.Encoder().encode


class Native:
    def __init__(self, config: Config, desk: Desk) -> None:
        self._config = config
        self._desk = desk
        self._outbox = Outbox()

    async def compat(self, http: web.Request) -> web.StreamResponse:
        """`POST /`: an array of one answer, or a stream; the prompt is repeated unless the client says otherwise."""
        return await self.compat_body(http, await read(http, _compat))

    async def generate(self, http: web.Request) -> web.StreamResponse:
        return await self.whole(http, await read(http, _generate))

    async def generate_stream(self, http: web.Request) -> web.StreamResponse:
        return await self._stream(http, await read(http, _generate))

    async def tokenize(self, http: web.Request) -> web.Response:
        """Ids, texts and byte offsets of the prompt's tokens; nothing is validated and no permit is taken, as in TGI."""
        body = await read(http, _generate)
        return await self._desk.lists.answer(http, self._desk.tokenizer(), body.inputs)

    async def compat_body(self, http: web.Request, body: CompatGenerateRequest) -> web.StreamResponse:
        # TGI asks the hub for the model's pipeline tag here; for a local model, and for any that generates text, it comes to true.
        if body.stream:
            return await self._stream(http, body, full_text=True)
        return await self.whole(http, body, full_text=True, listed=True)

    def allow(self, answers: int) -> None:
        """For routes that ask for several at once. Raises ApiError, as `Desk.allow`."""
        self._desk.allow(answers)

    async def whole(self, http: web.Request, body: GenerateRequest, *, full_text: bool = False, listed: bool = False) -> web.StreamResponse:
        arrived, parameters = time.monotonic(), parameters_of(body)
        with self._desk.metrics.counted():
            check_route(parameters, self._config.limits, stream=False)
            with self._desk.enter(sequences(parameters)):
                request = await self._request(http, body, arrived, stream=False)
                return await self._collect(request, body, full_text, listed)

    async def _request(self, http: web.Request, body: GenerateRequest, arrived: float, *, stream: bool) -> asked.Request:
        async with self._desk.by_deadline(arrived, parameters_of(body).deadline_ms):
            return await self._desk.validate(Question(body, http[REQUEST_ID], arrived, stream))

    async def _collect(self, request: asked.Request, body: GenerateRequest, full_text: bool, listed: bool) -> web.Response:
        parameters = parameters_of(body)
        form = _form(body, request, full_text)
        collectors = [self._collector(request, parameters, form, index) for index in range(sequences(parameters))]
        with self._desk.submitted((request, collector, collector.params) for collector in collectors) as running:
            await (collectors[0].done if len(collectors) == 1 else asyncio.gather(*(collector.done for collector in collectors)))
        chosen = answer.best(collectors) if len(collectors) > 1 else 0
        winner = collectors[chosen].transcript
        known = prefill(self._desk.tokenizer(), request.tokens, collectors[0].transcript.prompt_logprobs) if form.prompt else []
        response = answer.response(collectors, chosen, form, known)
        timing = self._desk.record(running[chosen], parameters, winner)
        headers = {
            "x-compute-type": self._desk.compute_type(),
            "x-compute-characters": str(len(body.inputs)),
            **timing.headers(winner.generated),
            "x-prompt-tokens": str(len(request.tokens)),
            "x-generated-tokens": str(winner.generated),
        }
        return _json([response] if listed else response, headers)

    def _collector(self, request: asked.Request, parameters: GenerateParameters, form: Form, index: int) -> Collector:
        params = request.params
        if index:  # the prompt is the same for all, so the first alone reports on it
            params = msgspec.structs.replace(params, seed=derived_seed(params.seed, index), prompt_logprobs=False)
        transcript = self._desk.transcript(request, parameters.stop, params)
        return Collector(transcript, self._desk.pace(request), params, form.details, form.origins)

    async def _stream(self, http: web.Request, body: GenerateRequest, *, full_text: bool = False) -> web.StreamResponse:
        arrived, parameters = time.monotonic(), parameters_of(body)
        with self._desk.metrics.counted():
            check_route(parameters, self._config.limits, stream=True)
            with self._desk.enter(1):
                request = await self._request(http, body, arrived, stream=True)
                response = await self._send(http, request, body, _form(body, request, full_text))
        # The rest is waiting for the client to read; that takes nobody's place and no longer counts.
        await response.write_eof()
        return response

    async def _send(self, http: web.Request, request: asked.Request, body: GenerateRequest, form: Form) -> web.StreamResponse:
        parameters = parameters_of(body)
        transcript = self._desk.transcript(request, parameters.stop, request.params)
        voice = NativeVoice(form, request.params)
        channel = Channel(voice, self._outbox, chunked=chunked(http))
        stream = EventStream(transcript, self._desk.pace(request), voice, channel)
        headers = {"x-compute-type": self._desk.compute_type(), "x-compute-characters": str(len(body.inputs))}
        with self._desk.submitted([(request, stream, request.params)]) as running, contextlib.closing(channel):
            response = await speak(http, channel, headers)
        if channel.failure:
            self._desk.failed(channel.failure)
        else:
            self._desk.record(running[0], parameters, transcript)
        return response


def _form(body: GenerateRequest, request: asked.Request, full_text: bool) -> Form:
    parameters = parameters_of(body)
    repeat = full_text if parameters.return_full_text is None else parameters.return_full_text
    details = parameters.details or parameters.decoder_input_details
    prefix = body.inputs if repeat else ""
    return Form(prefix, details, parameters.decoder_input_details, len(request.tokens), parameters.origins)


def _json(value: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json", headers=headers)
