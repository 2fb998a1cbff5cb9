"""Which pages hold which prefix: a trie whose edges are the tokens of one whole page.

    salt ── [t0 … t15] page 7 ── [t16 … t31] page 3 ── [t32 … t47] page 9
                                └─ [t16 … t31'] page 12

A page is found by the path of *all* tokens before it and its own: parents are compared by identity and a page's tokens byte by byte
(the dictionary's hash only finds the bucket), so two prefixes can never be mistaken for each other. Prefixes are shared inside one
salt (tenant, adapter) only. A page enters the index after the step that wrote its last position was applied, never before.

Invariant: a sequence that uses an indexed page uses all pages above it, at the same positions. Hence below an idle page everything
is idle, and every idle page can be evicted, leaves first.

Promises: a sequence that is computing its prompt announces the next page it will publish, so that others which need the same one
wait for it instead of computing it again.
"""

from __future__ import annotations

import heapq
from array import array

import msgspec

from forerun.router.pages import PagePool

Salt = tuple[str, str | None]
_MOST_BARE_ROOTS = 4096
"""salts kept at once before those without pages are forgotten"""


class Node:
    """One indexed page. `key`: its tokens, four bytes each. The root of a salt has no parent and no page."""

    __slots__ = ("children", "key", "page", "parent", "salt", "used")

    def __init__(self, parent: Node | None, key: bytes, page: int, salt: Salt) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.salt = salt
        self.children: dict[bytes, Node] = {}
        self.used = 0
        """when it was last given back, in ticks; the older is evicted first"""


class Match(msgspec.Struct, frozen=True):
    """`pages`: those that hold the longest indexed prefix, not yet shared. `tip`: its last node. `promised`: somebody is computing
    the page that would come next."""

    pages: list[int]
    tip: Node
    promised: bool


class PrefixCache:
    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._roots: dict[Salt, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._promises: dict[tuple[Node, bytes], int] = {}
        self._oldest: list[tuple[int, int, Node]] = []
        """heap of (used, page, node) of idle leaves; an entry whose node was used since is stale"""
        self._tick = 0

    def __len__(self) -> int:
        """Pages in the index."""
        return len(self._nodes)

    def key(self, tokens: list[int], index: int) -> bytes:
        """The tokens of page `index`, all of which must be known."""
        start = index * self._page_tokens
        return array("I", tokens[start : start + self._page_tokens]).tobytes()

    def root(self, salt: Salt) -> Node:
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= _MOST_BARE_ROOTS:
                self._roots = {salt: root for salt, root in self._roots.items() if root.children}
            root = self._roots[salt] = Node(None, b"", -1, salt)
        return root

    def match(self, salt: Salt, tokens: list[int]) -> Match:
        """The longest indexed prefix of whole pages that leaves at least one token to compute."""
        node = self.root(salt)
        pages: list[int] = []
        for index in range((len(tokens) - 1) // self._page_tokens):
            key = self.key(tokens, index)
            child = node.children.get(key)
            if child is None:
                return Match(pages, node, (node, key) in self._promises)
            pages.append(child.page)
            node = child
        return Match(pages, node, False)

    def publish(self, tip: Node, key: bytes, page: int) -> Node | None:
        """The page below `tip` was written in full by a sequence that uses it. Returns its node, or None where another sequence is using
        a copy of its own of the same page: then this one stays private (deeper pages too, or the invariant would break)."""
        if tip.parent is None:
            tip = self._roots.setdefault(tip.salt, tip)
        node = tip.children.get(key)
        if node is None:
            node = tip.children[key] = Node(tip, key, page, tip.salt)
        elif self._pool.count(node.page):
            return None
        else:
            # The same tokens were computed twice: the copy that is in use replaces the idle one.
            del self._nodes[node.page]
            self._pool.lose(node.page)
            node.page = page
        self._nodes[page] = node
        self._pool.keep(page)
        return node

    def rest(self, pages: list[int]) -> None:
        """Nobody uses these indexed pages any more (see `PagePool.give`)."""
        self._tick += 1
        for page in pages:
            node = self._nodes[page]
            node.used = self._tick
            if not node.children:
                self._queue(node)

    def evict(self, pages: int) -> None:
        """Free so many idle pages (there are as many), the least recently used first, leaves before what they hang off."""
        while pages:
            used, page, node = heapq.heappop(self._oldest)
            if not self._evictable(used, page, node):
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            del self._nodes[page]
            self._pool.lose(page)
            pages -= 1
            if parent.parent is not None and not parent.children and not self._pool.count(parent.page):
                self._queue(parent)

    def promise(self, tip: Node, key: bytes) -> None:
        """A sequence is about to compute the page below `tip`."""
        self._promises[tip, key] = self._promises.get((tip, key), 0) + 1

    def withdraw(self, tip: Node, key: bytes) -> None:
        """It published the page, or never will."""
        left = self._promises[tip, key] - 1
        if left:
            self._promises[tip, key] = left
        else:
            del self._promises[tip, key]

    def _queue(self, node: Node) -> None:
        if len(self._oldest) > 2 * len(self._nodes) + 64:
            self._oldest = [entry for entry in self._oldest if self._evictable(*entry)]
            heapq.heapify(self._oldest)
        heapq.heappush(self._oldest, (node.used, node.page, node))

    def _evictable(self, used: int, page: int, node: Node) -> bool:
        """False for a stale entry: its node was used since, or is gone, or has another page, or has children again."""
        return self._nodes.get(page) is node and node.used == used and not node.children and not self._pool.count(page)
