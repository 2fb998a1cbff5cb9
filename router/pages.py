"""Page ids and how many sequences use each: the free list of one replica's KV pool.

    free ──take──▶ used (count ≥ 1) ──give──▶ free
                      ▲      │ give, and the page is *kept*
                share │      ▼
                     idle (count 0, kept: its content is a cached prefix) ──lose──▶ free

Knows nothing of tokens: which pages are worth keeping is the prefix index's business.
"""

from __future__ import annotations


class PagePool:
    """Invariant: free + idle + used = total; a page on the free list is neither kept nor counted."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.idle = 0
        """pages that nobody uses but the prefix index keeps"""
        self._free = list(range(total - 1, -1, -1))
        self._count = [0] * total
        self._kept = bytearray(total)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free) - self.idle

    @property
    def available(self) -> int:
        """Pages that can be had: free ones, and idle ones once they are evicted."""
        return len(self._free) + self.idle

    def count(self, page: int) -> int:
        """Sequences that use the page."""
        return self._count[page]

    def take(self, pages: int) -> list[int]:
        """So many fresh pages. The caller has made sure that they are free."""
        assert pages <= len(self._free), f"{pages} pages taken of {len(self._free)} free ones"
        taken = [self._free.pop() for _ in range(pages)]
        for page in taken:
            self._count[page] = 1
        return taken

    def share(self, pages: list[int]) -> None:
        """One more sequence uses these kept pages."""
        for page in pages:
            assert self._kept[page], f"page {page} is shared but nobody keeps it"
            if self._count[page] == 0:
                self.idle -= 1
            self._count[page] += 1

    def give(self, pages: list[int]) -> list[int]:
        """One sequence less uses these pages. Returns those that are idle from now on; the others nobody uses are free."""
        resting: list[int] = []
        for page in pages:
            self._count[page] -= 1
            assert self._count[page] >= 0, f"page {page} was given back twice"
            if self._count[page] == 0:
                if self._kept[page]:
                    self.idle += 1
                    resting.append(page)
                else:
                    self._free.append(page)
        return resting

    def keep(self, page: int) -> None:
        """The page's content is indexed: it stays when nobody uses it any more."""
        assert self._count[page] > 0 and not self._kept[page], f"page {page} is not in use or already kept"
        self._kept[page] = 1

    def lose(self, page: int) -> None:
        """The index lets go of an idle page."""
        assert self._kept[page] and self._count[page] == 0, f"page {page} is in use or was not kept"
        self._kept[page] = 0
        self.idle -= 1
        self._free.append(page)
