"""Matches are true, newest first, bounded; what fell out of memory is never found."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.drafters.draft import Commit
from forerun.engine.drafters.history import GAP, LONGEST, History, Match, fresh

texts = st.lists(st.integers(0, 2), max_size=60)


def history_of(*parts: list[int], most: int = 1000) -> History:
    history = History(most)
    for part in parts:
        history.extend(part)
    return history


def common(tokens: array[int], end: int, tail: array[int]) -> int:
    """Length of the common suffix of tokens[:end] and tail, gaps equal to nothing."""
    same = 0
    while same < min(end, len(tail), LONGEST) and tokens[end - 1 - same] == tail[-1 - same] != GAP:
        same += 1
    return same


def check(history: History, tail: array[int], found: list[Match]) -> None:
    """Every match is what it says it is."""
    places = [-index for _, _, index, _, _ in found]
    assert len(set(places)) == len(places)
    for length, _, index, tokens, period in found:
        assert tokens is history.tokens
        end = -index
        assert 0 < end < len(tokens), "there is a token behind it"
        assert -length == common(tokens, end, tail) > 0
        assert period == (len(tail) - end if tail is tokens else 0)


@given(st.lists(texts, max_size=5), st.integers(1, 5))
def test_matches_in_the_text_itself(parts: list[list[int]], most: int) -> None:
    history = history_of(*parts)
    tokens = history.tokens
    assert list(tokens) == [GAP, *(token for part in parts for token in part)]
    assert len(history) == len(tokens) - 1
    found = history.find(tokens, most)
    assert len(found) <= most
    check(history, tokens, found)
    ends = [end for end in range(2, len(tokens)) if common(tokens, end, tokens) >= 3]
    if ends:
        assert found[0][2] == -max(ends), "the newest place of the last three tokens comes first"
        assert all(length <= -3 for length, *_ in found[: min(most, len(ends), 2)])
    elif any(common(tokens, end, tokens) for end in range(2, len(tokens))):
        assert found


@given(texts, texts)
def test_matches_in_another_text(mine: list[int], theirs: list[int]) -> None:
    history, tail = history_of(theirs, [GAP], theirs), history_of(mine).tokens
    check(history, tail, found := history.find(tail, 4))
    assert bool(found) == bool(mine and mine[-1] in theirs)


@given(st.lists(texts, max_size=12))
def test_memory_is_bounded_and_what_is_kept_is_found(parts: list[list[int]]) -> None:
    history, told = History(16, size=4), []
    for part in parts:
        history.extend(part)
        told += part
        assert history.held <= 2 * 16 + len(part) + 1 and len(history) == len(told)
        kept = list(history.tokens[1:])
        assert kept == told[len(told) - len(kept) :] and len(kept) >= min(len(told), 15)
        check(history, history.tokens, history.find(history.tokens, 4))
        assert list(history.since(0)) == kept and list(history.since(len(told))) == []
        assert list(history.since(max(0, len(told) - 3))) == told[-3:]


def test_more_heads_as_it_grows() -> None:
    """Matches of a long text stay within a few links although the tables began small."""
    text = [(i * i * 7919 + i) % 4001 for i in range(3000)]
    history = history_of(text, text[:50], most=1 << 14)
    assert history.find(history.tokens, 1)[0][:3] == (-LONGEST, 0, -51)


def test_a_gap_separates() -> None:
    history = history_of([1, 2, 3], [GAP], [2, 3, 4, GAP, 1, 2, 3])
    found = history.find(history_of([1, 2, 3]).tokens, 9)
    assert [(match[0], match[2]) for match in found] == [(-3, -4), (-2, -7)] and history.tokens[4] == GAP


def test_nothing_is_found_in_nothing() -> None:
    assert (
        History(10).find(History(10).tokens, 4)
        == history_of([1]).find(History(10).tokens, 4)
        == History(10).find(array("i", [GAP, 1]), 4)
        == []
    )
    assert history_of([1]).find(history_of([1]).tokens, 4) == [], "the newest token has nothing behind it"


def test_what_a_commit_tells_that_is_new() -> None:
    commit = Commit([3, 5], [0, 7], [[1, 2, 3], [4, 5]], [9, None])
    assert fresh(commit, 0, 0) == [1, 2, 3, 9] and fresh(commit, 0, 2) == [3, 9] and fresh(commit, 0, 3) == [9]
    with pytest.raises(ValueError, match="row 5 goes on at position 7, and only 6 tokens of it are known"):
        fresh(commit, 1, 6)
    assert fresh(commit, 1, 7) == [4, 5] and fresh(commit, 1, 8) == [5] and fresh(commit, 1, 9) == []
