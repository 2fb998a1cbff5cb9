"""Limits follow TGI's rules from the flags and from what the worker offers."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.config import Batching, Config, Limits
from forerun.messages import Ready
from forerun.router.limits import LimitError, policy, resolve
from forerun.router.sizes import Sizes

READY = Ready(
    rows=8,
    pages=100,
    page_tokens=16,
    max_nodes=0,
    vocab=10,
    device="d",
    dtype="t",
    drafter="n",
    max_tokens=1000,
    max_step_tokens=512,
)


def config(**values: int) -> Config:
    names = {field.name for field in dataclasses.fields(Limits)}
    limits = {name: value for name, value in values.items() if name in names}
    batching = {name: value for name, value in values.items() if name not in names}
    return Config(limits=Limits(**limits), batching=Batching(**batching))


def test_without_flags_model_and_memory_decide() -> None:
    limits = resolve(config(), READY)
    assert (limits.max_total_tokens, limits.max_input_tokens) == (1000, 999)
    assert (limits.max_batch_total_tokens, limits.max_batch_prefill_tokens) == (1600, 512)
    small = resolve(config(), msgspec.structs.replace(READY, pages=10))
    assert (small.max_total_tokens, small.max_input_tokens, small.max_batch_total_tokens) == (160, 159, 160)


def test_flags_lower_what_is_offered_but_never_raise_it() -> None:
    limits = resolve(config(max_total_tokens=200, max_input_tokens=50, max_batch_total_tokens=800, max_batch_prefill_tokens=64), READY)
    assert (limits.max_total_tokens, limits.max_input_tokens) == (200, 50)
    assert (limits.max_batch_total_tokens, limits.max_batch_prefill_tokens) == (800, 64)
    limits = resolve(config(max_total_tokens=1200, max_batch_total_tokens=9000, max_batch_prefill_tokens=9000), READY)
    assert (limits.max_total_tokens, limits.max_batch_total_tokens, limits.max_batch_prefill_tokens) == (1000, 1600, 512)


@pytest.mark.parametrize(
    ("flags", "ready", "message"),
    [
        ({"max_total_tokens": 900}, {"pages": 20}, "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 900 and 320"),
        ({"max_input_tokens": 1000}, {}, "`max_input_tokens` must be < `max_total_tokens`. Given: 1000 and 1000"),
        ({}, {"pages": 0}, "there is room for 0 tokens"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_the_words_of_tgi(flags: dict[str, int], ready: dict[str, int], message: str) -> None:
    with pytest.raises(LimitError, match=r"^Argument validation error: ") as refused:
        resolve(config(**flags), msgspec.structs.replace(READY, **ready))
    assert message in str(refused.value)


@given(st.integers(1, 300), st.integers(1, 64), st.integers(2, 5000), st.none() | st.integers(1, 5000), st.none() | st.integers(2, 5000))
def test_what_is_promised_the_scheduler_can_keep(pages: int, page: int, longest: int, pool: int | None, total: int | None) -> None:
    ready = msgspec.structs.replace(READY, pages=pages, page_tokens=page, max_tokens=longest)
    values = {name: value for name, value in (("max_batch_total_tokens", pool), ("max_total_tokens", total)) if value is not None}
    asked = config(**values)
    try:
        limits = resolve(asked, ready)
    except LimitError:
        return
    assert Sizes.of(ready, policy(asked, limits)).longest >= limits.max_total_tokens > limits.max_input_tokens >= 1
