"""The first stop is found wherever it falls, and nothing behind its end leaves."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.server.stops import StopMatcher

TEXTS = st.text(alphabet="abc \n🧵", max_size=40)
STOPS = st.lists(st.text(alphabet="abc \n🧵", min_size=1, max_size=6), min_size=1, max_size=4)


def cut(data: st.DataObject, text: str) -> list[str]:
    """The text in random pieces, empty ones included."""
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) by the definition, slowly."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(ends)[::-1] if ends else None


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], bool]:
    out = []
    for piece in pieces:
        text, hit = matcher.push(piece)
        out.append(text)
        if hit:
            return [*out, matcher.flush()], True
    return [*out, matcher.flush()], False


@given(text=TEXTS, stops=STOPS, data=st.data())
@settings(max_examples=500, deadline=None)
def test_keep_cuts_behind_the_first_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    out, hit = run(StopMatcher(stops, keep=True), cut(data, text))
    found = first_stop(text, stops)
    assert hit == (found is not None)
    assert "".join(out) == (text[: found[1]] if found else text)


@given(text=TEXTS, stops=STOPS, data=st.data())
@settings(max_examples=500, deadline=None)
def test_drop_cuts_before_it_and_leaks_no_part_of_it(text: str, stops: list[str], data: st.DataObject) -> None:
    pieces = cut(data, text)
    out, hit = run(StopMatcher(stops, keep=False), pieces)
    found = first_stop(text, stops)
    assert hit == (found is not None)
    assert "".join(out) == (text[: found[0]] if found else text)


@given(text=TEXTS, stops=STOPS, data=st.data())
@settings(max_examples=300, deadline=None)
def test_holds_back_no_more_than_could_still_become_a_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher, sent, seen = StopMatcher(stops, keep=False), "", ""
    for piece in cut(data, text):
        out, hit = matcher.push(piece)
        sent, seen = sent + out, seen + piece
        if hit:
            return
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert sent == seen[: len(seen) - held]


@given(text=TEXTS, stops=STOPS, data=st.data())
@settings(max_examples=200, deadline=None)
def test_keep_never_holds_text_back(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopMatcher(stops, keep=True)
    for piece in cut(data, text):
        out, hit = matcher.push(piece)
        if hit:
            return
        assert out == piece


@given(text=st.text(min_size=1, max_size=30), data=st.data())
@settings(max_examples=300, deadline=None)
def test_every_substring_is_found(text: str, data: st.DataObject) -> None:
    """A02: wherever it starts and ends."""
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    out, hit = run(StopMatcher([stop], keep=True), cut(data, text))
    assert hit
    assert "".join(out) == text[: text.find(stop) + len(stop)]


def test_a_stop_over_several_tokens_leaks_nothing() -> None:
    """A03."""
    matcher = StopMatcher(["<|fin|>"], keep=False)
    assert [matcher.push(piece) for piece in ["done", " <", "|fi", "n|", "> more"]] == [
        ("done", False), (" ", False), ("", False), ("", False), ("", True),
    ]  # fmt: skip
    assert matcher.flush() == ""


def test_text_before_the_stop_in_the_same_token_is_sent() -> None:
    """A10."""
    assert StopMatcher(["\n"], keep=False).push("?\nnext") == ("?", True)
    assert StopMatcher(["\n"], keep=True).push("?\nnext") == ("?\n", True)


def test_held_text_is_released_when_it_becomes_no_stop() -> None:
    matcher = StopMatcher(["G H I"], keep=False)
    assert matcher.push("F G H") == ("F ", False)
    assert matcher.push(" J") == ("G H J", False)
    assert matcher.push(" G H") == (" ", False)
    assert matcher.flush() == "G H"


@pytest.mark.parametrize(("keep", "sent"), [(True, "hello"), (False, "")])
def test_an_empty_stop_ends_with_the_first_piece(keep: bool, sent: str) -> None:
    assert StopMatcher(["", "x"], keep).push("hello") == (sent, True)


def test_no_stops_pass_everything() -> None:
    matcher = StopMatcher([], keep=False)
    assert matcher.push("hello") == ("hello", False)
    assert matcher.flush() == ""


@pytest.mark.parametrize("keep", [True, False])
def test_a_megabyte_stop_costs_only_what_matches(keep: bool) -> None:
    """A stop as large as a request may be must not make every token slow."""
    stop = "ab" * 500_000
    started = time.perf_counter()
    matcher = StopMatcher([stop, "a" * 1_000_000], keep)
    for _ in range(2_000):
        assert not matcher.push("abab")[1]
        assert not matcher.push("ac")[1]
    assert time.perf_counter() - started < 20
