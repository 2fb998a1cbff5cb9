"""Whole answers: one sequence collected to its end, and the response made of the best of them.

A `Collector` is a TokenStream: the router calls it, nothing waits on it but one future. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence

from msgspec import UNSET

from forerun.messages import SamplingParams
from forerun.router.request import Failure, Run
from forerun.server import errors
from forerun.server.pace import Pace
from forerun.server.schema import BestOfSequence, Details, FinishReason, GenerateResponse, Origin, PrefillToken, Token
from forerun.server.transcript import Transcript


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """What of an answer the client wants to see. `prefix` comes before the generated text; `prompt`: also the prompt's tokens;
    `origins`: how each token came about."""

    prefix: str
    details: bool
    prompt: bool
    input_length: int
    origins: bool = False


class Collector:
    """Keeps what one sequence says. `done` has no result but an ApiError if it failed."""

    def __init__(self, transcript: Transcript, pace: Pace, params: SamplingParams, keep: bool, origins: bool = False) -> None:
        self.transcript = transcript
        self.params = params
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.listed: list[Token] = []
        self.top: list[list[Token]] = []
        self.origins: list[Origin] = []
        self._pace = pace
        self._keep = keep
        self._told = origins
        self._logprobs = 0.0

    def tokens(self, run: Run) -> bool:
        said = self.transcript.extend(run)
        if not said:
            return False
        self._pace.tick(len(said), min(run.accepted, len(said)))
        if self._keep:
            self.listed += said
            self.top += map(self.transcript.alternatives, run.top[: len(said)])
            if self._told:
                self.origins += [self.transcript.origin(place, run) for place in range(len(said))]
        self._logprobs += sum(token.logprob or 0.0 for token in said)
        if self.transcript.finish and not self.done.done():
            self.done.set_result(None)
        return self.transcript.finish == "stop_sequence"

    def end(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(errors.incomplete())

    def fail(self, failure: Failure) -> None:
        if not self.done.done():
            self.done.set_exception(errors.failed(failure))

    @property
    def seed(self) -> int | None:
        return self.params.seed if self.params.sample else None

    @property
    def finish(self) -> FinishReason:
        assert self.transcript.finish is not None
        return self.transcript.finish

    @property
    def mean_logprob(self) -> float:
        mean = self._logprobs / self.transcript.generated
        return -math.inf if math.isnan(mean) else mean


def best(collectors: Sequence[Collector]) -> int:
    """Index of the answer with the highest mean log-probability; the first of equals."""
    return max(range(len(collectors)), key=lambda index: collectors[index].mean_logprob)


def response(collectors: Sequence[Collector], chosen: int, form: Form, prefill: list[PrefillToken]) -> GenerateResponse:
    """The chosen collector's answer; the others are listed in its details."""
    winner = collectors[chosen]
    text = form.prefix + winner.transcript.text()
    if not form.details:
        return GenerateResponse(text)
    others = [_loser(one, form, prefill) for index, one in enumerate(collectors) if index != chosen]
    return GenerateResponse(
        text,
        Details(
            finish_reason=winner.finish,
            generated_tokens=winner.transcript.generated,
            seed=winner.seed,
            prefill=prefill,
            tokens=winner.listed,
            best_of_sequences=others or UNSET,
            top_tokens=winner.top or UNSET,
            speculation=winner.transcript.speculation(),
            origins=winner.origins if form.origins else UNSET,
        ),
    )


def _loser(one: Collector, form: Form, prefill: list[PrefillToken]) -> BestOfSequence:
    return BestOfSequence(
        generated_text=form.prefix + one.transcript.text(),
        finish_reason=one.finish,
        generated_tokens=one.transcript.generated,
        seed=one.seed,
        prefill=prefill,
        tokens=one.listed,
        top_tokens=one.top or UNSET,
    )
