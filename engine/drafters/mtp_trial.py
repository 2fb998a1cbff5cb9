"""Which way of reading an MTP module is right: its first norm, its order and what it carries on, tried on what the target writes.

Checkpoints do not say whether the features are those in front of the final norm or behind it, in which order they stand beside the
embedding, and whether the module's own result is carried on with its norm or without. A wrong guess costs acceptance and nothing
else, so nobody would notice. So the target writes a few hundred tokens, the module is asked in every way what comes next, and what agrees
most often is what is used.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.backends.base import PoolSpec
from forerun.engine.batch import Stem, feed, grow
from forerun.engine.drafters.recursive_load import Embed
from forerun.engine.drafters.recursive_net import Net, Stage, Stepped
from forerun.engine.drafters.registry import Host
from forerun.engine.kv import Table

ROWS, LENGTH = 12, 28
"""texts, and their tokens"""
CLEAR = 0.05
"""how much more often another way must agree than the family's usual one"""


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """`pre`: features in front of the final norm; `hidden_first`: [features; embedding]; `normed`: what is carried on went through the
    module's norm; `chained`: a module behind the first reads what the one before made, not the target's features; None = there is none."""

    pre: bool = False
    hidden_first: bool = False
    normed: bool = False
    chained: bool | None = None

    def __str__(self) -> str:
        parts = {"first": "pre" if self.pre else "post", "order": "he" if self.hidden_first else "eh"}
        parts["carry"] = "normed" if self.normed else "raw"
        if self.chained is not None:
            parts["reads"] = "module" if self.chained else "target"
        return ",".join(f"{name}={value}" for name, value in parts.items())


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """What the target wrote: `tokens` [rows][length]; features at each of them but the last, [rows, length − 1, H], in front of the
    final norm and behind it."""

    tokens: list[list[int]]
    before: Tensor
    behind: Tensor


def write(host: Host, rows: int = ROWS, length: int = LENGTH) -> Written:
    """Greedy text of the target from one arbitrary token each, in a pool of its own."""
    model, backend = host.model, host.backend
    size = backend.caps.page_tokens
    length = min(length, model.max_tokens)
    table = Table(rows, length, size)
    pages = -(-length // size)
    for row in range(rows):
        table.grant(row, range(row * pages, (row + 1) * pages))
    pool = backend.pool(model.pool, rows * pages)
    tokens = [[(7919 * (row + 1)) % model.vocab] for row in range(rows)]
    taps: list[Tensor] = []
    for at in range(length - 1):
        host.progress("warming", at, length)
        batch = feed(range(rows), [at] * rows, [[each[-1]] for each in tokens], [True] * rows, table, backend.device)
        output = model.forward(batch, pool, (model.layers - 1, model.layers))
        for each, token in zip(tokens, backend.ops.pick(output.logits, None).tokens.tolist()):
            each.append(token)
        if output.taps is not None:
            taps.append(output.taps)
    both = torch.stack(taps, 1)
    return Written(tokens, both[..., : model.hidden].contiguous(), both[..., model.hidden :].contiguous())


class Trial:
    """Modules over what the target wrote, in a pool of their own. `embeds`, `width`: of the embeddings of each."""

    def __init__(self, written: Written, embeds: Sequence[Embed], width: int, pool: PoolSpec, host: Host) -> None:
        self._written, self._embeds, self._host = written, embeds, host
        backend = host.backend
        self._rows, self._count = len(written.tokens), len(written.tokens[0]) - 1
        pages = -(-(self._count + 1) // backend.caps.page_tokens)
        self._table = Table(self._rows, self._count + 1, backend.caps.page_tokens)
        for row in range(self._rows):
            self._table.grant(row, range(row * pages, (row + 1) * pages))
        self._pool = backend.pool(pool, self._rows * pages)
        self._stage = Stage.open(self._rows * self._count, width, host.model.hidden, backend.device)
        self._ids = torch.tensor(written.tokens, device=backend.device)
        self._shown = range(4, self._count - 2)

    def first(self, nets: Sequence[Net], way: Way) -> float:
        """How often the (first) module says what the target wrote one place behind what it was shown."""
        return self._hits(self._teach(nets, way, 0, self._features(nets, way)), 0)

    def second(self, nets: Sequence[Net], way: Way) -> float:
        """The same of the second place: what the second module says, or where there is one alone what that says of its own result."""
        features = self._features(nets, way)
        taught = self._teach(nets, way, 0, features)
        if len(nets) > 1:
            carried = taught.carried.view(self._rows, self._count, -1) if way.chained else features
            return self._hits(self._teach(nets, way, 1, carried), 1)
        carried, hits = taught.carried.view(self._rows, self._count, -1), 0
        for at in reversed(self._shown):
            # Entries behind this place are written over: the next one is the module's own, seen from here.
            stems = [Stem(row, 0, at + 1, 1, (), (0,)) for row in range(self._rows)]
            said = self._forward(nets, 0, self._ids[:, at + 2], carried[:, at], stems)
            hits += int((said.picks.tokens == self._ids[:, at + 3]).sum())
        return hits / (self._rows * len(self._shown))

    def _features(self, nets: Sequence[Net], way: Way) -> Tensor:
        """[rows, count, W]"""
        features = self._written.before if way.pre else self._written.behind
        return nets[0].fusion(self._host.backend.ops, features.flatten(0, 1)).view(self._rows, self._count, -1)

    def _teach(self, nets: Sequence[Net], way: Way, place: int, carried: Tensor) -> Stepped:
        """A module over whole texts, beside the true tokens: logits at each position whose token it may be shown."""
        known = self._count - place
        stems = [Stem(row, 0, 0, known, (), range(known)) for row in range(self._rows)]
        tokens = self._ids[:, 1 + place : 1 + place + known]
        return self._forward(nets, place, tokens.flatten(), carried[:, :known].flatten(0, 1), stems)

    def _forward(self, nets: Sequence[Net], place: int, tokens: Tensor, carried: Tensor, stems: Sequence[Stem]) -> Stepped:
        ops, device = self._host.backend.ops, self._host.backend.device
        self._host.progress("warming", 0, 1)
        self._stage.put(self._embeds[place](ops, tokens.int()), carried)
        return nets[place].through(ops, self._stage, grow(stems, self._table, device), self._pool)

    def _hits(self, stepped: Stepped, place: int) -> float:
        """The share of the shown positions whose pick is the token that was written there."""
        said = stepped.picks.tokens.view(self._rows, -1)
        hits = sum(int((said[:, at] == self._ids[:, at + 2 + place]).sum()) for at in self._shown)
        return hits / (self._rows * len(self._shown))


def choose(usual: Way, fixed: Sequence[str], first: Callable[[Way], float], second: Callable[[Way], float]) -> tuple[Way, dict[Way, float]]:
    """The best way and what each came to. `fixed`: which of its parts were given and are not tried; `first`, `second`: agreement of a way,
    one place ahead and two. The usual one stays unless another is clearly better."""
    found: dict[Way, float] = {}

    def options(name: str) -> list[bool]:
        return [getattr(usual, name)] if name in fixed else [False, True]

    for pre, hidden_first in itertools.product(options("pre"), options("hidden_first")):
        way = dataclasses.replace(usual, pre=pre, hidden_first=hidden_first)
        found[way] = first(way)
    best = max(found, key=lambda way: found[way] + CLEAR * (way == usual))
    further = [None] if usual.chained is None else options("chained")
    ways = [
        dataclasses.replace(best, normed=normed, chained=chained)
        for normed, chained in itertools.product(options("normed"), further)
        if chained is not False or normed == usual.normed  # what is carried on is then read by nobody
    ]
    if len(ways) > 1:
        seconds = {way: second(way) for way in ways}
        best = max(ways, key=lambda way: seconds[way] + CLEAR * ((way.normed, way.chained) == (usual.normed, usual.chained)))
        found |= seconds
    return best, found
