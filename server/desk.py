"""The desk between routes and router: takes requests in, and accounts for them when they are done.

Routes decide what to ask and how to answer; the desk knows permits, validation, sequences, the request log and the request metrics.
Every route that generates goes through it, so that all of them refuse, count and log alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator

import structlog

from forerun.config import Config
from forerun.messages import NO_GRAMMARS, SamplingParams
from forerun.router.request import Request, Sequence, TokenStream
from forerun.router.scheduler import DEADLINE
from forerun.router.service import Limits, Permit, Refused, Router
from forerun.server import errors
from forerun.server.errors import ApiError
from forerun.server.grammar import Constraint
from forerun.server.metrics import RequestMetrics
from forerun.server.pace import Pace
from forerun.server.schema import GenerateParameters
from forerun.server.services import Services
from forerun.server.stops import StopMatcher
from forerun.server.telemetry import Ended
from forerun.server.template import ChatTemplates
from forerun.server.text import Tokenizer
from forerun.server.timing import Timing
from forerun.server.tokens import TokenLists
from forerun.server.transcript import Transcript
from forerun.server.validate import Question, Validator

_log = structlog.get_logger("forerun.server")
_DEFAULTS = GenerateParameters()
LOGGED_CHARS = 200
"""of the value of one parameter"""


class Desk:
    def __init__(self, config: Config, router: Router, services: Services) -> None:
        self._config = config
        self._router = router
        self._services = services
        self.lists = TokenLists(config.serving.validation_workers)

    @property
    def metrics(self) -> RequestMetrics:
        return self._services.metrics.requests

    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ApiError (429) while it is loading."""
        tokenizer = self._services.tokenizer
        if tokenizer is None:
            raise errors.refused(Refused("Model is loading"))
        return tokenizer

    def templates(self) -> ChatTemplates:
        """The model's chat templates. Raises ApiError (429) while they are loading."""
        return self.tokenizer().templates

    def vocab(self) -> int:
        """Token ids the model has. Raises ApiError (429) while it is loading."""
        ready = self._router.ready
        if ready is None:
            raise errors.refused(Refused("Model is loading"))
        return ready.vocab

    def limits(self) -> Limits:
        limits = self._router.limits
        if limits is None:
            raise errors.refused(Refused("Model is loading"))
        return limits

    def allow(self, answers: int) -> None:
        """Before so many are begun: whether there are ever so many. Raises ApiError (422; 429 while nothing can be generated)."""
        self.tokenizer()
        most = (self._router.limits or self._config.limits).max_concurrent_requests
        if answers > most:
            raise errors.invalid(f"{answers} answers were asked for, this server makes {most} at a time")

    def enter(self, permits: int) -> Permit:
        """Permits for this many sequences. Raises ApiError: 429 when there are none now, and while nothing can be generated; 422 when there
        are never so many, which a client must not try again."""
        self.allow(permits)
        try:
            return self._router.enter(permits)
        except Refused as refusal:
            raise errors.refused(refusal) from refusal

    @contextlib.asynccontextmanager
    async def by_deadline(self, arrived: float, deadline_ms: int | None) -> AsyncIterator[None]:
        """For what happens before there is a sequence, which has its deadline of the router. `arrived`: monotonic seconds. Raises ApiError
        (504)."""
        try:
            async with asyncio.timeout(max(0.0, arrived + deadline_ms / 1000 - time.monotonic()) if deadline_ms else None):
                yield
        except TimeoutError:
            raise errors.failed(DEADLINE) from None

    async def validate(self, asked: Question) -> Request:
        """With a permit in hand: a request that can be served to its end. Raises ApiError (422)."""
        limits, ready = self._router.limits, self._router.ready
        assert limits is not None and ready is not None, "a permit means that the worker is ready"
        self.metrics.size(limits)
        read = None if self._config.limits.disable_grammar_support else self._read
        validator = Validator(self._config.limits, limits, self.tokenizer(), ready.vocab, read)
        request = await validator.request(asked)
        self.metrics.admitted(len(request.tokens), request.params.max_new_tokens)
        return request

    async def _read(self, constraint: Constraint) -> str:
        ready = self._router.ready
        if ready is not None and (why := ready.facts.get(NO_GRAMMARS)):
            raise errors.invalid(f"grammar is not supported: {why}")
        return await self._services.grammars.read(constraint)

    def transcript(self, request: Request, stop: list[str], params: SamplingParams, marks: frozenset[str] | None = None) -> Transcript:
        """`marks`: see `Transcript`; given, stop strings are left out of the text."""
        tokenizer = self.tokenizer()
        stops = StopMatcher(stop, keep=marks is None) if stop else None
        return Transcript(tokenizer, tokenizer.detokenizer(request.tokens), stops, params, marks, frozenset(stop))

    def pace(self, request: Request) -> Pace:
        return Pace(self.metrics, request.arrived)

    @contextlib.contextmanager
    def submitted(self, asked: Iterable[tuple[Request, TokenStream, SamplingParams]]) -> Iterator[list[Sequence]]:
        """The sequences of a response; however this ends, none of them runs on. Raises ApiError (429)."""
        running: list[Sequence] = []
        try:
            for request, stream, params in asked:
                running.append(self._router.submit(request, stream, params))
            yield running
        except Refused as refusal:
            raise errors.refused(refusal) from refusal
        finally:
            for sequence in running:
                self._router.cancel(sequence)

    def record(self, sequence: Sequence, parameters: GenerateParameters, transcript: Transcript) -> Timing:
        """A sequence was answered in full: count it and log it, as TGI does."""
        request, generated, now = sequence.request, transcript.generated, time.monotonic()
        timing = Timing.between(request.arrived, sequence.queued_at, sequence.started_at, now)
        self.metrics.succeeded(timing, generated)
        given, facts, finish = _given(parameters), timing.facts(generated), transcript.finish or ""
        seed = sequence.params.seed if sequence.params.sample else None
        counts = {"input_tokens": len(request.tokens), "generated_tokens": generated}
        _log.info("Success", request_id=request.id, parameters=given, **facts, seed=seed, **counts, finish_reason=finish)
        told = {"parameters": repr(given), **facts, "seed": repr(seed)}
        spent = transcript.drafted, transcript.accepted, transcript.steps
        self._services.tracing.answered(Ended(sequence, now, generated, finish, *spent, told))
        return timing

    def failed(self, error: ApiError) -> None:
        """A stream broke off after its status was sent."""
        self.metrics.failed(error.label)
        self._services.tracing.failed(error.kind, error.message)

    def compute_type(self) -> str:
        """Value of the `x-compute-type` header: the operator's word, else the device."""
        ready = self._router.ready
        return self._config.serving.compute_type or (ready.device if ready else "unknown")


def _given(parameters: GenerateParameters) -> dict[str, object]:
    """The parameters that differ from their defaults; of long ones the beginning, since anybody can send megabytes of stop strings."""
    values = {name: getattr(parameters, name) for name in parameters.__struct_fields__}
    return {name: _short(value) for name, value in values.items() if value != getattr(_DEFAULTS, name)}


def _short(value: object) -> object:
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= LOGGED_CHARS else f"{text[:LOGGED_CHARS]}… ({len(text)} characters)"
