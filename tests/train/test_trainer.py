"""Training goes on from its checkpoint as if it had never stopped, and it learns."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forerun.train.shards import Record
from forerun.train.trainer import LAST_RATE, Plan, Trainer, batches, rate_at

PLAN = Plan(epochs=3, batch_tokens=40, rate=0.3, seed=1, half=False)


def text() -> list[Record]:
    dice = np.random.default_rng(0)
    found = []
    for number in range(20):
        tokens = (np.arange(12 + number % 3) * 3 + dice.integers(0, 16)).astype(np.uint32) % 16
        found.append(Record(number, 0, 2, tokens, tokens[2:, None], np.zeros((len(tokens) - 2, 1), np.float16)))
    return found


class Bigram:
    """Guesses a token from the one before it."""

    def __init__(self, width: int = 16) -> None:
        self.net = nn.Linear(16, width)
        self.facts: dict[str, object] = {}
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.zero_()

    def loss(self, batch: Sequence[Record]) -> Tensor:
        before = torch.cat([torch.from_numpy(record.tokens[1:-1].astype(np.int64)) for record in batch])
        after = torch.cat([torch.from_numpy(record.tokens[2:].astype(np.int64)) for record in batch])
        return nn.functional.cross_entropy(self.net(nn.functional.one_hot(before, 16).float()), after)

    def hits(self, record: Record, depth: int) -> NDArray[np.bool_]:
        raise AssertionError("nobody measures here")

    def save(self, folder: Path) -> None:
        raise AssertionError("nobody saves here")


class Killed(Exception):
    pass


def train(path: Path, kill_at: int = -1, draft: Bigram | None = None, plan: Plan = PLAN) -> tuple[Trainer, Bigram]:
    draft = draft or Bigram()
    trainer = Trainer(draft, text(), plan, path, lambda line: None)
    loss = draft.loss

    def mortal(batch: Sequence[Record]) -> Tensor:
        if trainer.step == kill_at:
            raise Killed
        return loss(batch)

    draft.loss = mortal  # type: ignore[method-assign]
    trainer.run(lambda: {"seen": trainer.step})
    return trainer, draft


def test_loss_falls(tmp_path: Path) -> None:
    before = Bigram().loss(text()).item()
    trainer, draft = train(tmp_path / "a.pt")
    assert draft.loss(text()).item() < 0.5 * before
    assert trainer.step == trainer.steps == sum(len(batches(text(), PLAN, epoch)) for epoch in range(3))


@pytest.mark.parametrize("kill_at", [1, 9, 17])
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int) -> None:
    monkeypatch.setattr("forerun.train.trainer.SAVE_SECONDS", -1.0)
    whole, expected = train(tmp_path / "whole.pt")
    with pytest.raises(Killed):
        train(tmp_path / "killed.pt", kill_at)
    trainer, draft = train(tmp_path / "killed.pt")
    assert torch.equal(draft.net.weight, expected.net.weight) and torch.equal(draft.net.bias, expected.net.bias)
    assert trainer.history == whole.history and len(whole.history) == PLAN.epochs


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    train(tmp_path / "a.pt")
    trainer, _ = train(tmp_path / "a.pt", kill_at=0)
    assert trainer.step == trainer.steps


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "a.pt")
    with pytest.raises(ValueError, match="other settings"):
        train(tmp_path / "a.pt", plan=Plan(4, 40, 0.3, 1, False))
    with pytest.raises(ValueError, match="another draft"):
        train(tmp_path / "a.pt", draft=Bigram(17))


def test_a_checkpoint_from_before_heads_went_on_from_others_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    train(path)
    state = torch.load(path, weights_only=True)
    del state["plan"]["begins"]
    torch.save(state, path)
    trainer, _ = train(path, kill_at=0)
    assert trainer.step == trainer.steps
    with pytest.raises(ValueError, match="other settings"):
        train(path, plan=dataclasses.replace(PLAN, begins="drafts/x"))


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_text_is_read_once_an_epoch(epoch: int) -> None:
    found = batches(text(), PLAN, epoch)
    assert sorted(record.number for batch in found for record in batch) == list(range(20))
    assert all(sum(len(record.tokens) for record in batch) <= PLAN.batch_tokens for batch in found)
    other = [record.number for batch in batches(text(), PLAN, 1 - epoch) for record in batch]
    assert [record.number for batch in found for record in batch] != other


def test_the_rate_rises_then_falls() -> None:
    rates = [rate_at(step / 200) for step in range(200)]
    assert rates.index(max(rates)) == 6 and max(rates) == 1.0
    assert 0.0 < rates[0] < rates[3] < 1.0
    assert all(left > right for left, right in itertools.pairwise(rates[6:]))
    assert rates[-1] == pytest.approx(LAST_RATE, abs=0.01)


def test_a_run_with_too_little_time_ends_early_and_whole(tmp_path: Path) -> None:
    draft = Bigram()
    trainer = Trainer(draft, text(), PLAN, tmp_path / "a.pt", lambda line: None, minutes=1e-9)
    trainer.run(lambda: {"seen": trainer.step})
    assert trainer.step == 1 and len(trainer.history) == 1
    again = Trainer(Bigram(), text(), PLAN, tmp_path / "a.pt", lambda line: None)
    assert again.step == 1 and again.history == trainer.history
