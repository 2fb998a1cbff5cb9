"""The parameters of a `/v1` body: checked, and turned into those of the native routes and what OpenAI has besides.

Where TGI read them otherwise, OpenAI's meaning counts (docs/tgi-differences.md): penalties are subtracted by what was generated, `top_p: 1`
and a single stop are allowed, log-probabilities are the model's own. Messages are TGI's where it has any.
"""

from __future__ import annotations

import dataclasses

import msgspec

from forerun.messages import SamplingParams
from forerun.server.errors import invalid
from forerun.server.openai_schema import ChatRequest, CompletionRequest
from forerun.server.schema import U64_MAX, GenerateParameters

MOST_ANSWERS = 128
MOST_BIASED = 1024
DIGITS = 20
"""of a token id; Python refuses to read numbers of thousands"""
SMALLEST_TOP_P = 1e-6
"""top_p 0 keeps the most likely token alone"""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """`native`: what `/generate` would be told. `answers`: how many are made for each prompt, of which so many are `told`, those of the
    highest mean log-probability. `top`: alternatives to report, with `logprobs`."""

    native: GenerateParameters
    answers: int
    told: int
    stop: list[str]
    logprobs: bool
    top: int
    presence_penalty: float
    count_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    usage: bool
    counting: bool
    """every chunk of a stream has the usage so far"""
    origins: bool

    def complete(self, params: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(
            params,
            presence_penalty=self.presence_penalty,
            count_penalty=self.count_penalty,
            logit_bias=self.logit_bias,
            raw_logprobs=True,
            logprobs=self.logprobs or self.told < self.answers,
            top_n=self.top if self.logprobs else 0,
        )


def asked(
    body: ChatRequest | CompletionRequest,
    *,
    max_tokens: int | None,
    logprobs: bool,
    top: int,
    most_top: int,
    vocab: int,
    best_of: int | None = None,
    prompt_logprobs: bool = False,
) -> Asked:
    """Raises ApiError (422)."""
    options = body.stream_options
    told = 1 if body.n is None else body.n
    answers = max(told, best_of or 1)
    _check(body, told, top, most_top)
    greedy = body.temperature == 0
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
    native = GenerateParameters(
        do_sample=not greedy,
        temperature=body.temperature,
        top_p=None if greedy or body.top_p in (None, 1.0) else max(body.top_p or 0.0, SMALLEST_TOP_P),
        top_k=None if greedy or not body.top_k or body.top_k < 0 else body.top_k,
        typical_p=None if greedy else body.typical_p,
        repetition_penalty=body.repetition_penalty,
        max_new_tokens=max_tokens,
        decoder_input_details=prompt_logprobs,
        seed=None if body.seed is None else body.seed & U64_MAX,
        stop=[text for text in stop if text],
        speculate=body.speculate,
        priority=body.priority,
        deadline_ms=body.deadline_ms,
    )
    return Asked(
        native=native,
        answers=answers,
        told=told,
        stop=native.stop,
        logprobs=logprobs,
        top=top,
        presence_penalty=body.presence_penalty or 0.0,
        count_penalty=body.frequency_penalty or 0.0,
        logit_bias=_biases(body.logit_bias, vocab),
        usage=bool(options and options.include_usage),
        counting=bool(options and options.include_usage and options.continuous_usage_stats),
        origins=body.origins,
    )


def _check(body: ChatRequest | CompletionRequest, answers: int, top: int, most_top: int) -> None:
    if not 1 <= answers <= MOST_ANSWERS:
        raise invalid(f"`n` must be >= 1 and <= {MOST_ANSWERS}. Given: {answers}")
    for name, value in (("frequency_penalty", body.frequency_penalty), ("presence_penalty", body.presence_penalty)):
        if value is not None and not -2.0 <= value <= 2.0:
            raise invalid(f"`{name}` must be >= -2.0 and <= 2.0")
    if body.top_p is not None and not 0.0 <= body.top_p <= 1.0:
        raise invalid("`top_p` must be >= 0.0 and <= 1.0")
    if top > most_top:
        raise invalid(f"`top_logprobs` must be >= 0 and <= {most_top}. Given: {top}")
    if body.temperature is not None and body.temperature < 0:
        raise invalid("`temperature` must be >= 0.0")


def _biases(given: dict[str, float] | list[float] | None, vocab: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's object of token ids. TGI's type for it is a list, which it never read: an empty one passes."""
    if not given:
        return ()
    if isinstance(given, list):
        raise invalid("`logit_bias` must be an object of token ids and numbers")
    if len(given) > MOST_BIASED:
        raise invalid(f"`logit_bias` supports up to {MOST_BIASED} tokens. Given: {len(given)}")
    found: dict[int, float] = {}
    for name, value in given.items():
        if not name.isascii() or not name.isdigit() or len(name) > DIGITS or int(name) >= vocab:
            raise invalid(f"`logit_bias` names {name[:20]!r}, which is no token id below {vocab}")
        if not -100.0 <= value <= 100.0:
            raise invalid(f"`logit_bias` must be >= -100 and <= 100. Given: {value}")
        found[int(name)] = value
    return tuple(found.items())
