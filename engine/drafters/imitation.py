"""What a target would pick if a draft model's logits were its own: the same processing, the same dice.

A drafter that sampled by itself would rarely draw what the target draws. With the noise of (seed, token index, token id) added to its own
processed scores it does, the more often the closer the two distributions are (Daliri, Musco, Suresh 2408.07978). Several candidates:
the best few of score + noise, which beats the most likely ones. Nothing here can change the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.backends.base import Ops
from forerun.engine import processing
from forerun.engine.processing import Ids, Scores
from forerun.engine.rows import Row
from forerun.engine.sampler import Ask, Sampler
from forerun.kernels.dice import signed
from forerun.messages import SamplingParams

REACH = 12.0
"""nats below the best score beyond which a token is not thrown dice for: it wins once in e^12 throws"""
ROOTS, WORD64 = 0x9E3779B97F4A7C15, (1 << 64) - 1
"""odd: a seed for every root"""


class Imitation:
    """`vocab`: of the target; `gamma`, `delta`: its watermark."""

    def __init__(self, ops: Ops, vocab: int, gamma: float, delta: float) -> None:
        self._ops = ops
        self._sampler = Sampler(ops, vocab, gamma, delta)

    def best(self, raw: Scores, row: Row, path: Sequence[int], count: int) -> list[tuple[int, float]]:
        """raw float32 [V]: logits behind the row's tokens and the guesses in `path`, at target ids; −∞ = impossible. The `count` tokens
        that come first, each with its probability after processing."""
        scores = self._sampler.processed(raw, Ask(0, row, path))
        if not row.params.sample:
            return greedy(scores, count)
        ids = _support(scores, row.params)
        support = scores[ids]
        normalizer = processing.log_normalizer(support)
        places = [place for place, _ in largest(support + self._noise(row.params.seed, row.generated + len(path), ids), count)]
        return [(int(ids[place]), float(np.exp(support[place] - normalizer))) for place in places]

    def draw(self, raw: Scores, row: Row, path: Sequence[int]) -> tuple[int, NDArray[np.float64]]:
        """For `--acceptance rejection`: raw as above → a token and the distribution [V] that it was drawn from. The dice are others behind
        every root: those of a draft that was judged already are not thrown again."""
        scores = self._sampler.processed(raw, Ask(0, row, path))
        ids = _support(scores, row.params)
        support = scores[ids]
        law = np.zeros(len(scores))
        law[ids] = np.exp(support.astype(np.float64) - float(support.max()))
        seed = (row.params.seed + (row.generated + 1) * ROOTS) & WORD64
        return int(ids[np.argmax(support + self._noise(seed, row.generated + len(path), ids))]), law / law.sum()

    def _noise(self, seed: int, index: int, ids: Ids) -> Scores:
        seeds, indices = torch.full((len(ids),), signed(seed)), torch.full((len(ids),), index)
        noise: Scores = self._ops.noise_at(seeds, indices, torch.from_numpy(ids)).cpu().numpy()
        return noise


def _support(scores: Scores, params: SamplingParams) -> Ids:
    """Ascending ids that may come out."""
    narrow = params.top_k or params.top_p < 1.0 or params.typical_p < 1.0
    return processing.narrow(scores, params) if narrow else processing.reach_of(scores, REACH)


def greedy(scores: Scores, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens, each with its probability. Spoils `scores`."""
    normalizer = processing.log_normalizer(scores)
    return [(place, float(np.exp(value - normalizer))) for place, value in largest(scores, count)]


def largest(values: Scores, count: int) -> list[tuple[int, float]]:
    """The `count` largest (place, value), ties to the lowest place. A few passes are faster than a selection. Spoils `values`."""
    found: list[tuple[int, float]] = []
    for _ in range(min(count, len(values))):
        place = int(values.argmax())
        value = float(values[place])
        if value == -np.inf:
            break
        found.append((place, value))
        values[place] = -np.inf
    return found
