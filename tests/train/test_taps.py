"""What the target thinks, as training reads it: the same whatever else is read, and what transformers says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.messages import Start
from forerun.train import taps as module
from forerun.train.shards import Record
from forerun.train.taps import Taps


def texts(*lengths: int) -> list[Record]:
    dice = np.random.default_rng(5)
    none = np.zeros((1, 1))
    return [Record(i, 0, 1, dice.integers(4, 500, length).astype(np.uint32), none, none) for i, length in enumerate(lengths)]  # type: ignore[arg-type]


def opened(folder: Path, keep: int = 0) -> Taps:
    return Taps(Start(model_id=str(folder), device="cpu", threads=1, dtype="float32"), (0, 1), keep)


def test_states_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    model.model.layers[1].register_forward_pre_hook(lambda module, given: found.append(given[0]))
    model.model.norm.register_forward_pre_hook(lambda module, given: found.append(given[0]))
    (record,) = texts(33)
    with torch.inference_mode():
        model(torch.from_numpy(record.tokens.astype(np.int64))[None])
    (states,) = opened(folder).read([record])
    torch.testing.assert_close(states, torch.cat(found, -1)[0], atol=0.05, rtol=0.01)


@pytest.mark.parametrize("keep", [0, 64 * 2 * 2 * 20, 1 << 20])
def test_the_same_alone_together_and_remembered(folder: Path, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a batch takes several forwards, and where there is room for some of the states only."""
    monkeypatch.setattr(module, "STEP_TOKENS", 40)
    text = texts(17, 3, 30, 90, 16)
    alone = [opened(folder).read([record])[0] for record in text]
    taps = opened(folder, keep)
    for order in (text, text[::-1], text[1:3]):
        states = taps.read(order)
        assert all(torch.equal(one, alone[record.number]) for one, record in zip(states, order, strict=True))
    assert taps.read([]) == []
