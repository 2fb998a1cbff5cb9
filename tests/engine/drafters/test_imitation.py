"""What a draft model would pick is what the target would pick from the same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun.backends.registry import open_backend
from forerun.engine.drafters.imitation import Imitation, greedy, largest
from forerun.engine.rows import Row
from forerun.engine.sampler import Ask, Sampler
from tests.engine.test_identity import KINDS, prompt_of
from tests.engine.tiny import VOCAB, params_for

OPS = open_backend("cpu", 1).ops


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [[], [3], [3, 3, 50]])
def test_the_first_is_the_targets_pick(kind: str, path: list[int]) -> None:
    prompt = prompt_of(5, 30)
    row = Row.open(0, params_for(prompt, **(KINDS[kind] | {"raw_logprobs": False})), [*prompt, 7])
    imitation, sampler = Imitation(OPS, VOCAB, 0.5, 2.0), Sampler(OPS, VOCAB, 0.5, 2.0)
    for seed in range(20):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
        raw = logits[0].numpy()
        before = raw.copy()
        found = imitation.best(raw, row, path, 3)
        choice = sampler.choose(logits, [Ask(0, row, path)])[0]
        assert found[0][0] == choice.token
        assert found[0][1] == pytest.approx(np.exp(choice.logprob), rel=1e-3)
        assert len({token for token, _ in found}) == len(found) and (raw == before).all()


def test_the_second_is_what_the_dice_would_give_without_the_first() -> None:
    prompt = prompt_of(5, 30)
    row = Row.open(0, params_for(prompt, sample=True), [*prompt, 7])
    imitation = Imitation(OPS, VOCAB, 0.5, 2.0)
    raw = np.linspace(0, 3, VOCAB, dtype=np.float32)
    first, second = imitation.best(raw, row, [], 2)
    without = raw.copy()
    without[first[0]] = -np.inf
    assert imitation.best(without, row, [], 1)[0][0] == second[0]


def test_impossible_tokens_are_never_named() -> None:
    scores = np.full(6, -np.inf, np.float32)
    scores[[1, 4]] = 0.0
    assert [token for token, _ in greedy(scores.copy(), 5)] == [1, 4], "ties to the lower id"
    assert largest(np.array([1.0, 3.0, 2.0], np.float32), 2) == [(1, 3.0), (2, 2.0)]
