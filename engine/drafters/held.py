"""Which pages of a drafter's own pool hold which prefix.

The page ids are the target's, what lies under them in another pool is not: a drafter fills its pool late, or never. So it keeps a label for
each page: a hash of all tokens up to the page's end, if all of their entries are there. A row that comes back, or shares its beginning
with another, finds what was computed before; a page that somebody writes to loses its label first. A wrong label (hashes may collide)
costs acceptance and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.engine.kv import Table

_NONE = 0


class Held:
    """`pages`: how many there are. Rows are known by their number in the table."""

    def __init__(self, table: Table, pages: int) -> None:
        self._table = table
        self._size = table.page_tokens
        self._labels = [_NONE] * pages
        self._rows: dict[int, list[int]] = {}
        """labels of the leading pages of each row that are complete"""

    def open(self, row: int, tokens: Sequence[int]) -> int:
        """A row begins. How many of its leading tokens have their entries already; the newest never has."""
        labels: list[int] = []
        size, pages = self._size, self._table.pages[row]
        while (len(labels) + 1) * size < len(tokens):
            label = self._label(labels, tokens)
            if self._labels[pages[len(labels)]] != label:
                break
            labels.append(label)
        self._rows[row] = labels
        return len(labels) * size

    def writes(self, row: int, first: int, last: int) -> None:
        """Entries first … last−1 of the row are about to be written."""
        pages = self._table.pages[row]
        for place in range(first // self._size, (last - 1) // self._size + 1):
            self._labels[pages[place]] = _NONE

    def wrote(self, row: int, tokens: Sequence[int], count: int) -> None:
        """The entries of the row's first `count` tokens are there."""
        labels, pages = self._rows[row], self._table.pages[row]
        while (len(labels) + 1) * self._size <= count:
            label = self._label(labels, tokens)
            self._labels[pages[len(labels)]] = label
            labels.append(label)

    def forget(self, row: int) -> None:
        """The row is gone; what it left may still be of use."""
        self._rows.pop(row, None)

    def _label(self, labels: Sequence[int], tokens: Sequence[int]) -> int:
        """Of the page behind those with these labels."""
        first = len(labels) * self._size
        return hash((labels[-1] if labels else 0, *tokens[first : first + self._size])) or 1
