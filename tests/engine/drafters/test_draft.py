"""Trees: what is derived from `parent`, and what is left of a draft that does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.drafters.draft import Draft, Place, Room, prune
from forerun.engine.kv import Table

ROOMY = Room(1000, 1000, 10, 0.0)


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> Draft:
    n = draw(st.integers(0, most))
    parent = [draw(st.integers(-1, i - 1)) for i in range(n)]
    token = [draw(st.integers(-2, 12)) for _ in range(n)]
    confidence = [draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) for _ in range(n)]
    return Draft(token, parent, confidence, [False] * n)


def lineage(draft: Draft, node: int) -> list[int]:
    """Nodes from the root's child to the node."""
    path = []
    while node >= 0:
        path.append(node)
        node = draft.parent[node]
    return path[::-1]


@given(trees())
def test_depths_and_paths(draft: Draft) -> None:
    for node in range(draft.count):
        assert draft.depths()[node] == len(lineage(draft, node))
        assert draft.paths()[node] == [draft.token[i] for i in lineage(draft, node)]


@given(trees(), st.integers(0, 6), st.integers(0, 4), st.sampled_from([0.0, 0.2, 0.3, 0.6]))
def test_prune_keeps_what_fits_and_nothing_else(draft: Draft, nodes: int, depth: int, price: float) -> None:
    room = Room(nodes, depth, 10, price)
    small = prune(draft, room)
    assert small.count <= nodes
    fits: list[int] = []
    for node in range(draft.count):
        line = lineage(draft, node)
        survival = 1.0
        for i in line:
            survival *= draft.confidence[i]
        rooted = len(line) == 1 or line[-2] in fits
        if rooted and 0 <= draft.token[node] < 10 and len(line) <= depth and survival >= price and len(fits) < nodes:
            fits.append(node)
    assert small.paths() == [draft.paths()[i] for i in fits]
    assert small.confidence == [draft.confidence[i] for i in fits]
    assert all(-1 <= p < i for i, p in enumerate(small.parent))


def test_a_draft_that_fits_is_not_copied() -> None:
    draft = Draft.chain([1, 2, 3])
    assert prune(draft, ROOMY) is draft


@pytest.mark.parametrize(
    "draft",
    [
        Draft([1, 2], [-1, 1], [1.0] * 2, [False] * 2),
        Draft([1, 2], [-1, 5], [1.0] * 2, [False] * 2),
        Draft([1], [-2], [1.0], [False]),
        Draft([1, 2], [-1], [1.0] * 2, [False] * 2),
    ],
)
def test_what_is_no_tree_is_refused(draft: Draft) -> None:
    with pytest.raises(ValueError):
        prune(draft, ROOMY)


@given(st.integers(1, 20), st.integers(1, 50), st.integers(1, 600))
def test_tokens_are_spread_over_few_rows(rows: int, longest: int, most: int) -> None:
    place = Place((), Table(rows, longest, 16), rows, longest)
    parts = place.spread(most)
    assert sum(parts) == min(most, rows * longest) and len(parts) <= rows
    assert all(part == longest for part in parts[:-1]) and 0 < parts[-1] <= longest
