"""Labels of pages: a page is known to hold a prefix exactly as long as nobody has written something else there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.drafters.held import Held
from forerun.engine.kv import Table

PAGE = 4


def held(rows: int = 2, pages: int = 8) -> tuple[Held, Table]:
    table = Table(rows, PAGE * pages, PAGE)
    return Held(table, pages), table


def fill(held: Held, row: int, tokens: list[int]) -> int:
    """Opens a row and writes what is missing; returns how much was there."""
    there = held.open(row, tokens)
    held.writes(row, there, len(tokens))
    held.wrote(row, tokens, len(tokens))
    return there


def test_a_row_that_comes_back_finds_its_full_pages() -> None:
    labels, table = held()
    table.grant(0, [3, 1, 2])
    tokens = list(range(10))
    assert fill(labels, 0, tokens) == 0
    labels.forget(0)
    assert labels.open(0, tokens) == 8
    assert labels.open(0, tokens[:8]) == 4, "the newest token is never there"
    assert labels.open(0, [*tokens[:5], 99, *tokens[6:]]) == 4, "another second page"


def test_the_same_tokens_behind_another_beginning_are_not_the_same() -> None:
    labels, table = held()
    table.grant(0, [0, 1, 2])
    fill(labels, 0, [1, 1, 1, 1, 5, 6, 7, 8, 9])
    labels.forget(0)
    table.clear(1)
    table.grant(1, [4, 1, 2])
    assert labels.open(1, [2, 2, 2, 2, 5, 6, 7, 8, 9]) == 0
    table.clear(1)
    table.grant(1, [0, 1, 2])
    assert labels.open(1, [1, 1, 1, 1, 5, 6, 7, 8, 9]) == 8


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_said_to_be_there_is_there(data: st.DataObject) -> None:
    """Rows come and go, share pages with the same beginning, get pages of others, and scribble behind their end. `truth` is the pool."""
    labels, table = held(3, 10)
    truth: dict[tuple[int, int], tuple[int, ...]] = {}
    live: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        row = data.draw(st.integers(0, 2))
        if row in live:
            del live[row]
            labels.forget(row)
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=3 * PAGE))
        pages = data.draw(st.permutations(range(10)))[: len(tokens) // PAGE + 2]
        table.clear(row)
        table.grant(row, pages)
        slot = lambda position: (pages[position // PAGE], position % PAGE)  # noqa: B023, E731
        there = labels.open(row, tokens)
        for position in range(there):
            assert truth[slot(position)] == tuple(tokens[: position + 1])
        last = len(tokens) + data.draw(st.integers(0, PAGE))
        labels.writes(row, there, last)
        for position in range(there, last):
            truth[slot(position)] = (*tokens[: position + 1], *[-1] * (position + 1 - len(tokens)))
        labels.wrote(row, tokens, len(tokens))
        live[row] = tokens
