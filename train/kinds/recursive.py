"""Heads that draft token by token from their own output (EAGLE, MTP): how they are trained and measured, whatever their net.

    row i      reads the target's hidden states at token i and token i + 1, and guesses token i + 2
    pass 0     every row of the text, from the target's states
    pass j     row i reads what the head itself made of row i − 1 in pass j − 1: it guesses as the (j + 1)-th guess of a draft that began
               j rows before it, and sees of the rows between what that draft would have made, of older ones what pass 0 made

Training through these passes is EAGLE-3's training-time test (Li et al. 2503.01840): the head learns from its own errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.train.kinds.flat import Flat, distilled
from forerun.train.kinds.nets import Attention
from forerun.train.shards import Record
from forerun.train.taps import Taps

FADE = 0.8
"""weight of each further pass"""
Entries = tuple[Tensor, Tensor]


class Net(Protocol):
    def first(self, states: Tensor) -> Tensor:
        """The target's states [n, taps · H] → what the first pass reads [n, H]."""
        ...

    def layer(self, embedded: Tensor, features: Tensor, rows: Sequence[tuple[int, int]], before: list[Entries]) -> Tensor:
        """One pass: embedded, features [n, H] → [n, H]. `rows`: of each text; `before`: the entries of the passes before this, to which its
        own are added."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[p, H] → [p, K]: of the tokens that are learnt."""
        ...

    def best(self, hidden: Tensor) -> Tensor:
        """[p, H] → int64 [p]: the target's id of the likeliest guess."""
        ...


class Passes:
    """`to_draft` [V]: the place of each target token among those that are learnt, −1 = none. `passes`: guesses ahead that are learnt."""

    def __init__(self, net: Net, taps: Taps, embedding: Tensor, to_draft: Tensor, passes: int) -> None:
        self._net, self._taps, self._embedding, self._to_draft, self._passes = net, taps, embedding, to_draft, passes

    def loss(self, batch: Sequence[Record]) -> Tensor:
        flat = Flat.of(batch)
        loss = torch.zeros(())
        for number, (hidden, goal) in enumerate(self._run(batch, flat, self._passes)):
            places = (goal >= 0).nonzero().flatten()
            logits = self._net.logits(hidden[places])
            rows = goal[places]
            loss = loss + FADE**number * distilled(logits, self._to_draft[flat.candidates[rows]], flat.logprobs[rows])
        return loss / sum(FADE**number for number in range(self._passes))

    def hits(self, record: Record, depth: int) -> NDArray[np.bool_]:
        """Pass d of the row before place p + d − 1 is guess d + 1 of a draft that starts at place p."""
        right = np.zeros((record.generated, depth), bool)
        with torch.inference_mode():
            flat = Flat.of([record])
            for d, (hidden, _) in enumerate(self._run([record], flat, depth)):
                first = record.prompt - 2 + d
                if first >= hidden.shape[0]:
                    break
                held = self._net.best(hidden[max(first, 0) : -1]) == flat.tokens[max(first, 0) + 2 :]
                skipped = max(0, -first)
                right[skipped : skipped + len(held), d] = held.numpy()
        return right

    def _run(self, batch: Sequence[Record], flat: Flat, passes: int) -> list[tuple[Tensor, Tensor]]:
        """For each pass what the head makes of all rows [n, H], and the goal of each row, −1 where it has none. Row k of a text is about
        its tokens k and k + 1; the last row of each text guesses beyond its end."""
        embedded, features, goals, rows, at = [], [], [], [], 0
        for (first, last, _), states in zip(flat.segments(), self._taps.read(batch)):
            embedded.append(self._embedding[flat.tokens[first + 1 : last]])
            features.append(states[:-1])
            goals.append(torch.cat([flat.goal[first + 2 : last], torch.tensor([-1])]))
            rows.append((at, at + last - first - 1))
            at += last - first - 1
        tokens, goal = torch.cat(embedded), torch.cat(goals)
        firsts = torch.tensor([first for first, _ in rows])
        before = torch.arange(-1, at - 1)
        before[firsts] = firsts
        hidden = self._net.first(torch.cat(features))
        entries: list[Entries] = []
        made: list[tuple[Tensor, Tensor]] = []
        for number in range(passes):
            hidden = self._net.layer(tokens, hidden if not number else hidden[before], rows, entries)
            made.append((hidden, goal.clone()))
            for (first, last), prompt in zip(rows, flat.prompts):  # a draft of the next pass began at least so many rows before
                goal[first : min(last, first + max(prompt - 2, 0) + number + 1)] = -1
        return made


def attend(attention: Attention, q: Tensor, first: int, last: int, passes: list[Entries]) -> Tensor:
    """What rows first … last−1, which are one text, see in the newest of the passes: pass 0 up to the row where the draft began, then one
    entry of each later pass; pass i's lies j − i rows before the row."""
    j = len(passes) - 1
    keys, values = (part[first:last] for part in passes[0])
    seen = torch.ones(last - first, last - first, dtype=torch.bool).tril(-j)
    seen[:j, 0] = True  # rows too early for this pass are never looked at, but must not be a softmax over nothing
    extra = [(torch.roll(k[first:last], j - i, 0), torch.roll(v[first:last], j - i, 0)) for i, (k, v) in enumerate(passes) if i]
    return attention.over(q, keys, values, seen, extra)


def positions_of(rows: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(last - first) for first, last in rows])
