"""Which nodes are kept: the best that any choice could earn, whole paths only, and never more than the tolls allow."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.drafters.choose import by_source, census, choose, keep, profit, survivals
from forerun.engine.drafters.draft import Draft, Room, prune


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    count = draw(st.integers(0, 4))
    parent = [draw(st.integers(-1, i - 1)) for i in range(count)]
    confidence = [draw(st.floats(0.0, 1.0)) for _ in range(count)]
    return Draft(list(range(10, 10 + count)), parent, confidence, [False] * count)


tolls = st.lists(st.floats(0.0, 1.0), max_size=8).map(lambda steps: [sum(steps[: n + 1]) for n in range(len(steps))])


def earned(worth: list[list[float]], kept: list[list[int]], toll: list[float]) -> float:
    count = sum(map(len, kept))
    return sum(values[i] for values, nodes in zip(worth, kept) for i in nodes) - (toll[count - 1] if count else 0.0)


@given(st.lists(drafts(), min_size=1, max_size=3), tolls, st.floats(0.0, 0.3))
def test_no_choice_of_whole_paths_earns_more(several: list[Draft], toll: list[float], own: float) -> None:
    worth = [[value - own for value in survivals(draft.parent, draft.confidence)] for draft in several]
    kept = choose(worth, toll)
    assert sum(map(len, kept)) <= len(toll)
    for draft, nodes in zip(several, kept):
        assert all(draft.parent[node] in (-1, *nodes) for node in nodes), "a node without its parent"
    best = max(
        (
            earned(worth, [list(nodes) for nodes in choice], toll)
            for choice in product(
                *([[i for i in range(draft.count) if bits >> i & 1] for bits in range(1 << draft.count)] for draft in several)
            )
            if sum(map(len, choice)) <= len(toll)
        ),
        default=0.0,
    )
    assert earned(worth, kept, toll) == pytest.approx(max(best, 0.0))


@given(drafts(), st.sets(st.integers(0, 3)))
def test_what_is_kept_is_the_same_tree_without_the_rest(draft: Draft, chosen: set[int]) -> None:
    nodes = [i for i in range(draft.count) if i in chosen]
    closed = [i for i in nodes if all(parent in chosen for parent in ancestors(draft, i))]
    kept = keep(draft, closed)
    assert kept.paths() == [draft.paths()[i] for i in closed]
    assert kept.confidence == [draft.confidence[i] for i in closed]


def ancestors(draft: Draft, node: int) -> list[int]:
    found = []
    while (node := draft.parent[node]) >= 0:
        found.append(node)
    return found


def test_free_rows_are_filled_and_dear_ones_are_not() -> None:
    worth = [[0.9, 0.5, 0.1], [0.3, 0.2]]
    assert choose(worth, [0.0] * 8) == [[0, 1, 2], [0, 1]]
    assert choose(worth, [0.0, 0.0, 0.9, 1.8]) == [[0, 1], []]
    assert choose(worth, []) == [[], []]


@given(st.lists(st.floats(0, 1)), st.lists(st.floats(0, 1.5), max_size=9))
def test_the_profit_is_that_of_the_nodes_that_would_be_kept(worth: list[float], toll: list[float]) -> None:
    surest = sorted(worth, reverse=True)
    assert profit(worth, toll) == pytest.approx(max([0.0, *(sum(surest[: n + 1]) - toll[n] for n in range(min(len(worth), len(toll))))]))


def test_it_looks_behind_a_stair() -> None:
    """A first guess that costs more than it can bring pays with seven others."""
    assert choose([[0.9, 0.8, 0.7]], [1.3, 1.3, 1.3]) == [[0, 1, 2]]
    assert choose([[0.9, 0.2]], [1.3, 1.3, 1.3]) == [[]]


def test_nodes_are_counted_by_depth() -> None:
    tree = Draft([1, 2, 3, 4], [-1, -1, 0, 2], [1.0] * 4, [False] * 4)
    assert census([tree, Draft.chain([5, 6]), Draft.none()]) == [3, 2, 1]


def test_nodes_are_counted_for_those_who_proposed_them() -> None:
    """Node 0 comes from both, node 1 from the first, node 2, behind node 0, from the second."""
    tree = Draft([1, 2, 3], [-1, -1, 0], [0.9, 0.8, 0.7], [False] * 3, [3, 1, 2])
    assert by_source([(tree, [0, 2]), (Draft.chain([5]), [0])]) == [([2], [1]), ([1, 1], [1, 1])]
    assert by_source([(keep(tree, [0, 2]), [])]) == [([1], [0]), ([1, 1], [0, 0])]
    pruned = prune(Draft([1, 99, 3], [-1, -1, 0], [0.9, 0.8, 0.7], [False] * 3, [3, 1, 2]), Room(8, 8, 50, 0.0))
    assert pruned.token == [1, 3] and list(pruned.source) == [3, 2]


def test_a_few_likely_tokens_are_not_left_to_plain_steps() -> None:
    """At the speed of guessing these two would not pay; but the alternative is to get them one by one."""
    assert choose([[0.9, 0.8, 0.01]], [2.0, 2.1, 2.2]) == [[]]
    assert choose([[0.9, 0.8, 0.01]], [2.0, 2.1, 2.2], discount=0.5) == [[0, 1]]
    assert choose([[0.9, 0.8, 0.1]], [0.1, 0.2, 0.9], discount=0.5) == [[0, 1]], "no discount where guesses pay in full"


@given(drafts(), tolls, st.floats(0.3, 1.0))
def test_a_stream_that_is_alone_is_served_as_one_in_company(draft: Draft, toll: list[float], discount: float) -> None:
    values = survivals(draft.parent, draft.confidence)
    assert choose([values], toll, discount) == choose([values, []], toll, discount)[:1]
