"""Logits processing against transformers' processors (the formulas that TGI took over), and the corners where they leave a choice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from forerun.engine import processing
from forerun.engine.rows import Counts
from forerun.messages import SamplingParams

SHAPES = st.sampled_from([1, 2, 3, 17, 500, 5000])
SPREAD = st.sampled_from([0.01, 0.5, 3.0, 30.0])


def draw_scores(seed: int, size: int, spread: float, ties: bool = False) -> processing.Scores:
    scores = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread).numpy()
    return np.round(scores) if ties else scores


def params(**changes: object) -> SamplingParams:
    return SamplingParams(0, 1, 100, **changes)  # type: ignore[arg-type]


def kept_by(warper: object, scores: processing.Scores) -> list[int]:
    result = warper(None, torch.from_numpy(scores)[None].double())  # type: ignore[operator]
    return torch.isfinite(result[0]).nonzero().flatten().tolist()


@given(st.integers(0, 2**31), SHAPES, SPREAD, st.integers(1, 600), st.booleans())
def test_top_k(seed: int, size: int, spread: float, k: int, ties: bool) -> None:
    scores = draw_scores(seed, size, spread, ties)
    assert processing.keep_top_k(scores, min(k, size)).tolist() == kept_by(TopKLogitsWarper(k), scores)


@given(st.integers(0, 2**31), SHAPES, SPREAD, st.floats(0.01, 0.99))
def test_top_p(seed: int, size: int, spread: float, p: float) -> None:
    scores = draw_scores(seed, size, spread)
    ours, theirs = set(processing.keep_top_p(scores, p).tolist()), set(kept_by(TopPLogitsWarper(p), scores))
    assert ours <= theirs or theirs <= ours
    odd = ours ^ theirs
    assert len(odd) <= 1, "sums in another order may differ in the last bit, at the border"


@given(st.integers(0, 2**31), st.sampled_from([2, 17, 400]), st.floats(0.05, 0.95))
def test_top_p_is_the_smallest_set_and_ties_go_to_the_lower_id(seed: int, size: int, p: float) -> None:
    scores = draw_scores(seed, size, 1.0, ties=True)
    ids = processing.keep_top_p(scores, p)
    share = torch.from_numpy(scores).double().softmax(0).numpy()
    assert share[ids].sum() >= p - 1e-6
    least = scores[ids].min()
    last = ids[scores[ids] == least].max()
    assert share[ids].sum() - share[last] < p + 1e-6
    for i in range(size):
        inside = i in ids
        assert inside == bool(scores[i] > least or (scores[i] == least and i <= last))


@given(st.integers(0, 2**31), SHAPES, st.sampled_from([0.5, 3.0, 8.0]), st.floats(0.05, 0.95))
def test_typical(seed: int, size: int, spread: float, mass: float) -> None:
    scores = draw_scores(seed, size, spread)
    ours, theirs = set(processing.keep_typical(scores, mass).tolist()), set(kept_by(TypicalLogitsWarper(mass), scores))
    assert len(ours ^ theirs) <= 1 + size // 1000


def test_impossible_tokens_never_come_back() -> None:
    scores = np.array([0.0, -np.inf, 1.0, -np.inf, -np.inf, 0.5], np.float32)
    every = [
        processing.keep_top_k(scores, 6),
        processing.keep_top_p(scores, 0.9999999),
        processing.keep_typical(scores, 0.9999999),
    ]
    for ids in every:
        assert ids.tolist() == [0, 2, 5]
    assert [i for i, _ in processing.most_likely(scores, None, 0.0, 6)] == [2, 5, 0]


def test_one_is_always_left() -> None:
    scores = np.array([3.0, 3.0, -80.0], np.float32)
    assert processing.keep_top_p(scores, 1e-9).tolist() == [0]
    assert processing.keep_typical(scores, 1e-9).tolist() == [0, 1]
    assert processing.keep_top_k(scores, 1).tolist() == [0, 1]


@settings(max_examples=30)
@given(st.integers(0, 2**31), SPREAD, st.floats(0.2, 3.0), st.lists(st.integers(0, 49), min_size=1, max_size=60))
def test_repetition_penalty(seed: int, spread: float, penalty: float, tokens: list[int]) -> None:
    scores = draw_scores(seed, 50, spread)
    expected = RepetitionPenaltyLogitsProcessor(float(np.float32(penalty)))(torch.tensor([tokens]), torch.from_numpy(scores.copy())[None])[
        0
    ]
    counts = Counts(tokens)
    processing.penalize(scores, counts.ids, counts.counts, counts.length, params(repetition_penalty=penalty))
    assert torch.allclose(torch.from_numpy(scores), expected, rtol=1e-6)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.floats(-2, 2).filter(lambda f: f != 0))
def test_frequency_penalty_is_relative_to_the_length(tokens: list[int], penalty: float) -> None:
    scores = draw_scores(3, 10, 2.0)
    expected = [float(scores[t]) - penalty * tokens.count(t) / len(tokens) for t in range(10)]
    counts = Counts(tokens)
    processing.penalize(scores, counts.ids, counts.counts, counts.length, params(frequency_penalty=penalty))
    assert np.allclose(scores, expected, atol=1e-5)


def test_repetition_comes_before_frequency() -> None:
    scores = np.array([2.0, -2.0, 1.0], np.float32)
    counts = Counts([0, 1, 1, 1])
    processing.penalize(scores, counts.ids, counts.counts, counts.length, params(repetition_penalty=2.0, frequency_penalty=0.4))
    assert np.allclose(scores, [1.0 - 0.1, -4.0 - 0.3, 1.0])


def test_watermark_is_tgis_green_list() -> None:
    mark = processing.Watermark(100, 0.25, 2.0)
    for previous in [3, 99, 3, *range(80), 3]:
        generator = torch.Generator().manual_seed(15485863 * previous)
        green = torch.randperm(100, generator=generator)[:25].tolist()
        scores = np.zeros(100, np.float32)
        mark.apply(scores, previous)
        assert sorted(np.flatnonzero(scores == 2.0).tolist()) == sorted(green)
        assert np.count_nonzero(scores) == 25


def test_steps_narrow_one_after_the_other() -> None:
    scores = draw_scores(5, 1000, 3.0)
    ids = processing.narrow(scores, params(top_k=50, top_p=0.9, typical_p=0.5))
    first = processing.keep_top_k(scores, 50)
    second = first[processing.keep_top_p(scores[first], 0.9)]
    third = second[processing.keep_typical(scores[second], 0.5)]
    assert ids.tolist() == third.tolist() == sorted(ids.tolist())
    assert 0 < len(third) < len(second) < len(first) == 50
    assert len(processing.narrow(scores, params())) == 1000


def test_ties_at_the_last_place_of_the_alternatives_are_all_reported() -> None:
    scores = np.array([1.0, 5.0, 3.0, 3.0, 3.0, 0.0], np.float32)
    normalizer = processing.log_normalizer(scores)
    top = processing.most_likely(scores, None, normalizer, 2)
    assert [i for i, _ in top] == [1, 2, 3, 4]
    assert processing.most_likely(scores[[1, 3]], np.array([1, 3]), 0.0, 5) == [(1, 5.0), (3, 3.0)]


@given(st.integers(0, 2**31), SHAPES, SPREAD)
def test_log_normalizer(seed: int, size: int, spread: float) -> None:
    scores = draw_scores(seed, size, spread)
    assert processing.log_normalizer(scores) == pytest.approx(float(torch.from_numpy(scores).double().logsumexp(0)), abs=2e-6, rel=1e-6)


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_log_normalizer_of_what_has_none(value: float) -> None:
    """Nothing is allowed, or something is no number: it says so, and numpy has nothing to warn of."""
    scores = np.full(7, -np.inf, np.float32)
    scores[3] = value
    with np.errstate(all="raise"):
        assert not np.isfinite(processing.log_normalizer(scores))


@given(st.integers(0, 2**31), st.integers(0, 63))
def test_a_rows_place_in_memory_is_without_effect(seed: int, shift: int) -> None:
    """The same bits wherever a row lies in a batch of logits."""
    scores = draw_scores(seed, 3001, 3.0)
    moved = np.zeros(3001 + 64, np.float32)[shift : shift + 3001]
    moved[:] = scores
    assert processing.log_normalizer(moved) == processing.log_normalizer(scores)
    p = params(top_p=0.9, typical_p=0.9)
    assert processing.narrow(moved, p).tolist() == processing.narrow(scores, p).tolist()


@given(st.lists(st.integers(0, 8), max_size=12), st.floats(-2, 2), st.floats(-2, 2))
def test_openais_penalties_count_what_was_generated(said: list[int], presence: float, count: float) -> None:
    scores, counts = draw_scores(3, 9, 1.0), Counts(said)
    expected = scores.copy()
    for token in set(said):
        expected[token] -= np.float32(presence) + np.float32(said.count(token)) * np.float32(count)
    processing.discourage(scores, counts.ids, counts.counts, params(presence_penalty=presence, count_penalty=count))
    assert scores.tolist() == expected.tolist()


def test_bias_is_added_to_single_ids() -> None:
    scores = draw_scores(3, 9, 1.0)
    expected = scores.copy()
    expected[[2, 8]] += np.float32([1.5, -100.0])
    processing.bias(scores, params(logit_bias=((2, 1.5), (8, -100.0))))
    assert scores.tolist() == expected.tolist()


@given(st.lists(st.integers(0, 5), max_size=8), st.lists(st.integers(0, 5), max_size=5))
def test_counts_ahead_are_those_of_the_longer_text_and_then_those_of_before(said: list[int], path: list[int]) -> None:
    counts = Counts(said)
    before = sorted(zip(counts.ids.tolist(), counts.counts.tolist()))
    with counts.ahead(path):
        longer = Counts(said + path)
        assert sorted(zip(counts.ids.tolist(), counts.counts.tolist())) == sorted(zip(longer.ids.tolist(), longer.counts.tolist()))
    assert sorted(zip(counts.ids.tolist(), counts.counts.tolist())) == before
