"""Where a row's positions lie: the page table, and the copies that make an accepted path contiguous.

Owns the worker's copy of every row's page ids. Does not know which pages are free, shared or cached (the front does), nor what they
hold.

    position   0 … P−1     P … 2P−1    …        slot(position) = page[position // P] · P + position % P
    page       pages[r, 0] pages[r, 1] …        P = page_tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class Table:
    """Page ids of `rows` rows of at most `longest` positions each."""

    def __init__(self, rows: int, longest: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages: Ints = np.zeros((rows, -(-longest // page_tokens)), np.int32)
        self.granted = [0] * rows

    def clear(self, row: int) -> None:
        self.granted[row] = 0

    def grant(self, row: int, pages: Sequence[int]) -> None:
        """Append pages to a row's. ValueError when it would get longer than a row can be."""
        first = self.granted[row]
        last = first + len(pages)
        if last > self.pages.shape[1]:
            raise ValueError(f"row {row} was given {last} pages, {self.pages.shape[1]} are the most that the longest sequence can use")
        self.pages[row, first:last] = pages
        self.granted[row] = last

    def reach(self, row: int) -> int:
        """How many positions the row's pages hold."""
        return self.granted[row] * self.page_tokens

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> Ints:
        """Slots of (row, position) pairs, int32 of their shape."""
        page, offset = np.divmod(positions, self.page_tokens)
        return (self.pages[rows, page] * self.page_tokens + offset).astype(np.int32)


class Moves:
    """Entries that the accepted paths of a step need moved, of all its rows, in page order: `rows[i]`, from position `source[i]` to
    `target[i]`."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.source: list[int] = []
        self.target: list[int] = []

    def add(self, row: int, first: int, path: Sequence[int]) -> None:
        """Node i of a draft was written to place `first + i`; the path's d-th node (d = 0, 1, …) belongs at `first + d`. A parent comes
        before its child, so a source is never before its target, and a path along the first nodes of the draft needs no copy at all."""
        if not path or path[-1] < len(path):
            return
        wrong = [(first + node, first + depth) for depth, node in enumerate(path) if node != depth]
        self.rows += [row] * len(wrong)
        self.source += [source for source, _ in wrong]
        self.target += [target for _, target in wrong]

    def slots(self, table: Table) -> tuple[Ints, Ints]:
        """Where they are and where they belong."""
        rows = np.asarray(self.rows, np.int64)
        return table.slots(rows, np.asarray(self.source, np.int64)), table.slots(rows, np.asarray(self.target, np.int64))
