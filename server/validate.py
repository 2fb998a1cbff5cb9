"""A native body becomes a Request: TGI's checks, in TGI's order, with TGI's messages.

The order is part of the contract, since a body that is wrong twice gets the first message: route checks, then (with a permit in hand)
parameters, then the tokenizer, then what needs the number of tokens. Plain functions; `Validator` strings them together and is the only
one that waits. Deliberate differences: `temperature` 0 means greedy, and `max_new_tokens` is kept exactly up to the end of the context
(TGI asks for 1024 at a time), while a request is still admitted by TGI's rule, that its first 1024 tokens fit.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Awaitable, Callable
from typing import Protocol

from forerun.messages import SamplingParams
from forerun.router.request import Request
from forerun.router.service import Limits
from forerun.server.errors import invalid, malformed
from forerun.server.grammar import Constraint, of_native
from forerun.server.schema import U64_MAX, GenerateParameters, GenerateRequest

LEG = 1024
"""TGI admits a request when this many new tokens fit, however many were asked for."""
TOO_LONG = "context_length_exceeded"
"""the code by which OpenAI's clients know that a shorter conversation may pass"""
MOST_PRIORITY = 100
SMALLEST, LARGEST = 1e-6, 1e6
"""Divisors and factors of logits are kept in here, so that float32 never overflows; beyond, nothing more would change."""
GOLDEN = 0x9E3779B97F4A7C15
"""2⁶⁴/φ, odd: steps of it visit every 64-bit seed before one repeats."""
ABSENT = GenerateParameters(do_sample=True)
"""What a body without `parameters` means."""


class Caps(Protocol):
    """The limits that flags set directly."""

    @property
    def max_best_of(self) -> int: ...
    @property
    def max_stop_sequences(self) -> int: ...
    @property
    def max_top_n_tokens(self) -> int: ...
    @property
    def max_prompt_logprobs(self) -> int: ...


class Encoder(Protocol):
    """What validation needs of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def parameters_of(body: GenerateRequest) -> GenerateParameters:
    return body.parameters if body.parameters else ABSENT


def check_route(parameters: GenerateParameters, caps: Caps, *, stream: bool) -> None:
    """What is refused before a permit is taken."""
    best_of = parameters.best_of
    if stream:
        if best_of is not None and best_of != 1:
            raise invalid("`best_of` != 1 is not supported when streaming tokens")
        if parameters.decoder_input_details:
            raise invalid("`decoder_input_details` == true is not supported when streaming tokens")
    elif best_of is not None and best_of > 1:
        if caps.max_best_of == 1:
            raise invalid("`best_of` != 1 is not allowed for this endpoint")
        if best_of > caps.max_best_of:
            raise invalid(f"`best_of` must be > 0 and <= {caps.max_best_of}. Given: {best_of}")


def check_parameters(inputs: str, p: GenerateParameters, caps: Caps, limits: Limits) -> None:
    """What can be told before tokenizing."""
    if sequences(p) > 1 and not _asks_to_sample(p):
        raise invalid("you must use sampling when `best_of` is > 1")
    _check_sampling(p)
    if p.max_new_tokens == 0:
        raise invalid("`max_new_tokens` must be strictly positive")
    if len(p.stop) > caps.max_stop_sequences:
        raise invalid(f"`stop` supports up to {caps.max_stop_sequences} stop sequences. Given: {len(p.stop)}")
    if p.seed is not None and sequences(p) > 1:
        raise invalid("`seed` must not be set when `best_of` > 1")
    if p.top_n_tokens is not None and p.top_n_tokens > caps.max_top_n_tokens:
        raise invalid(f"`top_n_tokens` must be >= 0 and <= {caps.max_top_n_tokens}. Given: {p.top_n_tokens}")
    if not inputs:
        raise invalid("`inputs` cannot be empty")
    if p.truncate is not None and not 0 < p.truncate <= limits.max_input_tokens:
        raise invalid(f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. Given: {p.truncate}")
    if p.deadline_ms == 0:
        raise invalid("`deadline_ms` must be strictly positive")
    if p.priority is not None and abs(p.priority) > MOST_PRIORITY:
        raise invalid(f"`priority` must be >= -{MOST_PRIORITY} and <= {MOST_PRIORITY}. Given: {p.priority}")


def _check_sampling(p: GenerateParameters) -> None:
    if p.temperature is not None and p.temperature < 0:
        raise invalid("`temperature` must be strictly positive")
    if p.repetition_penalty is not None and p.repetition_penalty <= 0:
        raise invalid("`repetition_penalty` must be strictly positive")
    if p.frequency_penalty is not None and not -2.0 <= p.frequency_penalty <= 2.0:
        raise invalid("`frequency_penalty` must be >= -2.0 and <= 2.0")
    if p.top_p is not None and not 0.0 < p.top_p < 1.0:
        raise invalid("`top_p` must be > 0.0 and < 1.0")
    if p.typical_p is not None and not 0.0 < p.typical_p < 1.0:
        raise invalid("`typical_p` must be > 0.0 and < 1.0")
    if p.top_k is not None and p.top_k <= 0:
        raise invalid("`top_k` must be strictly positive")


def fit(input_tokens: int, p: GenerateParameters, caps: Caps, limits: Limits) -> int:
    """How many tokens to generate at most: exactly `max_new_tokens`, or what the context has left."""
    total = limits.max_total_tokens
    left = total - input_tokens
    leg = min(p.max_new_tokens, LEG) if p.max_new_tokens is not None else max(0, min(left, LEG))
    if input_tokens + leg > total:
        raise invalid(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. Given: {input_tokens} `inputs` tokens and {leg} `max_new_tokens`",
            code=TOO_LONG,
        )
    if input_tokens > limits.max_input_tokens:
        raise invalid(f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {input_tokens}", code=TOO_LONG)
    if p.decoder_input_details and input_tokens > caps.max_prompt_logprobs:
        raise invalid(f"`decoder_input_details` supports up to {caps.max_prompt_logprobs} `inputs` tokens. Given: {input_tokens}")
    return left if p.max_new_tokens is None else min(p.max_new_tokens, left)


def sequences(p: GenerateParameters) -> int:
    """How many sequences the request needs, and so how many permits."""
    return max(1, p.best_of or 1)


def _asks_to_sample(p: GenerateParameters) -> bool:
    chosen = p.temperature, p.top_k, p.top_p, p.typical_p
    return p.temperature != 0 and (p.do_sample or any(value is not None for value in chosen))


def samples(p: GenerateParameters) -> bool:
    """TGI's rule for whether tokens are sampled, and ours that temperature 0 never is."""
    if p.temperature == 0:
        return False
    warps = p.temperature not in (None, 1.0) or p.top_k is not None or p.top_p is not None or p.typical_p is not None
    return p.do_sample or warps


def _bounded(value: float | None) -> float:
    return 1.0 if value is None else min(max(value, SMALLEST), LARGEST)


def sampling(
    p: GenerateParameters, *, prompt_tokens: int, max_new_tokens: int, stop_ids: tuple[int, ...], stream: bool, grammar: str = ""
) -> SamplingParams:
    """The sampling parameters of a checked request. Log-probabilities are asked of the worker only if somebody will read them."""
    details = stream or p.details or p.decoder_input_details
    return SamplingParams(
        seed=secrets.randbits(64) if p.seed is None else p.seed,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        sample=samples(p),
        temperature=_bounded(p.temperature or None),
        top_k=p.top_k or 0,
        top_p=1.0 if p.top_p is None else p.top_p,
        typical_p=1.0 if p.typical_p is None else p.typical_p,
        repetition_penalty=_bounded(p.repetition_penalty),
        frequency_penalty=p.frequency_penalty or 0.0,
        watermark=p.watermark,
        stop_ids=stop_ids,
        logprobs=details or sequences(p) > 1,
        top_n=p.top_n_tokens or 0 if details else 0,
        prompt_logprobs=p.decoder_input_details,
        grammar=grammar,
    )


def derived_seed(seed: int, index: int) -> int:
    """The seed of the index-th sequence of a `best_of` request."""
    return (seed + index * GOLDEN) & U64_MAX


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What a route asks for. `arrived`: monotonic seconds. `tokens`: the prompt's, if somebody knows them already; `constraint`: what the
    text must follow, where the body says it otherwise than as TGI's `grammar`."""

    body: GenerateRequest
    id: str
    arrived: float
    stream: bool
    tokens: list[int] | None = None
    constraint: Constraint | None = None


class Validator:
    """Strings the checks together. `vocab`: ids at or above it do not exist in the model, whatever the tokenizer says. `read`: makes a
    worker's grammar of a constraint; None = there are no grammars."""

    def __init__(
        self, caps: Caps, limits: Limits, tokenizer: Encoder, vocab: int, read: Callable[[Constraint], Awaitable[str]] | None = None
    ) -> None:
        self._caps = caps
        self._limits = limits
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._read = read

    async def request(self, asked: Question) -> Request:
        """A request that can be served to its end. Raises ApiError (422)."""
        body, p = asked.body, parameters_of(asked.body)
        if p.seed is not None and p.seed > U64_MAX:
            raise malformed(422, "Failed to deserialize the JSON body into the target type: parameters.seed: number out of range")
        check_parameters(body.inputs, p, self._caps, self._limits)
        tokens = await self._tokens(body.inputs, p.truncate) if asked.tokens is None else self._checked(asked.tokens)
        max_new_tokens = fit(len(tokens), p, self._caps, self._limits)
        grammar = await self._grammar(of_native(p.grammar) if p.grammar else asked.constraint)
        stop_ids = self._tokenizer.eos_ids
        params = sampling(
            p, prompt_tokens=len(tokens), max_new_tokens=max_new_tokens, stop_ids=stop_ids, stream=asked.stream, grammar=grammar
        )
        return Request(
            id=asked.id,
            tokens=tokens,
            params=params,
            arrived=asked.arrived,
            deadline=None if p.deadline_ms is None else asked.arrived + p.deadline_ms / 1000,
            priority=p.priority or 0,
            cache=not params.prompt_logprobs,
            speculate=p.speculate,
        )

    async def _grammar(self, constraint: Constraint | None) -> str:
        if constraint is None:
            return ""
        if self._read is None:
            raise invalid("grammar is not supported")
        return await self._read(constraint)

    async def _tokens(self, inputs: str, truncate: int | None) -> list[int]:
        try:
            tokens = await self._tokenizer.encode(inputs)
        except ValueError as error:
            raise invalid(f"tokenizer error {error}") from error
        return self._checked(tokens if truncate is None else tokens[-truncate:])

    def _checked(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise invalid("`inputs` cannot be empty")
        for extreme in (min(tokens), max(tokens)):
            if not 0 <= extreme < self._vocab:
                raise invalid(f"tokenizer error token {extreme} is not in the model's vocabulary of {self._vocab}")
        return tokens
