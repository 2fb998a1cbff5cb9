"""Which pages a sequence holds, and what of them the prefix index knows: pages and prefixes, seen from an entry.

Owns the pool and the index of one replica. Knows no plans and decides nothing: whoever asks for pages has made sure that they are there.
"""

from __future__ import annotations

from forerun.router.entry import Entry
from forerun.router.pages import PagePool
from forerun.router.prefix import Match, PrefixCache, Salt
from forerun.router.sizes import Sizes


def salt_of(entry: Entry) -> Salt:
    """Prefixes are shared between sequences of one tenant that use one adapter."""
    request = entry.sequence.request
    return request.tenant, request.adapter


class Ledger:
    def __init__(self, sizes: Sizes) -> None:
        self.pool = PagePool(sizes.pages)
        self.prefix = PrefixCache(self.pool, sizes.page_tokens)
        self.version = 0
        """changes whenever more could fit than before: pages were given back, or a prefix was published"""
        self._page_tokens = sizes.page_tokens
        self._reserve = sizes.reserve

    def look(self, entry: Entry) -> Match:
        """What the index has of its tokens."""
        salt = salt_of(entry)
        if not entry.caches or entry.echoes:
            return Match([], self.prefix.root(salt), False)
        return self.prefix.match(salt, entry.sequence.tokens)

    def fits(self, match: Match, positions: int, alone: bool) -> bool:
        """Are there pages for so many positions? The reserve is for rows that already run: who is alone may have it."""
        resting = sum(self.pool.count(page) == 0 for page in match.pages)
        fresh = self._pages_of(positions) - len(match.pages)
        return self.pool.available - resting - fresh >= (0 if alone else self._reserve)

    def seat(self, entry: Entry, match: Match) -> None:
        """It is admitted: it shares what was found and takes pages for the rest of its known tokens."""
        self.pool.share(match.pages)
        entry.goal = len(entry.sequence.tokens)
        entry.pages = match.pages + self._take(self._pages_of(entry.goal) - len(match.pages))
        entry.room = len(entry.pages) * self._page_tokens
        entry.tip, entry.published = match.tip, len(match.pages)
        entry.fed = entry.computed = entry.published * self._page_tokens
        self._promise(entry)

    def short(self, entry: Entry, positions: int) -> int:
        """Pages it lacks to cover so many positions."""
        return max(0, self._pages_of(positions) - len(entry.pages))

    def grow(self, entry: Entry, pages: int) -> list[int]:
        """So many more pages; returns them."""
        granted = self._take(pages)
        entry.pages += granted
        entry.room += pages * self._page_tokens
        return granted

    def landed(self, entry: Entry) -> None:
        """`entry.computed` grew: publish the pages that are full now."""
        full = entry.computed // self._page_tokens
        if full <= entry.published or not entry.caches:
            return
        self._withdraw(entry)
        while entry.published < full:
            index = entry.published
            assert entry.tip is not None
            node = self.prefix.publish(entry.tip, self.prefix.key(entry.sequence.tokens, index), entry.pages[index])
            if node is None:
                break
            entry.tip = node
            entry.published += 1
            self.version += 1
        self._promise(entry)

    def leave(self, entry: Entry) -> None:
        """It gives up everything it holds. What was published stays until it is evicted."""
        self._withdraw(entry)
        # Last page first, so that of a private run the pages at its end are reused first.
        entry.pages.reverse()
        self.prefix.rest(self.pool.give(entry.pages))
        entry.pages, entry.room, entry.tip, entry.published = [], 0, None, 0
        self.version += 1

    def _pages_of(self, positions: int) -> int:
        return -(-positions // self._page_tokens)

    def _take(self, pages: int) -> list[int]:
        missing = pages - self.pool.free
        if missing > 0:
            self.prefix.evict(missing)
        return self.pool.take(pages)

    def _promise(self, entry: Entry) -> None:
        """Only what is known now can be promised: pages of the prompt, not of the answer."""
        index = entry.published
        if entry.caches and entry.tip is not None and entry.computed // self._page_tokens <= index < entry.goal // self._page_tokens:
            entry.promise = self.prefix.key(entry.sequence.tokens, index)
            self.prefix.promise(entry.tip, entry.promise)

    def _withdraw(self, entry: Entry) -> None:
        if entry.promise is not None:
            assert entry.tip is not None
            self.prefix.withdraw(entry.tip, entry.promise)
            entry.promise = None
