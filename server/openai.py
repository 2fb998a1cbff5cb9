"""OpenAI's routes: chat and text completions, the list of models, and TGI's `/chat_tokenize`.

The order of what happens to a request is that of the native routes: body, template, permits, parameters, tokens, queue. A request has
`n` answers for each of its prompts; each is a sequence of its own with a permit of its own, and all of them speak through one response.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from forerun.config import Config
from forerun.messages import SamplingParams
from forerun.router import request as queued
from forerun.server import chat, errors, tools
from forerun.server import openai_schema as shape
from forerun.server.answer import Collector
from forerun.server.body import read
from forerun.server.desk import Desk
from forerun.server.errors import ApiError, invalid, malformed
from forerun.server.events import Channel, EventStream, Outbox, Voice
from forerun.server.grammar import Constraint
from forerun.server.identity import REQUEST_ID
from forerun.server.info import TGI_VERSION
from forerun.server.openai_params import Asked, asked, unsupported
from forerun.server.openai_schema import ChatRequest, CompletionRequest
from forerun.server.openai_voice import ChatVoice, Echo, Ending, Head, TextVoice, chat_choice, text_choice
from forerun.server.schema import GenerateRequest
from forerun.server.speak import chunked, speak
from forerun.server.transcript import Transcript
from forerun.server.validate import derived_seed

_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode
NO_MARKS: frozenset[str] = frozenset()
NO_ECHO = Echo()
_ROUNDS = 20
"""a conversation that is shortened is rendered and tokenized about so often"""
_PIECE = 100
"""characters that a message costs a template besides its own, and what a part of one is taken for"""
STARTED = int(time.time())


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    """One answer to be made: a prompt's request, with the seed of this answer."""

    index: int
    request: queued.Request
    params: SamplingParams
    echo: Echo


class OpenAI:
    def __init__(self, config: Config, desk: Desk) -> None:
        self._config = config
        self._desk = desk
        self._outbox = Outbox()

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        return await self.chat_body(http, await read(http, _chat))

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self.completion_body(http, await read(http, _completion))

    async def models(self, http: web.Request) -> web.Response:
        return _json(shape.Models("list", [self._model()]))

    async def model(self, http: web.Request) -> web.Response:
        if http.match_info["id"] != self._config.model.model_id:
            raise errors.missing(f"There is no model {http.match_info['id']}; this server has {self._config.model.model_id}")
        return _json(self._model())

    async def chat_tokenize(self, http: web.Request) -> web.Response:
        """The prompt that a conversation becomes, and its tokens: as many as `usage.prompt_tokens` would say."""
        body = await read(http, _chat)
        prompt = await self._prompt(body, whole=True)
        behind = b',"templated_text":' + _encode(prompt.text) + b"}"
        before = b'{"tokenize_response":'
        return await self._desk.lists.answer(http, self._desk.tokenizer(), prompt.text, special=False, before=before, behind=behind)

    async def chat_body(self, http: web.Request, body: ChatRequest) -> web.StreamResponse:
        arrived = time.monotonic()
        with self._desk.metrics.counted():
            tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            logprobs, top = bool(body.logprobs), body.top_logprobs or 0
            wanted = asked(body, max_tokens=tokens, logprobs=logprobs, top=top, most_top=self._most_top(20), vocab=self._desk.vocab())
            prompt = await self._prompt(body)
            with self._desk.enter(wanted.answers):
                ids = await self._desk.tokenizer().encode(prompt.text, False)
                must = tools.constraint_of(body, prompt, self._desk.tokenizer().special_id)
                request = await self._request(http, wanted, prompt.text, ids, arrived, bool(body.stream), must)
                jobs = self._jobs(request, wanted, 0)
                head = self._head(http, "chatcmpl", body.model, len(ids))
                vocabulary = self._desk.tokenizer()
                if not body.stream:
                    return await self._whole(
                        jobs,
                        wanted,
                        prompt.marks,
                        lambda made: shape.ChatCompletion(
                            **head.fields(),
                            choices=[chat_choice(i, one, prompt.reader(), vocabulary, logprobs) for i, one in enumerate(made)],
                            usage=head.usage([one.transcript for one in made]),
                        ),
                        len(prompt.text),
                    )
                voices = [ChatVoice(head, job.index, prompt.reader(), vocabulary, logprobs, body.origins, wanted.counting) for job in jobs]
                response = await self._stream(http, jobs, voices, Ending(head, wanted.usage, True), wanted, prompt.marks, len(prompt.text))
        await response.write_eof()
        return response

    async def completion_body(self, http: web.Request, body: CompletionRequest) -> web.StreamResponse:
        arrived = time.monotonic()
        with self._desk.metrics.counted():
            if body.suffix is not None:
                message = "Suffix is not supported and can be achieved by preprocessing the prompt."
                raise ApiError(422, message, "suffix not supported", label="validation")
            if body.best_of is not None and body.best_of > max(1, body.n or 1):
                raise unsupported("Input validation error: `best_of` > `n` is not supported on this route; use /generate")
            prompts = _prompts(body)
            most = self._config.limits.max_client_batch_size
            if len(prompts) > most:
                message = f"Number of prompts exceeds the maximum allowed batch size of {most}"
                raise ApiError(422, message, "batch size exceeded", label="validation")
            logprobs, top, vocabulary = body.logprobs is not None, body.logprobs or 0, self._desk.tokenizer()
            alone = bool(body.echo) and body.max_tokens == 0
            wanted = asked(
                body,
                max_tokens=1 if alone else body.max_tokens,
                logprobs=logprobs,
                top=top,
                most_top=self._most_top(5),
                vocab=self._desk.vocab(),
                prompt_logprobs=logprobs and bool(body.echo),
            )
            with self._desk.enter(wanted.answers * len(prompts)):
                jobs = [
                    job for place, prompt in enumerate(prompts) for job in await self._continue(http, body, wanted, prompt, place, arrived)
                ]
                head = self._head(http, "cmpl", body.model, sum(len(job.request.tokens) for job in jobs[:: wanted.answers]), alone)
                characters = sum(len(prompt) for prompt in prompts)
                if not body.stream:
                    return await self._whole(
                        jobs,
                        wanted,
                        NO_MARKS,
                        lambda made: shape.Completion(
                            **head.fields(),
                            choices=[text_choice(job.index, one, vocabulary, logprobs, job.echo) for job, one in zip(jobs, made)],
                            usage=head.usage([one.transcript for one in made]),
                        ),
                        characters,
                    )
                told = (None if wanted.usage else len(job.request.tokens) for job in jobs)
                voices = [
                    TextVoice(head, job.index, vocabulary, logprobs, job.echo, prompt, wanted.counting) for job, prompt in zip(jobs, told)
                ]
                response = await self._stream(http, jobs, voices, Ending(head, wanted.usage, False), wanted, NO_MARKS, characters)
        await response.write_eof()
        return response

    async def _continue(
        self, http: web.Request, body: CompletionRequest, wanted: Asked, prompt: str | list[int], place: int, arrived: float
    ) -> list[_Job]:
        """The answers to one of the prompts."""
        vocabulary = self._desk.tokenizer()
        text = prompt if isinstance(prompt, str) else ""
        ids = await vocabulary.encode(prompt) if isinstance(prompt, str) else prompt
        request = await self._request(http, wanted, text or "ids", ids, arrived, bool(body.stream), tools.of_body(body))
        echo = NO_ECHO
        if body.echo:
            echo = Echo(text or vocabulary.decode(ids), ids if wanted.logprobs else (), body.max_tokens == 0)
        return self._jobs(request, wanted, place * wanted.answers, echo)

    async def _prompt(self, body: ChatRequest, *, whole: bool = False) -> chat.Prompt:
        """`whole`: it is never shortened."""
        templates, tokenizer = self._desk.templates(), self._desk.tokenizer()
        size = _size(body)
        if whole or body.truncate in (None, "refuse"):
            return await tokenizer.aside(size, lambda: chat.prompt_of(body, templates))
        limits = self._desk.limits()
        room = min(limits.max_input_tokens, limits.max_total_tokens - min(body.max_completion_tokens or body.max_tokens or 1, 1024))
        return await tokenizer.aside(_ROUNDS * size, lambda: chat.shortened(body, templates, lambda text: tokenizer.count(text) <= room))

    async def _request(
        self, http: web.Request, wanted: Asked, text: str, ids: list[int], arrived: float, stream: bool, must: Constraint | None
    ) -> queued.Request:
        body = GenerateRequest(text, wanted.native)
        request = await self._desk.validate(body, id=http[REQUEST_ID], arrived=arrived, stream=stream, tokens=ids, constraint=must)
        return dataclasses.replace(request, params=wanted.complete(request.params))

    def _jobs(self, request: queued.Request, wanted: Asked, first: int, echo: Echo = NO_ECHO) -> list[_Job]:
        seeds = [request.params.seed, *(derived_seed(request.params.seed, index) for index in range(1, wanted.answers))]
        return [_Job(first + index, request, msgspec.structs.replace(request.params, seed=seed), echo) for index, seed in enumerate(seeds)]

    async def _whole(
        self,
        jobs: Sequence[_Job],
        wanted: Asked,
        marks: frozenset[str],
        made: Callable[[list[Collector]], Any],
        characters: int,
    ) -> web.Response:
        collectors = [
            Collector(self._transcript(job, wanted, marks), self._desk.pace(job.request), job.params, keep=wanted.logprobs) for job in jobs
        ]
        with self._submitted(jobs, collectors) as running:
            await asyncio.gather(*(collector.done for collector in collectors))
        timings = [self._desk.record(sequence, wanted.native, collector.transcript) for sequence, collector in zip(running, collectors)]
        slowest = max(timings, key=lambda timing: timing.total)
        generated = sum(collector.transcript.generated for collector in collectors)
        headers = {
            **self._headers(characters),
            **slowest.headers(generated),
            "x-prompt-tokens": str(len(jobs[0].request.tokens)),
            "x-generated-tokens": str(generated),
        }
        return _json(made(collectors), headers)

    async def _stream(
        self,
        http: web.Request,
        jobs: Sequence[_Job],
        voices: Sequence[Voice],
        ending: Ending,
        wanted: Asked,
        marks: frozenset[str],
        characters: int,
    ) -> web.StreamResponse:
        channel = Channel(ending, self._outbox, sequences=len(jobs), chunked=chunked(http))
        ending.transcripts += [self._transcript(job, wanted, marks) for job in jobs]
        streams = [
            EventStream(transcript, self._desk.pace(job.request), voice, channel)
            for job, transcript, voice in zip(jobs, ending.transcripts, voices)
        ]
        with self._submitted(jobs, streams) as running:
            try:
                response = await speak(http, channel, self._headers(characters))
            finally:
                channel.close()
        if channel.failure:
            self._desk.failed(channel.failure)
        else:
            for sequence, transcript in zip(running, ending.transcripts):
                self._desk.record(sequence, wanted.native, transcript)
        return response

    @contextlib.contextmanager
    def _submitted(self, jobs: Sequence[_Job], streams: Sequence[queued.TokenStream]) -> Iterator[list[queued.Sequence]]:
        """The sequences of a request; however this ends, none of them runs on."""
        running: list[queued.Sequence] = []
        try:
            for job, stream in zip(jobs, streams):
                running.append(self._desk.submit(job.request, stream, job.params))
            yield running
        finally:
            for sequence in running:
                self._desk.cancel(sequence)

    def _transcript(self, job: _Job, wanted: Asked, marks: frozenset[str]) -> Transcript:
        return self._desk.transcript(job.request, wanted.stop, job.params, marks)

    def _headers(self, characters: int) -> dict[str, str]:
        return {"x-compute-type": self._desk.compute_type(), "x-compute-characters": str(characters)}

    def _head(self, http: web.Request, kind: str, model: str | None, prompt_tokens: int, mute: bool = False) -> Head:
        name = model if kind == "chatcmpl" and model not in (None, "tgi") else self._config.model.model_id
        return Head(f"{kind}-{http[REQUEST_ID]}", int(time.time()), name or "", f"{TGI_VERSION}-forerun", prompt_tokens, mute)

    def _most_top(self, openai: int) -> int:
        """OpenAI's limit, or the operator's if that is higher."""
        return max(openai, self._config.limits.max_top_n_tokens)

    def _model(self) -> shape.ModelInfo:
        return shape.ModelInfo(self._config.model.model_id, "model", STARTED, self._config.model.model_id)


def _size(body: ChatRequest) -> int:
    """About how many characters a template has to work through."""
    said = 0
    for message in body.messages:
        content = message.content or ""
        said += _PIECE + (_PIECE * len(content) if isinstance(content, list) else len(content))
    return said + _PIECE * (4 * len(body.tools or ()) + len(body.documents or ()))


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """A text, several, the ids of one, or of several."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise malformed(422, "Empty array detected. Do not use an empty array for the prompt.")
    if all(isinstance(one, int) for one in given):
        return [[one for one in given if isinstance(one, int)]]
    if any(isinstance(one, int) for one in given):
        raise invalid("`prompt` must not mix texts and token ids")
    found = [one for one in given if not isinstance(one, int)]
    if not all(found):
        raise invalid("`inputs` cannot be empty")
    return found


def _json(value: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json", headers=headers)
