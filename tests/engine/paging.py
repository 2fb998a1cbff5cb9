"""Feeds sequences to a model through scattered pages, several at a time and in chunks, and gathers the logits of every position."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.backends.base import Backend
from forerun.engine.batch import Batch
from forerun.engine.models.model import Model


@dataclass
class Feeder:
    model: Model
    backend: Backend
    sequences: list[list[int]]
    taps: tuple[int, ...] = ()
    seed: int = 0
    logits: list[list[Tensor]] = field(default_factory=list)
    tapped: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.backend.caps.page_tokens
        counts = [-(-len(sequence) // size) for sequence in self.sequences]
        pages = list(range(1, sum(counts) + 4))
        random.Random(self.seed).shuffle(pages)
        self.pages = [[pages.pop() for _ in range(count)] for count in counts]
        self.pool = self.backend.pool(self.model.pool, sum(counts) + 4)
        self.done = [0] * len(self.sequences)
        self.logits = [[] for _ in self.sequences]
        self.tapped = [[] for _ in self.sequences]

    def batch(self, shares: dict[int, int]) -> Batch:
        """For sequence i its next `shares[i]` tokens; logits of all."""
        size = self.backend.caps.page_tokens
        tokens, positions, slots, starts = [], [], [], [0]
        for index, count in shares.items():
            at = range(self.done[index], self.done[index] + count)
            tokens += [self.sequences[index][p] for p in at]
            positions += at
            slots += [self.pages[index][p // size] * size + p % size for p in at]
            starts.append(len(tokens))
        width = max(len(self.pages[index]) for index in shares)

        def ints(values: list) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        return Batch(
            tokens=ints(tokens),
            positions=ints(positions),
            slots=ints(slots),
            parents=ints([-1] * len(tokens)),
            starts=ints(starts),
            known=ints(list(shares.values())),
            context=ints([self.done[index] for index in shares]),
            pages=ints([self.pages[index] + [0] * (width - len(self.pages[index])) for index in shares]),
            logit_rows=ints(list(range(len(tokens)))),
        )

    def step(self, shares: dict[int, int]) -> None:
        """One flat forward."""
        batch = self.batch(shares)
        out = self.model.forward(batch, self.pool, self.taps)
        for (index, count), start in zip(shares.items(), batch.starts.tolist()):
            self.logits[index].append(out.logits[start : start + count])
            if out.taps is not None:
                self.tapped[index].append(out.taps[start : start + count])
            self.done[index] += count

    def run(self, most: int = 17) -> list[Tensor]:
        """Everything, in chunks of random size and random company → logits [length, V] of each sequence."""
        dice = random.Random(self.seed)
        while any(done < len(sequence) for done, sequence in zip(self.done, self.sequences)):
            left = {i: len(sequence) - self.done[i] for i, sequence in enumerate(self.sequences) if self.done[i] < len(sequence)}
            company = dice.sample(sorted(left), dice.randint(1, len(left)))
            self.step({index: min(left[index], dice.choice([1, 1, 2, dice.randint(3, most)])) for index in company})
        return [torch.cat(parts) for parts in self.logits]


def random_sequences(vocab: int, lengths: tuple[int, ...] = (45, 33, 19), seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(4, vocab) for _ in range(length)] for length in lengths]
