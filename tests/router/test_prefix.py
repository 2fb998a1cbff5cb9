from __future__ import annotations

import random

from forerun.router.pages import PagePool
from forerun.router.prefix import _MOST_BARE_ROOTS, Node, PrefixCache

SALT = ("", None)


class Shelf:
    """A pool and an index of pages of 2 tokens."""

    def __init__(self, pages: int = 8) -> None:
        self.pool = PagePool(pages)
        self.prefix = PrefixCache(self.pool, 2)

    def store(self, tokens: list[int], salt: tuple[str, str | None] = SALT) -> list[int]:
        """As a sequence would: share what is there, compute the rest, publish it. Returns the pages it holds."""
        match = self.prefix.match(salt, [*tokens, 0])
        self.pool.share(match.pages)
        missing = len(tokens) // 2 - len(match.pages)
        if missing > self.pool.free:
            self.prefix.evict(missing - self.pool.free)
        fresh = self.pool.take(missing)
        tip = match.tip
        for page in fresh:
            node = self.prefix.publish(tip, self.prefix.key(tokens, len(match.pages) + fresh.index(page)), page)
            assert node is not None
            tip = node
        return match.pages + fresh

    def end(self, pages: list[int]) -> None:
        self.prefix.rest(self.pool.give(pages))

    def found(self, tokens: list[int], salt: tuple[str, str | None] = SALT) -> int:
        return len(self.prefix.match(salt, tokens).pages)


def test_a_full_hit_leaves_a_token_to_compute() -> None:
    shelf = Shelf()
    shelf.store([1, 2, 3, 4])
    assert [shelf.found([1, 2, 3, 4][:n]) for n in range(1, 5)] == [0, 0, 1, 1]
    assert shelf.found([1, 2, 3, 4, 5]) == 2


def test_the_same_page_after_another_prefix_is_another_page() -> None:
    shelf = Shelf()
    a = shelf.store([1, 1, 7, 7])
    b = shelf.store([2, 2, 7, 7])
    assert not set(a) & set(b)
    assert shelf.prefix.match(SALT, [2, 2, 7, 7, 0]).pages == b


def test_nothing_is_found_across_salts() -> None:
    shelf = Shelf()
    shelf.store([1, 2, 3, 4], ("alice", None))
    assert shelf.found([1, 2, 3, 4, 5], ("alice", None)) == 2
    assert shelf.found([1, 2, 3, 4, 5], ("bob", None)) == 0
    assert shelf.found([1, 2, 3, 4, 5], ("alice", "lora")) == 0


def test_equal_hashes_are_not_equal_prefixes() -> None:
    """The bucket is found by hash, the page by comparing its tokens."""

    class Colliding(bytes):
        def __hash__(self) -> int:
            return 1

    shelf = Shelf()
    pages = shelf.pool.take(2)
    root = shelf.prefix.root(SALT)
    first = shelf.prefix.publish(root, Colliding(b"a"), pages[0])
    second = shelf.prefix.publish(root, Colliding(b"b"), pages[1])
    assert first is not None
    assert second is not None
    assert first is not second


def test_eviction_takes_the_least_recently_used_and_leaves_first() -> None:
    shelf = Shelf(6)
    old, new = shelf.store([1, 1, 2, 2, 3, 3]), shelf.store([5, 5, 6, 6, 7, 7])
    shelf.end(old)
    shelf.end(new)
    shelf.prefix.evict(1)
    assert (shelf.found([1, 1, 2, 2, 3, 3, 0]), shelf.found([5, 5, 6, 6, 7, 7, 0])) == (2, 3)
    shelf.prefix.evict(2)
    assert (shelf.found([1, 1, 2, 2, 3, 3, 0]), shelf.found([5, 5, 6, 6, 7, 7, 0])) == (0, 3)
    shelf.prefix.evict(2)
    assert shelf.found([5, 5, 6, 6, 7, 7, 0]) == 1


def test_use_makes_a_prefix_young_again() -> None:
    shelf = Shelf(4)
    shelf.end(shelf.store([1, 1, 2, 2]))
    shelf.end(shelf.store([5, 5, 6, 6]))
    shelf.end(shelf.store([1, 1, 2, 2]))
    shelf.prefix.evict(2)
    assert (shelf.found([1, 1, 2, 2, 0]), shelf.found([5, 5, 6, 6, 0])) == (2, 0)


def test_pages_in_use_are_never_evicted() -> None:
    shelf = Shelf(4)
    trunk = shelf.store([1, 1])
    shelf.end(shelf.store([1, 1, 2, 2]))
    shelf.end(shelf.store([1, 1, 3, 3]))
    assert shelf.pool.available == 3
    shelf.prefix.evict(shelf.pool.idle)
    assert shelf.found([1, 1, 0]) == 1
    assert shelf.pool.idle == 0
    assert shelf.pool.count(trunk[0]) == 1


def test_a_page_computed_twice_replaces_the_idle_copy_and_yields_to_a_used_one() -> None:
    shelf = Shelf()
    [held] = shelf.store([1, 2])
    root, key = shelf.prefix.root(SALT), shelf.prefix.key([1, 2], 0)
    [copy] = shelf.pool.take(1)
    assert shelf.prefix.publish(root, key, copy) is None
    shelf.end([held])
    node = shelf.prefix.publish(root, key, copy)
    assert node is not None
    assert shelf.prefix.match(SALT, [1, 2, 3]).pages == [copy]
    assert shelf.pool.idle == 0
    shelf.end([copy])
    assert len(shelf.prefix) == 1


def test_promises_are_counted() -> None:
    shelf = Shelf()
    tokens = [1, 2, 3]
    tip, key = shelf.prefix.root(SALT), shelf.prefix.key(tokens, 0)
    assert not shelf.prefix.match(SALT, tokens).promised
    shelf.prefix.promise(tip, key)
    shelf.prefix.promise(tip, key)
    shelf.prefix.withdraw(tip, key)
    assert shelf.prefix.match(SALT, tokens).promised
    assert not shelf.prefix.match(SALT, [1, 2]).promised, "that page would leave nothing to compute"
    shelf.prefix.withdraw(tip, key)
    assert not shelf.prefix.match(SALT, tokens).promised


def test_bookkeeping_does_not_grow_with_use() -> None:
    shelf = Shelf()
    for _ in range(1000):
        shelf.end(shelf.store([1, 1, 2, 2]))
    assert len(shelf.prefix._oldest) < 100
    for i in range(3 * _MOST_BARE_ROOTS):
        shelf.found([1, 1, 2], (f"tenant {i}", None))
    assert len(shelf.prefix._roots) <= _MOST_BARE_ROOTS + 1
    assert shelf.found([1, 1, 2, 2, 3]) == 2


def test_a_tip_outlives_its_forgotten_root() -> None:
    shelf = Shelf()
    tip = shelf.prefix.root(("a", None))
    shelf.prefix._roots.clear()
    assert shelf.prefix.publish(tip, shelf.prefix.key([1, 2], 0), shelf.pool.take(1)[0]) is not None
    assert shelf.found([1, 2, 3], ("a", None)) == 1


def test_random_use_agrees_with_a_model() -> None:
    """Every page that is found holds the tokens that were asked for, and nothing is lost but by eviction."""
    rng = random.Random(7)
    shelf = Shelf(12)
    content: dict[int, list[int]] = {}
    held: list[list[int]] = []
    for _ in range(3000):
        tokens = [rng.randint(1, 2) for _ in range(2 * rng.randint(1, 4))]
        match = shelf.prefix.match(SALT, [*tokens, 0])
        for i, page in enumerate(match.pages):
            assert content[page] == tokens[: 2 * i + 2]
        if shelf.pool.available >= 4 and rng.random() < 0.6:
            pages = shelf.store(tokens)
            content.update({page: tokens[: 2 * i + 2] for i, page in enumerate(pages)})
            held.append(pages)
        elif held:
            shelf.end(held.pop(rng.randrange(len(held))))
        nodes: list[Node] = list(shelf.prefix._nodes.values())
        assert all(node.parent is not None and node.parent.children[node.key] is node for node in nodes)
    for pages in held:
        shelf.end(pages)
    shelf.prefix.evict(shelf.pool.idle)
    assert shelf.pool.free == 12
    assert len(shelf.prefix) == 0
