"""Speculative sampling by rejection, as an opt-in: `--acceptance rejection`. The default is `verify.walk` over shared dice.

    Leviathan et al. 2211.17192, Chen et al. 2302.01318; by block: Sun et al. 2403.10444

The distribution of what is generated is the target's, but not, as with the dice, its every token: what comes out for a seed depends on
what was drafted, and how much is drafted depends on load and time. So equal requests may have different answers, and a preemption or
a new worker may change how an answer goes on. What it gains is acceptance where a drafter *draws* its tokens and says from what
(`Draft.law`): 1 − TV(p, q) against at least (1 − TV) / (1 + TV) of shared dice, and a little more by judging a chain as a block. A
drafter that does not say is taken at its word that it would guess the same again (a point mass), and gains nothing.

Chains only: a tree is cut to the path of its first children. Greedy rows are walked as ever; so are rows without a draft.

Whose randomness is whose, since all of it must be independent:
    the pick behind the accepted run   the row's own dice, (seed, index of the token): each index is picked once
    coins                              dice of another seed, (index of the root, node): each root has one draft
    what a drafter draws with          dice of a third seed (`blind`), which the target never throws
Hence pruning may look at anything a drafter of point masses says. What a drafter *draws* may not be cut for what it is; see `Draft.law`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.backends.base import Ops
from forerun.engine import processing
from forerun.engine.drafters.draft import Draft, Room, prune
from forerun.engine.models.model import Output
from forerun.engine.rows import Row, Share
from forerun.engine.sampler import Ask, Choice, Sampler
from forerun.engine.verify import walk
from forerun.kernels.dice import signed
from forerun.messages import SamplingParams

Law = NDArray[np.float64]
"""[V], adds up to 1"""

COINS, DRAFTS = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
"""what makes other seeds of a seed"""


def chances(tokens: Sequence[int], target: Sequence[Law], drawn: Sequence[Law]) -> tuple[list[float], list[float]]:
    """Block verification. `target[i]`: the target's distribution behind i of the k `tokens` (k + 1 of them); `drawn[i]`: that from which
    token i was drawn. Returns w and h, for runs of 1 … k tokens.

    w[i] = min(1, w[i−1] · p(xᵢ)/q(xᵢ)) is what a run of i tokens is worth, and h[i] = R/(R + 1 − w[i]) its chance if no longer run is
    accepted, where R = Σ (w[i]·p − q)⁺ is what it leaves for another token behind it; h[k] = w[k]."""
    worth: list[float] = []
    chance: list[float] = []
    w = 1.0
    for i, token in enumerate(tokens):
        q = float(drawn[i][token])
        w = min(1.0, w * float(target[i][token]) / q) if q > 0.0 else 0.0
        worth.append(w)
        if i + 1 == len(tokens):
            chance.append(w)
        else:
            left = float(np.maximum(w * target[i + 1] - drawn[i + 1], 0.0).sum())
            chance.append(left / (left + (1.0 - w)) if left > 0.0 else 0.0)
    return worth, chance


def rest(worth: float, target: Law, drawn: Law) -> Law:
    """The distribution of the token behind a run that another one was drawn behind, in vain."""
    law = np.maximum(worth * target - drawn, 0.0)
    total = float(law.sum())
    # Where p and q are equal to the last bit a rejection has no chance, but rounding may leave one.
    return law / total if total > 0.0 else target


def judge(tokens: Sequence[int], target: Sequence[Law], drawn: Sequence[Law], coins: Sequence[float]) -> tuple[int, Law]:
    """How many tokens are accepted, the longest run whose coin (uniform in [0, 1)) falls below its chance, and the distribution of the
    one that follows them."""
    worth, chance = chances(tokens, target, drawn)
    accepted = max((i + 1 for i, (coin, h) in enumerate(zip(coins, chance, strict=True)) if coin < h), default=0)
    if accepted == len(tokens):
        return accepted, target[accepted]
    return accepted, rest(worth[accepted - 1] if accepted else 1.0, target[accepted], drawn[accepted])


def point(token: int, vocab: int) -> Law:
    """Certainty."""
    law = np.zeros(vocab)
    law[token] = 1.0
    return law


def fit(draft: Draft, room: Room) -> Draft:
    """The part of a draft that there is room for, as `draft.prune`: the path of first children that are no probes. A drawn chain is cut by
    numbers that were known before it was drawn."""
    nodes: list[int] = []
    for node, (parent, probe) in enumerate(zip(draft.parent, draft.probe)):
        if parent == (nodes[-1] if nodes else -1) and not probe:
            nodes.append(node)
    if draft.law:
        count = min(len(nodes), room.nodes, room.depth)
        return dataclasses.replace(Draft.chain(draft.token[:count], draft.confidence[:count]), law=draft.law[:count])
    chain = Draft.chain([draft.token[node] for node in nodes], [draft.confidence[node] for node in nodes])
    return prune(dataclasses.replace(chain, source=[draft.source[node] for node in nodes] if draft.source else ()), room)


def blind(params: SamplingParams) -> SamplingParams:
    """What a drafter is told of a row's parameters: not the seed of its dice."""
    return msgspec.structs.replace(params, seed=params.seed ^ DRAFTS)


class Rejection:
    """Decides for sampled rows; an `Accept` (`verify.py`)."""

    def __init__(self, ops: Ops, sampler: Sampler) -> None:
        self._ops = ops
        self._sampler = sampler

    def __call__(self, share: Share, asks: Sequence[Ask], picked: list[Choice], output: Output) -> list[int]:
        """asks, picked: of the root and each node of a chain. Returns the accepted nodes; the last pick of the run, which followed from the
        shared dice alone, is replaced by the one that this rule draws, and accepted nodes have their own token and log-probability."""
        row, draft = share.row, share.draft
        if not row.params.sample:
            return walk(draft, [choice.token for choice in picked])
        sound = next((place for place, choice in enumerate(picked) if choice.error), len(picked))
        tokens = draft.token[: max(0, sound - 1)]
        if not tokens:
            return []
        scored = [self._scores(output.logits, ask) for ask in asks[: len(tokens) + 1]]
        target = [np.exp(scores.astype(np.float64)) for scores in scored]
        target = [law / law.sum() for law in target]
        drawn = draft.law or [point(token, target[0].size) for token in tokens]
        accepted, law = judge(tokens, target, drawn, self._coins(row, len(tokens)))
        for place, token in enumerate([*tokens[:accepted], self._draw(law, asks[accepted])]):
            choice = picked[place]
            picked[place] = Choice(token, processing.single(float(scored[place][token])), choice.top)
        return list(range(accepted))

    def _scores(self, logits: Tensor, ask: Ask) -> processing.Scores:
        """Log-probabilities [V] after processing, −∞ where a token is excluded."""
        scores = self._sampler.processed(logits[ask.at].cpu().numpy(), ask)
        ids = processing.narrow(scores, ask.row.params)
        kept = np.full_like(scores, -np.inf)
        kept[ids] = scores[ids] - np.float32(processing.log_normalizer(scores[ids]))
        return kept

    def _coins(self, row: Row, count: int) -> list[float]:
        """u = exp(−exp(−g)) of Gumbel g."""
        seeds = torch.full((count,), signed(row.params.seed ^ COINS))
        noise = self._ops.noise_at(seeds, torch.full((count,), row.generated), torch.arange(count)).cpu().double()
        uniform: list[float] = torch.exp(-torch.exp(-noise)).tolist()
        return uniform

    def _draw(self, law: Law, ask: Ask) -> int:
        """A token of this distribution, by the row's own dice."""
        ids = np.flatnonzero(law)
        seeds, indices = torch.full((len(ids),), signed(ask.row.params.seed)), torch.full((len(ids),), ask.index)
        noise = self._ops.noise_at(seeds, indices, torch.from_numpy(ids)).cpu().numpy()
        return int(ids[np.argmax(np.log(law[ids]).astype(np.float32) + noise)])
