"""Logits processing of one node: TGI's steps, in TGI's order, on one row of scores.

Pure functions of a float32 row [V] and the request's parameters; each is computed by itself, so no result depends on a batch.
(Formulas: text-generation-inference 3.3's heterogeneous processors; where that implementation let a request's penalties depend on the
padding of its batch, the sequence's own tokens count here.) Knows nothing of rows, drafts or dice.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.messages import SamplingParams

Scores = NDArray[np.float32]
Ids = NDArray[np.int64]

GREENLIST_KEY = 15485863
FIRST_REACH = 8.0
"""nats below the best score at which the search for a nucleus starts"""


def penalize(scores: Scores, ids: Ids, counts: NDArray[np.float32], length: int, params: SamplingParams) -> None:
    """In place. Repetition: once for each distinct id that occurs, s·r below zero, else s/r. Frequency: s − f·count/length. `ids`,
    `counts`: the distinct ids of prompt, output and path, and how often each occurs; `length`: how many tokens these are."""
    s = scores[ids]
    if params.repetition_penalty != 1.0:
        r = np.float32(params.repetition_penalty)
        s = np.where(s < 0, s * r, s / r)
    if params.frequency_penalty != 0.0:
        s = s - counts / np.float32(length) * np.float32(params.frequency_penalty)
    scores[ids] = s


def best_first(scores: Scores, reach: float) -> Ids:
    """Ids whose score is at most `reach` below the highest, highest first, ties to the lower id. Never an id at −∞."""
    ids = np.flatnonzero(scores >= max(float(scores.max()) - reach, float(np.finfo(np.float32).min)))
    return ids[np.argsort(-scores[ids], kind="stable")]


def shares(scores: Scores, ids: Ids | None = None) -> NDArray[np.float64]:
    """exp(scores − max) of `ids` (or all), divided by its sum over all of `scores`."""
    top = scores.max()
    part = np.exp((scores if ids is None else scores[ids]) - top, dtype=np.float32)
    total = part if ids is None else np.exp(scores - top, dtype=np.float32)
    normal: NDArray[np.float64] = part / total.sum(dtype=np.float64)
    return normal


def keep_top_k(scores: Scores, k: int) -> Ids:
    """Ascending ids with a score not below the k-th highest (ties kept)."""
    reach = FIRST_REACH
    ids = best_first(scores, reach)
    while len(ids) < k and reach < np.inf:
        reach = reach * 2 if reach < 1e6 else np.inf
        ids = best_first(scores, reach)
    if len(ids) > k:
        ids = ids[scores[ids] >= scores[ids[k - 1]]]
    return np.sort(ids)


def keep_top_p(scores: Scores, p: float) -> Ids:
    """Ascending ids: from the most likely on, until their probabilities sum to at least p (at least one; ties to the lower id)."""
    reach = FIRST_REACH
    while True:
        ids = best_first(scores, reach)
        mass = np.cumsum(shares(scores, ids))
        if mass[-1] >= p or reach == np.inf:
            return np.sort(ids[: int(np.searchsorted(mass, p)) + 1])
        reach = reach * 2 if reach < 1e6 else np.inf


def keep_typical(scores: Scores, mass: float) -> Ids:
    """Ascending ids: those whose surprise is nearest to the entropy, until their probabilities sum to at least `mass`
    (ties kept; at least one). Meister et al., "Locally typical sampling", 2022."""
    p = shares(scores)
    surprise = -np.log(p, where=p > 0, out=np.full_like(p, -np.inf))
    entropy = float((p * np.where(p > 0, surprise, 0.0)).sum())
    distance = np.where(p > 0, np.abs(surprise - entropy), np.inf)
    order = np.argsort(distance, kind="stable")
    last = min(int(np.searchsorted(np.cumsum(p[order]), mass)), len(order) - 1)
    return np.flatnonzero(distance <= distance[order[last]])


def narrow(scores: Scores, params: SamplingParams) -> Ids:
    """Ascending ids that top-k, top-p and typical-p leave, one after the other."""
    ids = keep_top_k(scores, params.top_k) if 0 < params.top_k < len(scores) else np.arange(len(scores))
    if params.top_p < 1.0:
        ids = ids[keep_top_p(scores[ids], params.top_p)]
    if params.typical_p < 1.0:
        ids = ids[keep_typical(scores[ids], params.typical_p)]
    return ids


def log_normalizer(scores: Scores) -> float:
    """ln Σ exp(scores)."""
    top = scores.max()
    return float(top) + float(np.log(np.exp(scores - top, dtype=np.float32).sum(dtype=np.float64)))


def most_likely(scores: Scores, ids: Ids | None, normalizer: float, n: int) -> list[tuple[int, float]]:
    """The n best (id, log-probability), best first. More when scores tie at the n-th place, fewer when only so many are possible."""
    best = keep_top_k(scores, min(n, len(scores)))
    best = best[np.argsort(-scores[best], kind="stable")]
    names = best if ids is None else ids[best]
    return [(int(i), single(float(s) - normalizer)) for i, s in zip(names, scores[best])]


def single(x: float) -> float:
    """Rounded to float32: what log-probabilities are everywhere else."""
    return float(np.float32(x))


class Watermark:
    """Green lists (Kirchenbauer et al., "A watermark for large language models", 2023): the first ⌊γ·V⌋ of a permutation of the vocabulary
    seeded with the token before. Keeps the newest lists: neighbours share them rarely, but a repeated token always does."""

    KEPT = 64

    def __init__(self, vocab: int, gamma: float, delta: float) -> None:
        self._vocab = vocab
        self._green = int(vocab * gamma)
        self._delta = np.float32(delta)
        self._lists: dict[int, Ids] = {}

    def apply(self, scores: Scores, previous: int) -> None:
        """In place: the green ids gain δ."""
        ids = self._lists.get(previous)
        if ids is None:
            generator = torch.Generator().manual_seed(GREENLIST_KEY * previous)
            ids = torch.randperm(self._vocab, generator=generator)[: self._green].numpy()
            if len(self._lists) >= self.KEPT:
                del self._lists[next(iter(self._lists))]
            self._lists[previous] = ids
        scores[ids] += self._delta
