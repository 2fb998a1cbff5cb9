"""OpenAI's routes: chat and text completions, the list of models, and TGI's `/chat_tokenize`.

The order of what happens to a request is that of the native routes: body, template, permits, parameters, tokens, queue. A request has
`n` answers for each of its prompts (`best_of` makes more, of which the best are told); each is a sequence of its own with a permit of its
own, and all of them speak through one response.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
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
from forerun.server.openai_params import Asked, asked
from forerun.server.openai_schema import ChatRequest, CompletionRequest
from forerun.server.openai_voice import ChatVoice, Echo, Ending, Head, TextVoice, chat_choice, text_choice
from forerun.server.schema import GenerateRequest
from forerun.server.speak import chunked, speak
from forerun.server.transcript import Transcript
from forerun.server.validate import Question, derived_seed

_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode
NO_MARKS: frozenset[str] = frozenset()
NO_ECHO = Echo()
_ROUNDS = 20
"""a conversation that is shortened is rendered and tokenized about so often"""
_PIECE = 100
"""characters that a message costs a template besides those of its JSON"""
STARTED = int(time.time())


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    """One answer to be made: a prompt's request, with the seed of this answer."""

    index: int
    request: queued.Request
    params: SamplingParams
    echo: Echo


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """A response to be made. `whole`: of what all jobs have said; `voice`: of one job in a stream. `marks`: special tokens that are text.
    `characters`: of the prompts, and of their tokens `prompt_tokens`."""

    wanted: Asked
    jobs: list[_Job]
    marks: frozenset[str]
    characters: int
    prompt_tokens: int
    ending: Ending
    whole: Callable[[list[Collector]], shape.ChatCompletion | shape.Completion]
    voice: Callable[[_Job], Voice]


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
        prompt = await self._prompt(http, body, whole=True)
        behind = b',"templated_text":' + _encode(prompt.text) + b"}"
        before = b'{"tokenize_response":'
        return await self._desk.lists.answer(http, self._desk.tokenizer(), prompt.text, special=False, before=before, behind=behind)

    async def chat_body(self, http: web.Request, body: ChatRequest) -> web.StreamResponse:
        arrived = time.monotonic()
        with self._desk.metrics.counted():
            tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            logprobs, top = bool(body.logprobs), body.top_logprobs or 0
            wanted = asked(body, max_tokens=tokens, logprobs=logprobs, top=top, most_top=self._most_top(20), vocab=self._desk.vocab())
            with self._desk.enter(wanted.answers):
                async with self._desk.by_deadline(arrived, body.deadline_ms):
                    plan = await self._chat(http, body, wanted, arrived)
                response = await self._answer(http, plan, bool(body.stream))
        return await _ended(response)

    async def _chat(self, http: web.Request, body: ChatRequest, wanted: Asked, arrived: float) -> _Plan:
        vocabulary = self._desk.tokenizer()
        prompt = await self._prompt(http, body)
        ids = await vocabulary.encode(prompt.text, False)
        must = tools.constraint_of(body, prompt, vocabulary.special_id)
        request = await self._request(http, wanted, prompt.text, ids, arrived, bool(body.stream), must)
        head = self._head(http, "chatcmpl", body.model, len(ids))

        def whole(made: list[Collector]) -> shape.ChatCompletion:
            choices = [chat_choice(index, one, prompt.reader(), vocabulary, wanted) for index, one in enumerate(made)]
            return shape.ChatCompletion(**head.fields(), choices=choices, usage=head.usage([one.transcript for one in made]))

        def voice(job: _Job) -> Voice:
            return ChatVoice(head, job.index, prompt.reader(), vocabulary, wanted)

        ending = Ending(head, wanted.usage, chat=True)
        return _Plan(wanted, self._jobs(request, wanted, 0), prompt.marks, len(prompt.text), len(ids), ending, whole, voice)

    async def completion_body(self, http: web.Request, body: CompletionRequest) -> web.StreamResponse:
        arrived = time.monotonic()
        with self._desk.metrics.counted():
            prompts = self._prompts(body)
            logprobs = body.logprobs is not None
            wanted = asked(
                body,
                max_tokens=1 if _alone(body) else body.max_tokens,
                logprobs=logprobs,
                top=body.logprobs or 0,
                most_top=self._most_top(5),
                vocab=self._desk.vocab(),
                best_of=body.best_of,
                prompt_logprobs=logprobs and bool(body.echo),
            )
            with self._desk.enter(wanted.answers * len(prompts)):
                async with self._desk.by_deadline(arrived, body.deadline_ms):
                    plan = await self._completion(http, body, wanted, prompts, arrived)
                response = await self._answer(http, plan, bool(body.stream))
        return await _ended(response)

    async def _completion(
        self, http: web.Request, body: CompletionRequest, wanted: Asked, prompts: Sequence[str | list[int]], arrived: float
    ) -> _Plan:
        jobs = [job for place, prompt in enumerate(prompts) for job in await self._continue(http, body, wanted, prompt, place, arrived)]
        prompt_tokens = sum(len(job.request.tokens) for job in jobs[:: wanted.answers])
        head = self._head(http, "cmpl", body.model, prompt_tokens, _alone(body))
        vocabulary = self._desk.tokenizer()

        def whole(made: list[Collector]) -> shape.Completion:
            told = _told(made, wanted)
            choices = [text_choice(index, made[place], vocabulary, wanted, jobs[place].echo) for index, place in enumerate(told)]
            return shape.Completion(**head.fields(), choices=choices, usage=head.usage([one.transcript for one in made]))

        def voice(job: _Job) -> Voice:
            return TextVoice(head, job.index, vocabulary, wanted, job.echo, len(job.request.tokens))

        characters = sum(len(prompt) for prompt in prompts)
        return _Plan(wanted, jobs, NO_MARKS, characters, prompt_tokens, Ending(head, wanted.usage, chat=False), whole, voice)

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
            echo = Echo(text or vocabulary.decode(ids), ids if wanted.logprobs else (), _alone(body))
        return self._jobs(request, wanted, place * wanted.answers, echo)

    async def _prompt(self, http: web.Request, body: ChatRequest, *, whole: bool = False) -> chat.Prompt:
        """`whole`: it is never shortened."""
        templates, tokenizer = self._desk.templates(), self._desk.tokenizer()
        size = _PIECE * len(body.messages) + len(await http.read())
        if whole or body.truncate in (None, "refuse"):
            return await tokenizer.aside(size, lambda: chat.prompt_of(body, templates))
        limits = self._desk.limits()
        room = min(limits.max_input_tokens, limits.max_total_tokens - min(body.max_completion_tokens or body.max_tokens or 1, 1024))
        return await tokenizer.aside(_ROUNDS * size, lambda: chat.shortened(body, templates, lambda text: tokenizer.count(text) <= room))

    async def _request(
        self, http: web.Request, wanted: Asked, text: str, ids: list[int], arrived: float, stream: bool, must: Constraint | None
    ) -> queued.Request:
        question = Question(GenerateRequest(text, wanted.native), http[REQUEST_ID], arrived, stream, ids, must)
        request = await self._desk.validate(question)
        return dataclasses.replace(request, params=wanted.complete(request.params))

    def _jobs(self, request: queued.Request, wanted: Asked, first: int, echo: Echo = NO_ECHO) -> list[_Job]:
        seeds = [request.params.seed, *(derived_seed(request.params.seed, index) for index in range(1, wanted.answers))]
        return [_Job(first + index, request, msgspec.structs.replace(request.params, seed=seed), echo) for index, seed in enumerate(seeds)]

    async def _answer(self, http: web.Request, plan: _Plan, stream: bool) -> web.StreamResponse:
        transcripts = [self._desk.transcript(job.request, plan.wanted.stop, job.params, plan.marks) for job in plan.jobs]
        return await (self._stream(http, plan, transcripts) if stream else self._whole(plan, transcripts))

    async def _whole(self, plan: _Plan, transcripts: list[Transcript]) -> web.Response:
        jobs, wanted = plan.jobs, plan.wanted
        keep = wanted.logprobs or wanted.origins
        collectors = [
            Collector(transcript, self._desk.pace(job.request), job.params, keep, wanted.origins)
            for job, transcript in zip(jobs, transcripts)
        ]
        with self._desk.submitted((job.request, one, job.params) for job, one in zip(jobs, collectors)) as running:
            await asyncio.gather(*(collector.done for collector in collectors))
        timings = [self._desk.record(sequence, wanted.native, transcript) for sequence, transcript in zip(running, transcripts)]
        slowest = max(timings, key=lambda timing: timing.total)
        generated = sum(transcript.generated for transcript in transcripts)
        headers = {
            **self._headers(plan.characters),
            **slowest.headers(generated),
            "x-prompt-tokens": str(plan.prompt_tokens),
            "x-generated-tokens": str(generated),
        }
        return _json(plan.whole(collectors), headers)

    async def _stream(self, http: web.Request, plan: _Plan, transcripts: list[Transcript]) -> web.StreamResponse:
        jobs, ending = plan.jobs, plan.ending
        channel = Channel(ending, self._outbox, sequences=len(jobs), chunked=chunked(http))
        ending.transcripts += transcripts
        streams = [
            EventStream(transcript, self._desk.pace(job.request), plan.voice(job), channel) for job, transcript in zip(jobs, transcripts)
        ]
        asked = ((job.request, one, job.params) for job, one in zip(jobs, streams))
        with self._desk.submitted(asked) as running, contextlib.closing(channel):
            response = await speak(http, channel, self._headers(plan.characters))
        if channel.failure:
            self._desk.failed(channel.failure)
        else:
            for sequence, transcript in zip(running, transcripts):
                self._desk.record(sequence, plan.wanted.native, transcript)
        return response

    def _prompts(self, body: CompletionRequest) -> list[str | list[int]]:
        """A text, several, the ids of one, or of several. Raises ApiError (422), as TGI before a permit is taken."""
        if body.suffix is not None:
            message = "Suffix is not supported and can be achieved by preprocessing the prompt."
            raise ApiError(422, message, "suffix not supported", label="validation")
        if body.stream and (body.best_of or 1) > (body.n or 1):
            raise invalid("`best_of` > `n` is not supported when streaming tokens")
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not given:
            raise malformed(422, "Empty array detected. Do not use an empty array for the prompt.")
        if all(isinstance(one, int) for one in given):
            return [[one for one in given if isinstance(one, int)]]
        if any(isinstance(one, int) for one in given):
            raise invalid("`prompt` must not mix texts and token ids")
        found = [one for one in given if not isinstance(one, int)]
        most = self._config.limits.max_client_batch_size
        if len(found) > most:
            message = f"Number of prompts exceeds the maximum allowed batch size of {most}"
            raise ApiError(422, message, "batch size exceeded", label="validation")
        if not all(found):
            raise invalid("`inputs` cannot be empty")
        return found

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


async def _ended(response: web.StreamResponse) -> web.StreamResponse:
    """Waiting for the client to read the rest of a stream takes nobody's place and no longer counts."""
    if response.prepared:
        await response.write_eof()
    return response


def _told(made: list[Collector], wanted: Asked) -> list[int]:
    """Places of the answers that are told: of those to each prompt the best come first, where there are more than are told."""
    found: list[int] = []
    for first in range(0, len(made), wanted.answers):
        places = range(first, first + wanted.answers)
        if wanted.told < wanted.answers:
            found += sorted(places, key=lambda place: -made[place].mean_logprob)[: wanted.told]
        else:
            found += places
    return found


def _alone(body: CompletionRequest) -> bool:
    """Nothing is to be generated: the prompt is to be scored."""
    return bool(body.echo) and body.max_tokens == 0


def _json(value: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json", headers=headers)
