"""A table of n-grams: `forerun serve --speculator suffix+grams=DIR`.

Nothing is trained. What the target would say greedily behind each place of the text, turns as well as answers, is counted by its context
of one, two and three tokens, and a context's chances are those of the shorter one corrected by what was seen behind the longer (absolute
discounting: Ney, Essen, Kneser 1994):

    p(x | a b c) = max(n(a b c x) − D, 0) / n(a b c)  +  D · kinds(a b c) / n(a b c) · p(x | b c)        kinds: different x behind a b c
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forerun.drafting import fingerprint
from forerun.engine.drafters.grams import FOLLOWERS, MASKS, MOST_VOCAB, ORDER, SURE, WORD, Table
from forerun.engine.drafters.vocabulary import texts
from forerun.train.kinds.registry import Setting
from forerun.train.kinds.source import facts, write
from forerun.train.shards import Record

DISCOUNT = 0.5
LEAST_CHANCE = 0.02
"""a token that follows more rarely is not remembered"""
Keys = NDArray[np.int64]


def contexts(record: Record) -> Keys:
    """int64 [generated]: the context of `ORDER` tokens, or as many as there are, behind which each token was generated."""
    stored = np.concatenate([np.zeros(ORDER, np.int64), record.tokens.astype(np.int64) + 1])
    first = record.prompt
    keys = np.zeros(record.generated, np.int64)
    for back in range(ORDER):
        keys |= stored[first + back : first + back + record.generated] << WORD * (ORDER - 1 - back)
    return keys


class Grams:
    """`least`: times that a context of two tokens and more must have been seen. `tokenizer`: the target's fingerprint, "" = not known."""

    def __init__(self, text: Sequence[Record], vocab: int, least: int, tokenizer: str = "") -> None:
        self.net: nn.ModuleList = nn.ModuleList()
        keys = np.concatenate([contexts(record) for record in text])
        goals = np.concatenate([record.candidates[:, 0].astype(np.int64) for record in text])
        self._table = dataclasses.replace(count(keys, goals, vocab, least), tokenizer=tokenizer)
        self._best = dict(zip(self._table.keys.tolist(), self._table.tokens[:, 0].tolist()))
        covers = float(np.isin(goals, self._table.tokens).mean())
        self.facts = facts(self.net, "grams", vocab, covers) | {"parameters": int((self._table.tokens >= 0).sum())}

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("the table of n-grams")
        group.add_argument("--least", type=int, default=2, help="times that a context of several tokens was seen (default: %(default)s)")
        parser.set_defaults(epochs=0)

    @staticmethod
    def open(asked: argparse.Namespace, setting: Setting) -> Grams:
        if asked.least < 1:
            raise ValueError(f"--least {asked.least}: a context that was never seen has nothing behind it, use --least 1")
        config = json.loads((setting.target / "config.json").read_text())
        vocab = int(config.get("text_config", config)["vocab_size"])
        if vocab > MOST_VOCAB:
            raise ValueError(f"a table of n-grams holds {MOST_VOCAB:,} different tokens at the most, this target has {vocab:,}: use a head")
        return Grams([*setting.text, *setting.turns], vocab, asked.least, fingerprint(texts(setting.target)))

    def loss(self, batch: Sequence[Record]) -> Tensor:
        """Nothing is to become smaller: all was counted when this was opened."""
        return torch.zeros((), requires_grad=True)

    def hits(self, record: Record, depth: int) -> NDArray[np.bool_]:
        """A guess depends on the tokens before it alone, wherever the draft began."""
        keys = contexts(record).tolist()
        found = (next((self._best[key & mask] for mask in MASKS if key & mask in self._best), -1) for key in keys)
        right = np.fromiter(found, np.int64, len(keys)) == record.tokens[record.prompt :]
        return np.stack([np.concatenate([right[d:], np.zeros(min(d, len(right)), bool)]) for d in range(depth)], 1)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def config(self) -> dict[str, Any]:
        return {"model_type": "grams", "vocab_size": self._table.vocab, "tokenizer_fingerprint": self._table.tokenizer}

    def save(self, folder: Path) -> None:
        tensors = {name: torch.from_numpy(getattr(self._table, name)) for name in ("keys", "tokens", "chances")}
        write(folder, self.config(), tensors)


def count(keys: Keys, goals: Keys, vocab: int, least: int) -> Table:
    """keys [n]: contexts; goals [n]: what the target says there. The table, sorted by key."""
    known: Keys = np.zeros(0, np.int64)
    tokens, chances = np.zeros((0, FOLLOWERS), np.int64), np.zeros((0, FOLLOWERS))
    whole: list[tuple[Keys, Keys, NDArray[np.float64]]] = []
    for order in range(1, ORDER + 1):
        own = keys & MASKS[ORDER - order]
        enough = own >> WORD * (order - 1) > 0  # as many tokens as that stood before
        seen = _seen(own[enough], goals[enough], least if order > 1 else 1)
        known, tokens, chances = _smoothed(*seen, known, tokens, chances, MASKS[ORDER - order + 1] if order > 1 else 0)
        whole.append((known, tokens, chances))
    known, tokens, chances = (np.concatenate(parts) for parts in zip(*whole))
    tokens[chances < LEAST_CHANCE] = -1
    worth = tokens[:, 0] >= 0
    known, tokens, stored = known[worth], tokens[worth], np.rint(chances[worth] * SURE)
    stored[tokens < 0] = 0
    order_of = np.argsort(known)
    return Table(known[order_of], tokens[order_of].astype(np.int32), stored[order_of].astype(np.uint8), vocab)


def _seen(keys: Keys, goals: Keys, least: int) -> tuple[Keys, Keys, NDArray[np.int64]]:
    """(contexts, goals, times) of all pairs there are, in ascending order; of contexts that were seen `least` times."""
    contexts, goals, times = _added(keys, goals, np.ones(len(keys), np.int64))
    totals = _each(contexts, times)
    kept = totals >= least
    return contexts[kept], goals[kept], times[kept]


def _smoothed(
    contexts: Keys, goals: Keys, times: NDArray[np.int64], known: Keys, tokens: Keys, chances: NDArray[np.float64], mask: int
) -> tuple[Keys, Keys, NDArray[np.float64]]:
    """The likeliest followers of each context, chances corrected by those behind the shorter contexts `known` [m], `tokens`, `chances`
    [m, FOLLOWERS], which are these contexts under `mask`; 0 = there are none."""
    totals, kinds = _each(contexts, times), _each(contexts, np.ones(len(times), np.int64))
    shares = np.maximum(times - DISCOUNT, 0.0) / totals
    own, first = np.unique(contexts, return_index=True)
    if mask and len(own):
        place = np.searchsorted(known, own & mask)
        left = (DISCOUNT * kinds / totals)[first]
        contexts = np.concatenate([contexts, np.repeat(own, FOLLOWERS)])
        goals = np.concatenate([goals, tokens[place].ravel()])
        shares = np.concatenate([shares, (left[:, None] * chances[place]).ravel()])
        contexts, goals, shares = _added(contexts, goals, shares)
    order = np.lexsort((-shares, contexts))
    contexts, goals, shares = contexts[order], goals[order], shares[order]
    row = np.searchsorted(own, contexts)
    rank = np.arange(len(contexts)) - np.searchsorted(contexts, own)[row]
    best = rank < FOLLOWERS
    found, chance = np.full((len(own), FOLLOWERS), -1, np.int64), np.zeros((len(own), FOLLOWERS))
    found[row[best], rank[best]], chance[row[best], rank[best]] = goals[best], shares[best]
    return own, found, chance


def _added(contexts: Keys, goals: Keys, values: NDArray[Any]) -> tuple[Keys, Keys, NDArray[Any]]:
    """Equal pairs as one, in ascending order, their values added up."""
    order = np.lexsort((goals, contexts))
    contexts, goals, values = contexts[order], goals[order], values[order]
    new = np.flatnonzero(np.diff(contexts, prepend=-1) | np.diff(goals, prepend=-2))
    return contexts[new], goals[new], np.add.reduceat(values, new) if len(new) else values


def _each(contexts: Keys, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each pair the sum over its context, which stand side by side."""
    _, place, sizes = np.unique(contexts, return_inverse=True, return_counts=True)
    sums = np.bincount(place, values, len(sizes)).astype(np.int64)
    return np.asarray(sums[place])
