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
    size = table.page_tokens
    tokens, positions, slots, parents, logit_rows = list[int](), list[int](), list[int](), list[int](), list[int]()
    starts, widest = [0], 1
    for share in shares:
        row, known, draft = share.row, share.known, share.draft
        first, begin = starts[-1], row.computed
        end, last = begin + known, begin + known + draft.count
        tokens += row.tokens[begin:end]
        positions += range(begin, end)
        parents += [-1] * known
        if draft.count:
            tokens += draft.token
            positions += [end - 1 + depth for depth in draft.depths()]
            parents += [-1 if parent < 0 else first + known + parent for parent in draft.parent]
        written = table.pages[row.number, begin // size : -(-last // size)].tolist()
        skipped = begin // size * size
        slots += [written[at // size] * size + at % size for at in range(begin - skipped, last - skipped)]
        logit_rows += range(first + known - share.scored, first + known + draft.count)
        starts.append(first + known + draft.count)
        widest = max(widest, -(-last // size))
    known_tokens, context = [share.known for share in shares], [share.row.computed for share in shares]
    pages = table.pages[[share.row.number for share in shares], :widest]
    return _on(device, tokens, positions, slots, parents, starts, known_tokens, context, pages, logit_rows)


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
    """The fields of a batch, in their order, as it wants them: int32 and contiguous. They are parts of one tensor, since each that is made
    or copied to a device by itself takes time."""
    arrays = [np.asarray(field, np.int32) for field in fields]
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    parts = flat.split_with_sizes([array.size for array in arrays])
    return Batch(*(part.view(array.shape) if array.ndim > 1 else part for part, array in zip(parts, arrays)))


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of so many rows begins, and where the last ones end."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """first[0] … first[0]+count[0]−1, first[1] … and so on, one after the other."""
    ends = np.cumsum(count)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - ends + count, count)
