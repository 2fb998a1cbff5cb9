"""One flat forward: which rows it has, where they stand and what they see.

    segment 0 (row table entry 7)     segment 1 (row 2)
    known known known | node node     known
    └ positions 40 41 42 | 43 43      └ position 9

A *segment* is one sequence's share: its known tokens, then its guessed nodes. Segments lie one after the other in the flat row
order. Prefill, chunked prefill, decode and verify differ only in these numbers.

What a row sees. Known row j of a segment (j = 0, 1, …) stands at position `context + j` and sees positions 0 … context + j.
A node sees every known row of its segment and everything before it, its ancestors, and itself; a node at depth d (1 = child of the
last known token) stands at position `context + known - 1 + d`. Every row therefore sees exactly one entry for each position
0 … its own position: this is what lets attention reduce in the same order for a tree as for plain decoding.
The entry for a position p ≤ context + known - 1 lies in slot `page(p)`; that of an ancestor node lies in the ancestor's own slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forerun.engine.kv import Table
from forerun.engine.rows import Share

_OWN = torch.zeros(0, dtype=torch.int32)


@dataclasses.dataclass(slots=True)
class Batch:
    """All tensors live on the backend's device and are contiguous. n rows, s segments, m rows whose logits are needed."""

    tokens: Tensor
    """int32 [n]"""
    positions: Tensor
    """int32 [n]"""
    slots: Tensor
    """int32 [n]: where the row's KV is written, page · page_tokens + offset"""
    parents: Tensor
    """int32 [n]: −1 for known rows and for nodes that hang off the last known token; else the flat index of the parent node's row"""
    starts: Tensor
    """int32 [s+1]: segment i is rows starts[i] … starts[i+1]−1"""
    known: Tensor
    """int32 [s]: how many rows of the segment are known tokens (≥ 1)"""
    context: Tensor
    """int32 [s]: positions whose KV was written before this step"""
    pages: Tensor
    """int32 [s, p]: page ids in order of position, padded with 0"""
    logit_rows: Tensor
    """int32 [m]: flat row indices, ascending"""
    sight: Tensor = _OWN
    """int32 [n]: the last position that a row sees, where some function of the batch lets rows see beyond their own; else empty"""

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def segments(self) -> int:
        return self.known.shape[0]


def empty_batch() -> Batch:
    """A batch of no rows (the shape that warm-up and tests start from)."""
    none = torch.zeros(0, dtype=torch.int32)
    return Batch(none, none, none, none, torch.zeros(1, dtype=torch.int32), none, none, torch.zeros(0, 1, dtype=torch.int32), none)


def build(shares: Sequence[Share], table: Table, device: torch.device) -> Batch:
    """The flat forward of a step: plan and drafts as integers. Logits are asked for at each share's last `scored` known rows and at its
    nodes. A known token at position p is written to slot(p), node i of a draft to the slot of position `context + known + i`."""
    facts = np.array([(s.row.number, s.row.computed, s.known, s.scored, s.draft.count) for s in shares], np.int64)
    numbers, context, known, scored, nodes = facts.reshape(-1, 5).T
    counts = known + nodes
    starts = _starts(counts)
    tokens: list[int] = []
    for share in shares:
        row = share.row
        tokens += row.tokens[row.computed : row.computed + share.known]
        tokens += share.draft.token
    places = _ranges(context, counts)
    slots = table.slots(np.repeat(numbers, counts), places)
    parents = np.full(len(tokens), -1, np.int32)
    if nodes.any():
        _hang(shares, (starts[:-1] + known).tolist(), places, parents)
    width = -(-int((context + counts).max(initial=1)) // table.page_tokens)
    logit_rows = _ranges(starts[:-1] + known - scored, scored + nodes)
    return _on(device, tokens, places, slots, parents, starts, known, context, table.pages[numbers, :width], logit_rows)


def feed(
    rows: Sequence[int], context: Sequence[int], tokens: Sequence[Sequence[int]], ends: Sequence[bool], table: Table, device: torch.device
) -> Batch:
    """A forward of known tokens alone, for a draft model: `tokens[i]` go on from position `context[i]` of row `rows[i]` of the table.
    Logits are asked for at the last token of each row that `ends`."""
    numbers, before = np.array(rows, np.int64), np.array(context, np.int64)
    known = np.array([len(each) for each in tokens], np.int64)
    starts = _starts(known)
    places = _ranges(before, known)
    slots = table.slots(np.repeat(numbers, known), places)
    width = -(-int((before + known).max(initial=1)) // table.page_tokens)
    logit_rows = starts[1:][np.array(ends, bool)] - 1
    flat = [token for each in tokens for token in each]
    return _on(device, flat, places, slots, np.full(len(flat), -1), starts, known, before, table.pages[numbers, :width], logit_rows)


class Stem(NamedTuple):
    """A row's part of a drafter's forward: `known` entries from position `context` on, then nodes that hang off the last of them
    (`parents`: −1 = it, else a node before). `scored`: which of these rows need logits, counted from the first. `base`: the pool has no
    entries below it; a multiple of a page."""

    row: int
    base: int
    context: int
    known: int
    parents: Sequence[int]
    scored: Sequence[int]


def grow(stems: Sequence[Stem], table: Table, device: torch.device) -> Batch:
    """A forward in a pool of the drafter's own. Positions are counted from `base`, and so are the pages that are seen, so that a row whose
    entries begin late is like any other. `tokens` are 0 … n−1: the places where the rows' inputs were put."""
    # Integers of few rows, one after the other: a draft makes several such batches, and functions of arrays are slow where they are cold.
    size = table.page_tokens
    width = max(-(-(stem.context - stem.base + stem.known + len(stem.parents)) // size) for stem in stems)
    positions, slots, parents, logit_rows = list[int](), list[int](), list[int](), list[int]()
    starts, pages = [0], list[list[int]]()
    for stem in stems:
        first, context, known = starts[-1], stem.context - stem.base, stem.known
        begin, end = stem.base // size, context + known
        seen = table.pages[stem.row, begin : begin + width].tolist()
        pages.append(seen + [0] * (width - len(seen)))
        depths: list[int] = []
        for parent in stem.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        positions += [*range(context, end), *(end + depth for depth in depths)]
        parents += [-1] * known + [-1 if parent < 0 else first + known + parent for parent in stem.parents]
        slots += [seen[at // size] * size + at % size for at in range(context, end + len(depths))]
        logit_rows += [first + row for row in stem.scored]
        starts.append(len(positions))
    counts, before = [stem.known for stem in stems], [stem.context - stem.base for stem in stems]
    return _on(device, range(len(positions)), positions, slots, parents, starts, counts, before, pages, logit_rows)


def _on(device: torch.device, *fields: ArrayLike) -> Batch:
    """The fields of a batch, in their order, as it wants them: int32 and contiguous."""
    return Batch(*(torch.from_numpy(np.ascontiguousarray(field, np.int32)).to(device) for field in fields))


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of so many rows begins, and where the last ones end."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """first[0] … first[0]+count[0]−1, first[1] … and so on, one after the other."""
    ends = np.cumsum(count)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - ends + count, count)


def _hang(shares: Sequence[Share], roots: list[int], positions: NDArray[np.int64], parents: NDArray[np.int32]) -> None:
    """Set position and flat parent index of every node; `roots[i]` is the flat index of share i's first node."""
    for share, at in zip(shares, roots):
        draft = share.draft
        if draft.count:
            last = share.row.computed + share.known - 1
            positions[at : at + draft.count] = [last + depth for depth in draft.depths()]
            parents[at : at + draft.count] = [-1 if parent < 0 else at + parent for parent in draft.parent]
