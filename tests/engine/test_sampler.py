"""Choices made in the output head are those made from logits, bit for bit, alone and in company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.backends.registry import open_backend
from forerun.engine.models.model import Output
from forerun.engine.rows import Row
from forerun.engine.sampler import NOTHING_ALLOWED, Ask, Choice, Sampler
from forerun.messages import SamplingParams
from tests.engine.tiny import TinyHead

BACKEND = open_backend("cpu", 2)
VOCAB, HIDDEN = 600, 48
HEAD = TinyHead(BACKEND.ops, BACKEND.pack(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)), "bf16"))
SIMPLE = [{}, {"sample": True, "temperature": 0.7}, {"sample": True, "temperature": 1.0}, {"sample": True, "temperature": 1.9, "seed": 11}]
OTHER = [
    *({"sample": True, "top_k": 3}, {"top_n": 2}, {"repetition_penalty": 1.3}, {"watermark": True}, {"sample": True, "top_p": 0.5}),
    *({"sample": True, "typical_p": 0.5}, {"presence_penalty": 0.5}, {"logit_bias": [(3, 4.0)]}),
    {"sample": True, "temperature": 0.5, "raw_logprobs": True, "logprobs": True},
]


def states(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def sampler() -> Sampler:
    return Sampler(BACKEND.ops, VOCAB, 0.5, 2.0)


def ask(at: int, kind: dict[str, object]) -> Ask:
    params = SamplingParams(**{"seed": 5, "prompt_tokens": 3, "max_new_tokens": 99, **kind})  # type: ignore[arg-type]
    return Ask(at, Row.open(0, params, [1, 2, 3, at], 3), (at,))


def said(choices: list[Choice]) -> list[tuple[object, ...]]:
    return [(choice.token, choice.logprob, choice.top, choice.error) for choice in choices]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(SIMPLE), min_size=1, max_size=20), st.integers(0, 1 << 30), st.sampled_from([None, "nan", "inf"]))
def test_the_head_chooses_as_the_sampler_does(kinds: list[dict[str, object]], seed: int, spoilt: str | None) -> None:
    asks, hidden = [ask(at, kind) for at, kind in enumerate(kinds)], states(seed, len(kinds))
    if spoilt:
        hidden[0, 0] = float(spoilt)
    before = HEAD.chosen, HEAD.made
    together = said(sampler().decide(Output(None, None, hidden, HEAD), asks))
    assert (HEAD.chosen, HEAD.made) == (before[0] + 1, before[1])
    assert together == said(sampler().choose(HEAD.logits(hidden), asks))
    assert bool(together[0][3]) == bool(spoilt)
    for place, each in enumerate(asks):
        alone = said(sampler().decide(Output(None, None, hidden[place : place + 1], HEAD), [Ask(0, each.row, each.path)]))
        assert alone == together[place : place + 1]


@pytest.mark.parametrize("kind", OTHER, ids=lambda kind: " ".join(kind))
def test_one_row_that_asks_for_more_takes_logits_and_changes_no_other(kind: dict[str, object]) -> None:
    asks, hidden = [ask(at, each) for at, each in enumerate([*SIMPLE, kind])], states(7, len(SIMPLE) + 1)
    before = HEAD.chosen
    mixed = said(sampler().decide(Output(None, None, hidden, HEAD), asks))
    assert HEAD.chosen == before
    assert mixed[:-1] == said(sampler().decide(Output(None, None, hidden[:-1], HEAD), asks[:-1]))


def test_rows_that_nobody_asks_about_are_left_alone() -> None:
    """Scored prompt rows have hidden states too."""
    hidden, last = states(3, 3), ask(2, {})
    some = said(sampler().decide(Output(None, None, hidden, HEAD), [last]))
    assert some == said(sampler().decide(Output(None, None, hidden[2:], HEAD), [Ask(0, last.row, last.path)]))


def test_logits_are_made_once_and_only_if_asked_for() -> None:
    output, before = Output(None, None, states(4, 2), HEAD), HEAD.made
    assert output.logits is output.logits
    assert HEAD.made == before + 1
    with pytest.raises(ValueError, match="hidden states and a head"):
        _ = Output(None).logits


class Nothing:
    """A matcher of a place where no token is allowed."""

    def at(self, path: object) -> np.ndarray:
        return np.zeros(VOCAB // 8, np.uint8)


@pytest.mark.parametrize("kind", [*SIMPLE, *OTHER])
def test_where_nothing_is_allowed_the_row_has_an_error_whatever_it_asks_for(kind: dict[str, object]) -> None:
    one, other = ask(0, kind), ask(1, kind)
    one.row.matching, one.row.plain, one.row.drawn = Nothing(), False, False  # type: ignore[assignment]
    scores = HEAD.logits(states(4, 2))
    choices = sampler().choose(scores, [one, other])
    assert choices[0].error == NOTHING_ALLOWED
    assert said(choices[1:]) == said(sampler().choose(scores, [other]))
    assert one.row.counts is None or one.row.counts.length == len(one.row.tokens), "the guess was taken back"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [*SIMPLE, *OTHER])
def test_scores_that_a_temperature_makes_infinite_are_an_error_and_never_a_token(kind: dict[str, object]) -> None:
    one = ask(0, {**kind, "sample": True, "temperature": 1e-45, "raw_logprobs": False})
    assert sampler().choose(HEAD.logits(states(4, 1)), [one])[0].error
