"""Byte streams cut anywhere, for parsers that are fed in pieces."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st


def cuts(stream: bytes) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(stream)), max_size=len(stream)).map(sorted)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    return [stream[start:end] for start, end in itertools.pairwise([0, *places, len(stream)])]
