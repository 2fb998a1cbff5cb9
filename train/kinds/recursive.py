"""Heads that draft token by token from their own output (EAGLE, MTP): how they are trained and measured, whatever their net.

    row i      reads the target's hidden states at token i and token i + 1, and guesses token i + 2
    pass 0     every row of the text, from the target's states
    pass j     row i reads what the head itself made of row i − 1 in pass j − 1: it guesses as the (j + 1)-th guess of a draft that began
               j rows before it, and sees of the rows between what that draft would have made, of older ones what pass 0 made

Training through these passes is EAGLE-3's training-time test (Li et al. 2503.01840): the head learns from its own errors. Drafts begin in
answers, so of a prompt there are entries of pass 0 only, for the answer to see:

    text       p p p p g g g │ p p g g g        p: prompt, g: generated; the last token of a text has no row
    pass 0     e e r r r r   │ r r r r          e: an entry and no more, r: a row that a draft may begin at
    pass j         r r r r   │ r r r r
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from forerun.train.kinds.flat import Flat, distilled
from forerun.train.kinds.nets import Attention
from forerun.train.shards import Record
from forerun.train.taps import Taps

FADE = 0.8
"""weight of each further pass"""
Entries = tuple[Tensor, Tensor]


class Net(Protocol):
    """A layer that makes features of features and embedded tokens."""

    @property
    def attention(self) -> Attention: ...

    def first(self, states: Tensor) -> Tensor:
        """The target's states [n, taps · H] → what the first pass reads [n, H]."""
        ...

    def read(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """[n, H] each → the residual stream [n, H] and what attention reads [n, width]."""
        ...

    def made(self, residual: Tensor, seen: Tensor) -> Tensor:
        """The residual stream and what attention saw [n, heads · D] → [n, H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[p, H] → [p, K]: of the tokens that are learnt."""
        ...

    def best(self, hidden: Tensor) -> Tensor:
        """[p, H] → int64 [p]: the target's id of the likeliest guess."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The rows of a text: `first` … `last` − 1 of the batch's. A draft may begin at `begin` or behind it. After the entries of pass 0 only
    such rows are left; then the text's are `able` … `able` + `count` − 1."""

    first: int
    begin: int
    last: int
    able: int

    @property
    def count(self) -> int:
        return self.last - self.begin

    @staticmethod
    def of(flat: Flat) -> list[Span]:
        spans: list[Span] = []
        at = able = 0
        for first, last, prompt in flat.segments():
            span = Span(at, at + max(prompt - 2, 0), at + last - first - 1, able)
            at, able = span.last, able + span.count
            spans.append(span)
        return spans


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
        begin = max(record.prompt - 2, 0)
        with torch.inference_mode():
            flat = Flat.of([record])
            for d, (hidden, _) in enumerate(self._run([record], flat, depth)):
                first = max(record.prompt - 2 + d, 0)
                if first - begin >= hidden.shape[0]:
                    break
                held = self._net.best(hidden[first - begin : -1]) == flat.tokens[first + 2 :]
                skipped = first - (record.prompt - 2 + d)
                right[skipped : skipped + len(held), d] = held.numpy()
        return right

    def _run(self, batch: Sequence[Record], flat: Flat, passes: int) -> list[tuple[Tensor, Tensor]]:
        """For each pass what the head makes of the rows that a draft may begin at [n, H], and the goal of each, −1 where it has none. Row k
        of a text is about its tokens k and k + 1; the last row of each text guesses beyond its end."""
        net, spans = self._net, Span.of(flat)
        texts = list(zip(spans, flat.starts, flat.starts[1:]))
        embedded = self._embedding[torch.cat([flat.tokens[start + 1 : end] for _, start, end in texts])]
        features = net.first(torch.cat(self._taps.read(batch)))
        goal = torch.cat([functional.pad(flat.goal[end - span.count + 1 : end], (0, 1), value=-1) for span, _, end in texts])
        able = torch.cat([torch.arange(span.begin, span.last) for span in spans])
        position = torch.cat([torch.arange(span.last - span.first) for span in spans])
        before = torch.arange(-1, len(able) - 1)
        firsts = torch.tensor([span.able for span in spans])
        before[firsts] = firsts
        entries: list[Entries] = []
        made: list[tuple[Tensor, Tensor]] = []
        for number in range(passes):
            residual, x = net.read(embedded, features)
            entries.append(net.attention.entries(x, position))
            if not number:
                residual, x, embedded, position = (rows[able] for rows in (residual, x, embedded, position))
            q = net.attention.queries(x, position)
            hidden = net.made(residual, torch.cat([attend(net.attention, q, span, entries) for span in spans]))
            made.append((hidden, goal.clone()))
            features = hidden[before]
            for span in spans:  # a draft of the next pass began at least so many rows before
                goal[span.able : span.able + min(number + 1, span.count)] = -1
        return made


def attend(attention: Attention, q: Tensor, span: Span, passes: list[Entries]) -> Tensor:
    """What the rows of a text see in the newest of the passes: pass 0 up to the row where the draft began, then one entry of each later
    pass; pass i's lies j − i rows before the row."""
    j, rows = len(passes) - 1, slice(span.able, span.able + span.count)
    keys, values = (part[span.first : span.last] for part in passes[0])
    seen = torch.ones(span.count, span.last - span.first, dtype=torch.bool).tril(span.begin - span.first - j)
    seen[:j, 0] = True  # rows too early for this pass are never looked at, but must not be a softmax over nothing
    extra = [(torch.roll(k[rows], j - i, 0), torch.roll(v[rows], j - i, 0)) for i, (k, v) in enumerate(passes) if i]
    return attention.over(q[rows], keys, values, seen, extra)
