"""What a target would pick if a draft model's logits were its own: the same processing, the same dice.

A drafter that sampled by itself would rarely draw what the target draws. With the noise of (seed, token index, token id) added to its own
processed scores it does, the more often the closer the two distributions are (Daliri, Musco, Suresh 2408.07978). Several candidates:
the best few of score + noise, which beats the most likely ones. Nothing here can change the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forerun.backends.base import Ops
from forerun.engine import processing
from forerun.engine.processing import Scores
from forerun.engine.rows import Row
from forerun.engine.sampler import Ask, Sampler
from forerun.kernels.dice import signed

REACH = 12.0
"""nats below the best score beyond which a token is not thrown dice for: it wins once in e^12 throws"""


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
        params = row.params
        narrow = params.top_k or params.top_p < 1.0 or params.typical_p < 1.0
        ids = processing.narrow(scores, params) if narrow else processing.reach_of(scores, REACH)
        support = scores[ids]
        seeds, indices = torch.full((len(ids),), signed(params.seed)), torch.full((len(ids),), row.generated + len(path))
        noise = self._ops.noise_at(seeds, indices, torch.from_numpy(ids)).cpu().numpy()
        normalizer = processing.log_normalizer(support)
        places = [place for place, _ in largest(support + noise, count)]
        return [(int(ids[place]), float(np.exp(support[place] - normalizer))) for place in places]


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
