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

import torch
from torch import Tensor


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
