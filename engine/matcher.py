"""What a grammar allows behind a row's tokens and behind its guesses: masks, and tokens of which each is the only one.

Owns one matcher of the library and where it stands. Knows no threads, no steps and no rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from forerun.engine.drafters.choose import keep
from forerun.engine.drafters.draft import Draft

Bits = NDArray[np.uint8]
"""one bit for each token id, the lowest first; 1 = allowed"""

MOST_FORCED = 32
"""forced tokens that are looked ahead"""


class GrammarError(Exception):
    """A grammar that cannot be compiled or followed. The message is for the client."""


@dataclasses.dataclass(frozen=True, slots=True)
class Root:
    """What may come next, and the tokens from there on of which each is the only one."""

    bits: Bits
    forced: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Followed:
    """A draft without its illegal nodes, and what may come behind the others, by their paths."""

    draft: Draft
    masks: dict[tuple[int, ...], Bits]


class Matcher:
    """Reads one row. `ends`: ids that end a sequence, allowed where the grammar may end; `hidden`: what the library takes for them. For
    one thread at a time."""

    def __init__(self, compiled: LLMatcher, hidden: Sequence[int], ends: Sequence[int]) -> None:
        self._compiled = compiled
        self._hidden = list(hidden)
        self._ends = list(ends)
        self._read: list[int] = []
        self._ahead: list[int] = []
        """read beyond these: the path where a draft is followed"""
        self._live = compiled.deep_copy()

    def advance(self, tokens: Sequence[int]) -> Root:
        """These became true. Raises GrammarError."""
        self._read += tokens
        self._live.consume_tokens(list(tokens))
        bits = self._bits()
        if self._live.is_error():
            # What was looked at for drafts counts towards the library's limits: only a matcher that never saw one may fail.
            self._again()
            bits = self._bits()
        if self._live.is_error():
            raise GrammarError(f"the grammar cannot be followed: {first_line(self._live.get_error())}")
        if not bits.any():
            why = "its end is reached and the model has no token for that" if self._live.is_accepting() else "nothing is allowed here"
            raise GrammarError(f"the grammar cannot be followed: {why}")
        return Root(bits, self._live.compute_ff_tokens()[:MOST_FORCED])

    def follow(self, draft: Draft, root: Bits) -> Followed:
        """Walk over a draft and back. Probes stay, with what hangs off them, since they are never accepted; what was drawn (`Draft.law`)
        stays as well: it may not be cut for what it is, and its masks refuse it."""
        masks: dict[tuple[int, ...], Bits] = {}
        stays: list[bool] = []
        open_: list[bool] = []
        for node, path in enumerate(draft.paths()):
            parent, token = draft.parent[node], path[-1]
            above = root if parent < 0 else masks.get(tuple(path[:-1]))
            real = not draft.probe[node] and (parent < 0 or open_[parent])
            open_.append(real)
            legal = real and above is not None and allows(above, token) and self._mask(path, masks)
            stays.append((parent < 0 or stays[parent]) and (legal or not real))
        self._go([])
        kept = draft if draft.law else keep(draft, [node for node, stay in enumerate(stays) if stay])
        return Followed(kept, masks)

    def _mask(self, path: list[int], masks: dict[tuple[int, ...], Bits]) -> bool:
        """Note what may come behind a legal path; nothing does behind an end. False where that is nothing at all (a dead end, or the
        library gives up): the row says so when it gets there. What was drawn stays, and is refused there."""
        place = tuple(path)
        if path[-1] in self._ends:
            return True
        if place not in masks:
            self._go(path)
            masks[place] = self._bits()
            if self._live.is_error():
                self._again()
        return bool(masks[place].any())

    def _go(self, path: list[int]) -> None:
        """Stand behind this path of guesses."""
        same = 0
        while same < min(len(path), len(self._ahead)) and path[same] == self._ahead[same]:
            same += 1
        if same < len(self._ahead):
            self._live.rollback(len(self._ahead) - same)
        if same < len(path):
            self._live.consume_tokens(path[same:])
        self._ahead = list(path)

    def _again(self) -> None:
        """A matcher that has read what became true, and nothing else."""
        self._live, self._ahead = self._compiled.deep_copy(), []
        self._live.consume_tokens(self._read)

    def _bits(self) -> Bits:
        """What may come where the matcher stands; all zero after an error."""
        live = self._live
        bits = np.frombuffer(live.compute_bitmask(), np.uint8).copy()
        if live.is_stopped():
            bits[:] = 0
        for token in self._hidden:
            bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        if live.is_accepting() and not live.is_error():
            for token in self._ends:
                if token < 8 * len(bits):
                    bits[token >> 3] |= 1 << (token & 7)
        return bits


def allows(bits: Bits, token: int) -> bool:
    return 0 <= token < 8 * len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)


def first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "the library does not say why"
