"""Events come out the same wherever the byte stream is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.bench.sse import EventParser
from tests.bench.cuts import cut, cuts

STREAM = b': hello\n\ndata: {"a":1}\n\ndata:{"b":"\xc3\xa9"}\r\n\r\nevent: x\nid: 7\ndata: one\ndata: two\n\n:\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b'{"b":"\xc3\xa9"}', b"one\ntwo", b"[DONE]"]


@given(cuts(STREAM))
def test_any_cutting_gives_the_same_events(places: list[int]) -> None:
    parser = EventParser()
    assert [event for piece in cut(STREAM, places) for event in parser.feed(piece)] == EVENTS


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20), max_size=10))
def test_what_is_written_is_read(texts: list[str]) -> None:
    stream = "".join(f"data: {text}\n\n" for text in texts).encode()
    assert EventParser().feed(stream) == [text.encode() for text in texts]


def test_an_unfinished_event_is_not_an_event() -> None:
    assert EventParser().feed(b"data: half") == []
    assert EventParser().feed(b"data: half\n") == []
