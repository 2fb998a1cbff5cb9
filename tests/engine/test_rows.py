"""What a plan does to the row table, and what a plan that makes no sense does: it ends that row and no other."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.grammar import Grammars, Threads
from forerun.engine.rows import Counts, RowTable
from forerun.messages import Admit, Feed, SamplingParams, StepPlan
from tests.engine.test_identity import RECORDS
from tests.engine.tiny import AtOnce, tables

PAGE = 4


def table() -> RowTable:
    return RowTable(4, 32, 4, 100, PAGE)


def admit(
    row: int = 0, count: int = 6, computed: int = 0, pages: int = 2, prompt: int | None = None, most: int = 10, **changes: object
) -> Admit:
    params = SamplingParams(0, count if prompt is None else prompt, most)
    return Admit(row, list(range(count)), computed, list(range(pages)), params, **changes)  # type: ignore[arg-type]


def test_drops_come_first_then_admissions_then_feeds() -> None:
    rows = table()
    rows.apply(StepPlan(1, [admit(0), admit(1)]))
    shares, errors, gone = rows.apply(StepPlan(2, [admit(0, 3)], [Feed(0, 3), Feed(1, 2)], [0, 3]))
    assert not errors
    assert [row.number for row in gone] == [0] and len(gone[0].tokens) == 6
    assert [(s.row.number, s.known, s.ends) for s in shares] == [(0, 3, True), (1, 2, False)]


def test_what_is_fed_to_a_row_that_is_gone_is_ignored() -> None:
    rows = table()
    rows.apply(StepPlan(1, [admit(0)]))
    assert rows.end(0) is not None and rows.end(0) is None
    assert rows.apply(StepPlan(2, feed=[Feed(0, 1), Feed(2, 1)])) == ([], [], [])


BAD = [
    admit(computed=6),
    admit(computed=3),
    admit(computed=8),
    admit(prompt=0),
    admit(prompt=7),
    admit(prompt=2, most=4),
    admit(count=33, pages=9),
    admit(pages=10),
    admit(adapter="a"),
    Admit(0, [1, 100], 0, [0], SamplingParams(0, 2, 5)),
    Admit(0, [1, -1], 0, [0], SamplingParams(0, 2, 5)),
    Admit(0, [1, 2], 0, [0], SamplingParams(0, 2, 5, logit_bias=((100, 1.0),))),
]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_admission_is_that_rows_error(bad: Admit) -> None:
    rows = table()
    shares, errors, _ = rows.apply(StepPlan(1, [bad, admit(1)], [Feed(0, 1), Feed(1, 1)]))
    assert [e.row for e in errors] == [0] and errors[0].error
    assert [s.row.number for s in shares] == [1]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_admission_leaves_nothing_behind(bad: Admit) -> None:
    """Neither pages nor a matcher, whatever was wrong with it; and the row can be had again."""
    grammars = Grammars(tables, Threads(AtOnce(), AtOnce()))
    rows = RowTable(4, 32, 4, 100, PAGE, grammars)
    ruled = msgspec.structs.replace(bad, params=msgspec.structs.replace(bad.params, grammar=RECORDS))
    rows.apply(StepPlan(1, [ruled]))
    assert repr(rows) == "0 of 4 rows, 0 pages"
    assert not any(compiled.rows for compiled in grammars._compiled.values())
    good = Admit(0, [1, 2], 0, [0], SamplingParams(0, 2, 5, grammar=RECORDS))
    assert rows.apply(StepPlan(2, [good]))[1] == [] and [each.rows for each in grammars._compiled.values()] == [1]
    rows.apply(StepPlan(3, drop=[0]))
    assert [each.rows for each in grammars._compiled.values()] == [0]


def test_a_row_that_is_admitted_twice_ends() -> None:
    rows = table()
    rows.apply(StepPlan(1, [admit(0)]))
    shares, errors, gone = rows.apply(StepPlan(2, [admit(0)], [Feed(0, 1)]))
    assert [e.row for e in errors] == [0] and not shares
    assert [row.number for row in gone] == [0], "or a drafter would keep what it knows of the row for the next one in its place"


@pytest.mark.parametrize("feed", [Feed(0, 0), Feed(0, 7), Feed(0, -1), Feed(0, 1, 0, list(range(50)))])
def test_a_bad_feed_is_that_rows_error(feed: Feed) -> None:
    rows = table()
    rows.apply(StepPlan(1, [admit(0), admit(1)]))
    shares, errors, gone = rows.apply(StepPlan(2, feed=[feed, Feed(1, 1)]))
    assert [e.row for e in errors] == [0] and [row.number for row in gone] == [0]
    assert [s.row.number for s in shares] == [1]


def test_a_feed_needs_pages_for_what_it_writes() -> None:
    rows = table()
    rows.apply(StepPlan(1, [admit(0, pages=1)]))
    _, errors, _ = rows.apply(StepPlan(2, feed=[Feed(0, 5)]))
    assert errors
    rows.apply(StepPlan(3, [admit(0, pages=1)]))
    shares, errors, _ = rows.apply(StepPlan(4, feed=[Feed(0, 5, 0, [9])]))
    assert not errors and len(shares) == 1


def test_repr_counts() -> None:
    rows = table()
    rows.apply(StepPlan(1, [admit(0), admit(2, pages=3)]))
    assert repr(rows) == "2 of 4 rows, 5 pages"


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.lists(st.integers(0, 20), max_size=60),
    st.lists(st.integers(0, 30), max_size=9),
)
def test_counts(start: list[int], pushed: list[int], path: list[int]) -> None:
    counts = Counts(start)
    for token in pushed:
        counts.push(token)
    before = dict(zip(counts.ids.tolist(), counts.counts.tolist()))
    for token in path:
        counts.push(token)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist())) == Counter(start + pushed + path)
    assert counts.length == len(start + pushed + path)
    for token in reversed(path):
        counts.pop(token)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist())) == before == Counter(start + pushed)
    assert counts.ids.dtype == np.int64 and counts.counts.dtype == np.float32
