"""Logits processing of one node: TGI's steps, in TGI's order, on one row of scores.

Pure functions of a float32 row [V] and the request's parameters; each is computed by itself, so no result depends on a batch.
(Formulas: text-generation-inference 3.3's heterogeneous processors; where that implementation let a request's penalties depend on the
padding of its batch, the sequence's own tokens count here.) Knows nothing of rows, drafts or dice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.messages import SamplingParams

Scores = NDArray[np.float32]
Ids = NDArray[np.int64]

GREENLIST_KEY = 15485863
LOWEST = float(np.finfo(np.float32).min)
FIRST_REACH = 8.0
"""nats below the best score at which the search for a nucleus starts"""
FIRST_DISTANCE = 1.0
"""nats around the entropy at which the search for a typical set starts"""


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


def bias(scores: Scores, params: SamplingParams) -> None:
    """In place: what the request adds to single ids."""
    for token, value in params.logit_bias:
        scores[token] += np.float32(value)


def discourage(scores: Scores, ids: Ids, counts: NDArray[np.float32], params: SamplingParams) -> None:
    """In place: OpenAI's penalties, s − presence − count · c for every id that was generated c > 0 times ("API reference", parameters
    presence_penalty and frequency_penalty)."""
    scores[ids] -= np.float32(params.presence_penalty) + counts * np.float32(params.count_penalty)


def forbid(scores: Scores, allowed: NDArray[np.uint8]) -> None:
    """In place: −∞ for every id whose bit (the lowest first) is not set, or that has none."""
    np.putmask(scores, np.unpackbits(allowed, count=len(scores), bitorder="little") == 0, -np.inf)


def reach_of(scores: Scores, reach: float) -> Ids:
    """Ascending ids whose score is at most `reach` below the highest; never one at −∞."""
    return np.flatnonzero(scores >= max(float(scores.max()) - reach, LOWEST))


def farther(reach: float) -> float:
    """The next reach to try: distributions of language models end long before the last."""
    return reach + 2.0 if reach < 40.0 else np.inf


def keep_top_k(scores: Scores, k: int) -> Ids:
    """Ascending ids with a score not below the k-th highest (ties kept). k ≥ 1."""
    reach = FIRST_REACH
    ids = reach_of(scores, reach)
    while len(ids) < k and reach < np.inf:
        reach = farther(reach)
        ids = reach_of(scores, reach)
    if len(ids) > k:
        inside = scores[ids]
        ids = ids[inside >= np.partition(inside, len(ids) - k)[len(ids) - k]]
    return ids


def keep_top_p(scores: Scores, p: float) -> Ids:
    """Ascending ids: from the most likely on, until their probabilities sum to at least p (at least one; ties to the lower id)."""
    top = scores.max()
    total = np.exp(scores - top, dtype=np.float32).sum(dtype=np.float64)
    reach = FIRST_REACH
    while True:
        ids = reach_of(scores, reach)
        inside = scores[ids]
        falling = np.sort(inside)[::-1]
        mass = np.cumsum(np.exp(falling - top, dtype=np.float32), dtype=np.float64) / total
        if mass[-1] >= p or reach == np.inf:
            count = min(int(np.searchsorted(mass, p)) + 1, len(ids))
            least = falling[count - 1]
            kept = inside > least
            ties = np.flatnonzero(inside == least)
            kept[ties[: count - int(np.count_nonzero(kept))]] = True
            nucleus: Ids = ids[kept]
            return nucleus
        reach = farther(reach)


def keep_typical(scores: Scores, mass: float) -> Ids:
    """Ascending ids: those whose surprise is nearest to the entropy, until their probabilities sum to at least `mass`
    (ties kept; at least one). Meister et al., "Locally typical sampling", 2022."""
    surprise = np.minimum(np.float32(log_normalizer(scores)) - scores, -LOWEST)
    p = np.exp(-surprise, dtype=np.float32)
    distance = np.abs(surprise - np.float32((p * surprise).sum(dtype=np.float64)))
    reach = FIRST_DISTANCE
    while True:
        ids = np.flatnonzero(distance <= reach)
        ids = ids[np.argsort(distance[ids], kind="stable")]
        sums = np.cumsum(p[ids], dtype=np.float64)
        if reach == np.inf or (len(ids) and sums[-1] >= mass):
            last = min(int(np.searchsorted(sums, mass)), len(ids) - 1)
            return np.flatnonzero(distance <= distance[ids[last]])
        reach = farther(reach)


def narrow(scores: Scores, params: SamplingParams) -> Ids:
    """Ascending ids that top-k, top-p and typical-p leave, one after the other."""
    steps: list[tuple[Callable[[Scores, Any], Ids], float]] = []
    if 0 < params.top_k < len(scores):
        steps.append((keep_top_k, params.top_k))
    if params.top_p < 1.0:
        steps.append((keep_top_p, params.top_p))
    if params.typical_p < 1.0:
        steps.append((keep_typical, params.typical_p))
    ids: Ids | None = None
    for keep, limit in steps:
        kept = keep(scores if ids is None else scores[ids], limit)
        ids = kept if ids is None else ids[kept]
    return np.arange(len(scores)) if ids is None else ids


def log_normalizer(scores: Scores) -> float:
    """ln Σ exp(scores). Not finite where nothing is possible, or something is no number."""
    top = scores.max()
    if not np.isfinite(top):
        return float(top)
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
