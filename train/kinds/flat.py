"""Texts one behind the other, and what is learnt at each place: shared by all kinds that read the target's hidden states.

    text      p p p p g g g g │ p p g g g │ …        p: prompt, g: generated
    goal      · · · · 0 1 2 3 │ · · 4 5 6 │ …        the row of `candidates` that says what could stand here, −1 = nothing is learnt

No padding: linear layers read all rows of a batch at once, attention goes text by text (`starts`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from forerun.train.shards import Record

HARD = 0.5
"""weight of the likeliest token beside the target's distribution: a guess is one token"""


@dataclasses.dataclass(frozen=True, slots=True)
class Flat:
    """`tokens` [n] target ids; `goal` [n]; `candidates`, `logprobs` [generated, width]: what the target thought likely. `starts`: text i is
    rows starts[i] … starts[i+1]−1; `prompts`: tokens of each prompt."""

    tokens: Tensor
    goal: Tensor
    candidates: Tensor
    logprobs: Tensor
    starts: list[int]
    prompts: list[int]

    @classmethod
    def of(cls, text: Sequence[Record]) -> Flat:
        starts = [0, *np.cumsum([len(record.tokens) for record in text]).tolist()]
        goal = np.full(starts[-1], -1, np.int64)
        at = 0
        for start, record in zip(starts, text):
            goal[start + record.prompt : start + len(record.tokens)] = np.arange(at, at + record.generated)
            at += record.generated

        def joined(parts: list[NDArray[Any]], kind: type) -> Tensor:
            return torch.from_numpy(np.concatenate(parts).astype(kind))

        return cls(
            joined([record.tokens for record in text], np.int64),
            torch.from_numpy(goal),
            joined([record.candidates for record in text], np.int64),
            joined([record.logprobs for record in text], np.float32),
            starts,
            [record.prompt for record in text],
        )

    def segments(self) -> list[tuple[int, int, int]]:
        """(first row, behind the last row, prompt tokens) of each text."""
        return list(zip(self.starts, self.starts[1:], self.prompts))


def distilled(logits: Tensor, candidates: Tensor, logprobs: Tensor) -> Tensor:
    """The mean of `distances` over rows. logits [p, K] of the draft."""
    return distances(functional.log_softmax(logits.float(), -1), candidates, logprobs).sum() / max(1, len(logits))


def distances(scores: Tensor, candidates: Tensor, logprobs: Tensor) -> Tensor:
    """[p]: −Σ p log q − HARD · log q(likeliest). scores [p, K]: the draft's log-probabilities; candidates int64 [p, width]: draft ids, −1 =
    a token that the draft does not know; logprobs [p, width]: the target's."""
    known = candidates >= 0
    weight = logprobs.exp() * known
    weight[:, 0] += HARD * known[:, 0]
    return -(weight * scores.gather(1, candidates.clamp(min=0))).sum(-1)
