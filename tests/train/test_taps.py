"""What the target thinks, as training reads it: the same whatever else is read, and what transformers says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.messages import Start
from forerun.train import taps as module
from forerun.train.shards import Record
from forerun.train.states import Shelf
from forerun.train.taps import Taps


def texts(*lengths: int) -> list[Record]:
    dice = np.random.default_rng(5)
    none = np.zeros((1, 1))
    return [Record(i, 0, 1, dice.integers(4, 500, length).astype(np.uint32), none, none) for i, length in enumerate(lengths)]  # type: ignore[arg-type]


def opened(folder: Path, shelf: Shelf | None = None, layers: tuple[int, ...] = (0, 1)) -> Taps:
    return Taps(Start(model_id=str(folder), device="cpu", threads=1, dtype="float32"), layers, shelf)


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
    torch.testing.assert_close(states, torch.cat(found, -1)[0, :-1], atol=0.05, rtol=0.01)  # nobody reads the last token


@pytest.mark.parametrize("keep", [0, 64 * 2 * 2 * 20, 1 << 20])
def test_the_same_alone_together_and_remembered(folder: Path, keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a batch takes several forwards, and where there is room for some of the states only."""
    monkeypatch.setattr(module, "STEP_TOKENS", 40)
    text = texts(17, 3, 30, 90, 16)
    alone = [opened(folder).read([record])[0] for record in text]
    taps = opened(folder, Shelf(tmp_path, keep))
    for order in (text, text[::-1], text[1:3]):
        states = taps.read(order)
        assert all(torch.equal(one, alone[record.number]) for one, record in zip(states, order, strict=True))
    assert taps.read([]) == []
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= keep


def test_what_another_process_kept_is_not_computed_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer, in whatever order they are read; half of the layers is not enough."""
    text = texts(17, 30)
    computed = opened(folder, Shelf(tmp_path, 1 << 20)).read(text)
    one, both = opened(folder, Shelf(tmp_path, 1 << 20), (1,)), opened(folder, Shelf(tmp_path, 1 << 20))
    forwards = []
    forward = Taps._forward
    monkeypatch.setattr(Taps, "_forward", lambda self, text: forwards.append(len(text)) or forward(self, text))
    assert all(torch.equal(states, whole[:, 64:]) for states, whole in zip(one.read(text), computed, strict=True))
    assert all(torch.equal(states, whole) for states, whole in zip(both.read(text), computed, strict=True))
    assert not forwards
    next(file for file in tmp_path.iterdir() if file.name.endswith("-0")).unlink()
    assert all(torch.equal(states, whole) for states, whole in zip(both.read(text), computed, strict=True))
    assert forwards == [1]


def test_the_shelf_counts_what_earlier_runs_left(tmp_path: Path) -> None:
    (record, other), states = texts(5, 5), torch.ones(4, 8, dtype=torch.bfloat16)
    Shelf(tmp_path, 100).put(record, 3, states)
    full = Shelf(tmp_path, 100)
    full.put(other, 3, states)
    kept = full.get(record, 3, 8)
    assert kept is not None and torch.equal(kept, states) and full.get(other, 3, 8) is None and full.get(record, 2, 8) is None
