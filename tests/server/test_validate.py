"""Validation: every message of TGI's, in TGI's order, and what a checked request asks of the worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.config import Limits as Caps
from forerun.router.service import Limits
from forerun.server.errors import ApiError
from forerun.server.schema import GenerateParameters, GenerateRequest, Grammar
from forerun.server.validate import U64_MAX, Question, Validator, check_route, derived_seed, fit, parameters_of, samples

LIMITS = Limits(
    max_input_tokens=3000, max_total_tokens=4096, max_batch_total_tokens=8192, max_batch_prefill_tokens=4096, max_concurrent_requests=8
)
CAPS = Caps(max_prompt_logprobs=100)
VOCAB = 1000


class Words:
    """One token a character."""

    eos_ids = (2,)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]


async def validated(inputs: str = "hello", *, stream: bool = False, limits: Limits = LIMITS, **parameters: Any) -> Any:
    p = GenerateParameters(**parameters)
    check_route(p, CAPS, stream=stream)
    return await Validator(CAPS, limits, Words(), VOCAB).request(Question(GenerateRequest(inputs, p), "r", 10.0, stream))


STEPS: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"temperature": -0.1}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 0.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"seed": 1, "best_of": 2, "do_sample": True}, "`seed` must not be set when `best_of` > 1"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"inputs": ""}, "`inputs` cannot be empty"),
    ({"truncate": 3001}, "`truncate` must be strictly positive and less than 3000. Given: 3001"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 3000. Given: 0"),
    ({"deadline_ms": 0}, "`deadline_ms` must be strictly positive"),
    ({"priority": 101}, "`priority` must be >= -100 and <= 100. Given: 101"),
    ({"priority": -101}, "`priority` must be >= -100 and <= 100. Given: -101"),
    ({"inputs": "ÿ" + chr(VOCAB)}, f"tokenizer error token {VOCAB} is not in the model's vocabulary of {VOCAB}"),
    (
        {"inputs": "x" * 3500, "max_new_tokens": 5000},
        "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 3500 `inputs` tokens and 1024 `max_new_tokens`",
    ),
    ({"inputs": "x" * 4097}, "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4097 `inputs` tokens and 0 `max_new_tokens`"),
    ({"inputs": "x" * 3001}, "`inputs` must have less than 3000 tokens. Given: 3001"),
    ({"inputs": "x" * 101, "decoder_input_details": True}, "`decoder_input_details` supports up to 100 `inputs` tokens. Given: 101"),
    ({"grammar": Grammar("regex", "a")}, "grammar is not supported"),
]


@pytest.mark.parametrize(("wrong", "message"), STEPS)
async def test_messages(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        await validated(**wrong)
    assert (caught.value.status, caught.value.kind) == (422, "validation")
    assert caught.value.message == f"Input validation error: {message}"


@given(st.data())
async def test_the_first_wrong_thing_is_named(data: st.DataObject) -> None:
    """Two faults at once: the earlier in the table wins, where both can be there at once."""
    first, second = sorted(data.draw(st.lists(st.integers(0, len(STEPS) - 1), min_size=2, max_size=2, unique=True)))
    (earlier, message), (later, _) = STEPS[first], STEPS[second]
    if earlier.keys() & later.keys() or "best_of" in later:
        return
    if "you must use sampling" in message and later.keys() & {"top_k", "top_p", "typical_p", "temperature"}:
        return
    if "4096" in message and later.keys() & {"max_new_tokens", "truncate"}:
        return
    with pytest.raises(ApiError) as caught:
        await validated(**{**later, **earlier})
    assert caught.value.message == f"Input validation error: {message}"


@pytest.mark.parametrize(
    "edge",
    [
        {"inputs": "x" * 3000},
        {"inputs": "x" * 3000, "max_new_tokens": 1096},
        {"inputs": "x" * 3000, "max_new_tokens": 100_000},
        {"truncate": 3000},
        {"temperature": 0.0},
        {"frequency_penalty": -2.0},
        {"top_n_tokens": 0},
        {"stop": ["a"] * 4},
        {"best_of": 2, "top_k": 5},
        {"seed": U64_MAX},
        {"priority": 100},
        {"priority": -100},
    ],
)
async def test_what_is_just_allowed(edge: dict[str, Any]) -> None:
    if len(edge.get("inputs", "")) == 3000 and edge.get("max_new_tokens") == 100_000:
        edge = {**edge, "inputs": "x" * 2900}
    await validated(**edge)


async def test_seed_beyond_64_bits() -> None:
    with pytest.raises(ApiError) as caught:
        await validated(seed=U64_MAX + 1)
    assert caught.value.status == 422


@given(inputs=st.integers(1, 3000), asked=st.none() | st.integers(1, 2**32 - 1))
def test_limits_are_exact_and_never_pass_the_context(inputs: int, asked: int | None) -> None:
    try:
        granted = fit(inputs, GenerateParameters(max_new_tokens=asked), CAPS, LIMITS)
    except ApiError:
        assert asked is not None and inputs + min(asked, 1024) > LIMITS.max_total_tokens
        return
    assert granted == min(LIMITS.max_total_tokens - inputs, asked or LIMITS.max_total_tokens)


@pytest.mark.parametrize(
    ("given", "sampled"),
    [
        ({}, False),
        ({"do_sample": True}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.5}, True),
        ({"temperature": 0.0}, False),
        ({"temperature": 0.0, "do_sample": True, "top_p": 0.5}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.9}, True),
        ({"typical_p": 0.9}, True),
        ({"repetition_penalty": 1.2, "frequency_penalty": 0.1, "watermark": True, "seed": 1}, False),
    ],
)
def test_when_it_samples(given: dict[str, Any], sampled: bool) -> None:
    assert samples(GenerateParameters(**given)) is sampled


def test_absent_parameters() -> None:
    assert samples(parameters_of(GenerateRequest("x")))
    assert not samples(parameters_of(GenerateRequest("x", GenerateParameters())))


async def test_what_the_worker_is_asked() -> None:
    request = await validated(
        "hello", truncate=3, temperature=0.5, top_k=7, top_p=0.25, typical_p=0.75, repetition_penalty=1.5, frequency_penalty=0.5,
        watermark=True, seed=9, max_new_tokens=4, deadline_ms=1500, speculate=2, priority=-7, details=True, top_n_tokens=2,
    )  # fmt: skip
    p = request.params
    assert request.tokens == [ord(char) for char in "llo"]
    assert (p.prompt_tokens, p.max_new_tokens, p.stop_ids, p.seed, p.sample) == (3, 4, (2,), 9, True)
    assert (p.temperature, p.top_k, p.top_p, p.typical_p) == (0.5, 7, 0.25, 0.75)
    assert (p.repetition_penalty, p.frequency_penalty, p.watermark) == (1.5, 0.5, True)
    assert (p.logprobs, p.top_n, p.prompt_logprobs) == (True, 2, False)
    assert (request.deadline, request.speculate, request.priority, request.cache) == (11.5, 2, -7, True)


async def test_logprobs_are_computed_only_for_a_reader() -> None:
    assert not (await validated()).params.logprobs
    assert (await validated(details=True)).params.logprobs
    assert (await validated(decoder_input_details=True)).params.logprobs
    assert (await validated(stream=True)).params.logprobs
    assert (await validated(best_of=2, do_sample=True)).params.logprobs
    assert (await validated(top_n_tokens=2)).params.top_n == 0


@given(st.floats(min_value=0, max_value=1e308, exclude_min=True))
async def test_no_factor_overflows_single_precision(value: float) -> None:
    p = (await validated(temperature=value, repetition_penalty=value)).params
    for factor in (p.temperature, p.repetition_penalty):
        assert 1e-30 < abs(1e5 / factor) < 1e38 and abs(1e5 * factor) < 1e38


@given(st.integers(0, U64_MAX))
def test_derived_seeds_differ(seed: int) -> None:
    derived = [derived_seed(seed, index) for index in range(16)]
    assert len(set(derived)) == 16
    assert derived[0] == seed
    assert all(0 <= one <= U64_MAX for one in derived)


async def test_server_that_allows_one() -> None:
    with pytest.raises(ApiError, match="is not allowed for this endpoint"):
        check_route(GenerateParameters(best_of=2), dataclasses.replace(CAPS, max_best_of=1), stream=False)
