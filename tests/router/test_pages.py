from __future__ import annotations

import pytest

from forerun.router.pages import PagePool


def test_pages_go_round() -> None:
    pool = PagePool(4)
    a = pool.take(3)
    assert len(set(a)) == 3
    assert (pool.free, pool.used, pool.idle, pool.available) == (1, 3, 0, 1)
    assert pool.give(a) == []
    assert (pool.free, pool.used) == (4, 0)


def test_a_shared_page_stays_until_the_last_user_gives_it() -> None:
    pool = PagePool(2)
    [page] = pool.take(1)
    pool.keep(page)
    pool.share([page])
    assert pool.count(page) == 2
    assert pool.give([page]) == []
    assert pool.give([page]) == [page]
    assert (pool.idle, pool.free, pool.available) == (1, 1, 2)
    pool.share([page])
    assert (pool.idle, pool.used) == (0, 1)
    pool.give([page])
    pool.lose(page)
    assert (pool.idle, pool.free) == (0, 2)


def test_misuse_is_caught() -> None:
    pool = PagePool(2)
    [page] = pool.take(1)
    with pytest.raises(AssertionError, match="nobody keeps it"):
        pool.share([page])
    with pytest.raises(AssertionError, match="2 pages taken of 1"):
        pool.take(2)
    pool.give([page])
    with pytest.raises(AssertionError, match="twice"):
        pool.give([page])
    with pytest.raises(AssertionError, match="not in use"):
        pool.keep(page)
