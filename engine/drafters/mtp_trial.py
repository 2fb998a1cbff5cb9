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

from forerun.backends.base import Ops, PoolSpec
from forerun.engine.batch import Stem, feed, grow
from forerun.engine.drafters.recursive_net import Net, Stage
from forerun.engine.drafters.registry import Host
from forerun.engine.kv import Table

ROWS, LENGTH = 12, 28
"""texts, and their tokens"""
CLEAR = 0.05
"""how much more often another way must agree than the family's usual one"""


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """`pre`: features in front of the final norm; `hidden_first`: [features; embedding]; `normed`: what is carried on went through the
    module's norm."""

    pre: bool = False
    hidden_first: bool = False
    normed: bool = False

    def __str__(self) -> str:
        return (
            f"first={'pre' if self.pre else 'post'},order={'he' if self.hidden_first else 'eh'},carry={'normed' if self.normed else 'raw'}"
        )


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


def agreement(written: Written, net: Net, way: Way, embed: Callable[[Ops, Tensor], Tensor], width: int, host: Host) -> tuple[float, float]:
    """How often the module says what the target wrote: one place behind what it was shown, and two (from its own result)."""
    backend, rows, count = host.backend, len(written.tokens), len(written.tokens[0]) - 1
    size = backend.caps.page_tokens
    pages = -(-(count + 1) // size)
    table = Table(rows, (count + 1), size)
    for row in range(rows):
        table.grant(row, range(row * pages, (row + 1) * pages))
    spec = net.layers[0].attention.spec
    kind = PoolSpec(len(net.layers), spec.kv_heads, spec.head_dim, backend.caps.kv_dtypes[0])
    pool = backend.pool(kind, rows * pages)
    stage = Stage.open(rows * count, width, net.carried, backend.device)
    features = written.before if way.pre else written.behind
    hits = [0, 0]
    shown = range(4, count - 2)
    stems = [Stem(row, 0, 0, count, (), range(count)) for row in range(rows)]
    after = torch.tensor([each[1:] for each in written.tokens], dtype=torch.int32, device=backend.device)
    stage.put(embed(backend.ops, after.flatten()), net.fusion(backend.ops, features.flatten(0, 1)))
    first = net.forward(backend.ops, stage, grow(stems, table, backend.device), pool)
    said, carried = first.picks.tokens.view(rows, count), first.carried.view(rows, count, -1)
    ids = torch.tensor(written.tokens)
    hits[0] = sum(int((said[:, at] == ids[:, at + 2]).sum()) for at in shown)
    for at in reversed(shown):
        # Entries behind this place are written over: the next one is the module's own, seen from here.
        stage.put(embed(backend.ops, ids[:, at + 2].int()), carried[:, at])
        second = net.forward(
            backend.ops, stage, grow([Stem(row, 0, at + 1, 1, (), (0,)) for row in range(rows)], table, backend.device), pool
        )
        hits[1] += int((second.picks.tokens == ids[:, at + 3]).sum())
    asked = rows * len(shown)
    return hits[0] / asked, hits[1] / asked


def choose(usual: Way, fixed: Sequence[str], tried: Callable[[Way], tuple[float, float]]) -> tuple[Way, dict[Way, float]]:
    """The best way and what each came to. `fixed`: which of its parts were given and are not tried; `tried`: agreement of a way, one place
    ahead and two. The usual one stays unless another is clearly better."""
    found: dict[Way, float] = {}

    def options(name: str) -> list[bool]:
        return [getattr(usual, name)] if name in fixed else [False, True]

    for pre, hidden_first in itertools.product(options("pre"), options("hidden_first")):
        way = dataclasses.replace(usual, pre=pre, hidden_first=hidden_first)
        found[way] = tried(way)[0]
    best = max(found, key=lambda way: found[way] + CLEAR * (way == usual))
    seconds = {dataclasses.replace(best, normed=normed): 0.0 for normed in options("normed")}
    if len(seconds) > 1:
        seconds = {way: tried(way)[1] for way in seconds}
        best = max(seconds, key=lambda way: seconds[way] + CLEAR * (way.normed == usual.normed))
    return best, found | seconds
