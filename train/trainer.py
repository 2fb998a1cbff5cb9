"""The training loop: AdamW over batches of texts, with checkpoints from which it goes on as if it had never stopped.

The order of the texts, the learning rate and so the result depend on the settings and the step number alone. Knows nothing of what is
trained.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from forerun.train.kinds.registry import Draft
from forerun.train.progress import Say, Stage
from forerun.train.shards import Record

WARM_UP = 0.03
"""share of the steps over which the rate rises"""
LAST_RATE = 0.05
"""of the highest rate, at the end"""
CLIP = 1.0
SAVE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """`epochs`: times that each text is read; `batch_tokens`: of a step; `rate`: the highest learning rate; `half`: compute in bfloat16;
    `begins`: the folder of the head that the draft went on from, "" = none."""

    epochs: int
    batch_tokens: int
    rate: float
    seed: int
    half: bool = True
    begins: str = ""


def batches(text: Sequence[Record], plan: Plan, epoch: int) -> list[list[Record]]:
    """The texts of an epoch, shuffled and cut where a batch has its tokens."""
    order = list(text)
    random.Random(f"{plan.seed}/{epoch}").shuffle(order)
    found: list[list[Record]] = [[]]
    tokens = 0
    for record in order:
        if tokens and tokens + len(record.tokens) > plan.batch_tokens:
            found.append([])
            tokens = 0
        found[-1].append(record)
        tokens += len(record.tokens)
    return found


def rate_at(done: float) -> float:
    """Share of the highest rate when so much of the training is done: a linear rise, then half a cosine."""
    if done < WARM_UP:
        return max(done / WARM_UP, 0.01)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))))


class Trainer:
    """`path`: of the checkpoint. `minutes`: after which training ends, however far it is, with the rate falling in time; 0 = with the last
    step. It may be given anew to each process, and only without it does a result depend on the settings alone. `seconds`: that training
    took so far, over all its processes. `history`: what was measured on the way."""

    def __init__(self, draft: Draft, text: Sequence[Record], plan: Plan, path: Path, say: Say, minutes: float = 0.0) -> None:
        self._draft, self._text, self._plan, self._path, self._say = draft, text, plan, path, say
        self._minutes = minutes
        weights = [value for value in draft.net.parameters() if value.ndim > 1]
        others = [value for value in draft.net.parameters() if value.ndim <= 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95))
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self._epochs = [len(batches(text, plan, epoch)) for epoch in range(plan.epochs)]
        self.steps = sum(self._epochs)
        self.step = 0
        self._restore()

    def run(self, measure: Callable[[], dict[str, Any]]) -> None:
        """What is missing. `measure` is called at the end of each epoch, and at the very end; what it returns is kept in `history`."""
        progress = Stage("training", "steps", self.steps, self.step, self._say)
        began = saved = time.monotonic()
        spent = self.seconds
        while self._done() < 1.0:
            epoch, at = self._place()
            for batch in batches(self._text, self._plan, epoch)[at:]:
                loss = self._learn(batch)
                self.step += 1
                self.seconds = spent + time.monotonic() - began
                progress.reached(self.step, f", loss {loss:.3f}")
                if time.monotonic() - saved > SAVE_SECONDS:
                    self._save()
                    saved = time.monotonic()
                if self._done() >= 1.0:
                    break
            self.history.append({"step": self.step, "loss": round(loss, 4)} | measure())
            self.seconds = spent + time.monotonic() - began
            self._save()
            saved = time.monotonic()

    def _done(self) -> float:
        """How much of the training is done: of its steps or of its time, whichever is further. Where there are no steps, all."""
        if not self.steps:
            return 1.0
        return max(self.step / self.steps, self.seconds / (60 * self._minutes) if self._minutes else 0.0)

    def _place(self) -> tuple[int, int]:
        """The epoch that the next step belongs to, and its place there."""
        at = self.step
        for epoch, count in enumerate(self._epochs):
            if at < count:
                return epoch, at
            at -= count
        raise IndexError(f"step {self.step} of {self.steps}")

    def _learn(self, batch: Sequence[Record]) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.rate * rate_at(self._done())
        self._draft.net.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._plan.half):
            loss = self._draft.loss(batch)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._draft.net.parameters(), CLIP)
        self._optimizer.step()
        self._draft.net.eval()
        return loss.item()

    def _save(self) -> None:
        """Under another name first: a process that is killed here leaves the checkpoint before."""
        state = {"step": self.step, "seconds": self.seconds, "history": self.history, "plan": dataclasses.asdict(self._plan)}
        state |= {"net": self._draft.net.state_dict(), "optimizer": self._optimizer.state_dict(), "texts": len(self._text)}
        fresh = self._path.with_suffix(".fresh")
        torch.save(state, fresh)
        os.replace(fresh, self._path)

    def _restore(self) -> None:
        """ValueError when the checkpoint is of other settings."""
        if not self._path.exists():
            return
        state = torch.load(self._path, weights_only=True)
        made = {"begins": ""} | state["plan"]  # older checkpoints do not say it: there was nothing else to begin from
        if made != dataclasses.asdict(self._plan) or state["texts"] != len(self._text):
            raise ValueError(f"{self._path} was made with other settings: give those, or remove it to begin again")
        try:
            self._draft.net.load_state_dict(state["net"])
        except RuntimeError as wrong:
            raise ValueError(f"{self._path} is of another draft: give its settings, or remove it to begin again") from wrong
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        self._say(f"training goes on at step {self.step:,} of {self.steps:,}")
