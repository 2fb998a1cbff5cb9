"""What a grammar allows behind a row's tokens and behind its guesses: masks, and tokens of which each is the only one.

Owns one matcher of the library and where it stands. Knows no threads, no steps and no rows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from forerun.engine.drafters.choose import keep
from forerun.engine.drafters.draft import Draft, Room

Bits = NDArray[np.uint8]
"""one bit for each token id, the lowest first; 1 = allowed"""

MOST_BEGINNINGS = 64
"""Where more tokens are allowed they are not looked at: hardly any token has so many beginnings."""
FORCED_SECONDS = 0.005
"""of a processor, for looking ahead along forced tokens; a mask takes some 50 µs, one of a hostile grammar half a second"""


class GrammarError(Exception):
    """A grammar that cannot be compiled or followed. The message is for the client."""


@dataclasses.dataclass(frozen=True, slots=True)
class Followed:
    """A draft without its illegal nodes, and what may come behind the others, by their paths."""

    draft: Draft
    masks: dict[tuple[int, ...], Bits]


class Matcher:
    """Reads one row. `ends`: ids that end a sequence, allowed where the grammar may end; `hidden`: what the library takes for them.
    `text`: of a token. For one thread at a time.

    Of the library it calls for masks, which it makes without the interpreter's lock, and for what is done in microseconds with it. The
    library's own look-ahead (`compute_ff_tokens`) keeps the lock for as long as a forced text is: a step would wait for it."""

    def __init__(self, compiled: LLMatcher, hidden: Sequence[int], ends: Sequence[int], text: Callable[[int], bytes]) -> None:
        self._compiled = compiled
        self._hidden = list(hidden)
        self._ends = list(ends)
        self._text = text
        self._read: list[int] = []
        self._ahead: list[int] | None = []
        """read beyond these: the path where a draft is followed; None = a call failed, so nobody knows"""
        self._live = compiled.deep_copy()

    def advance(self, tokens: Sequence[int]) -> Bits:
        """These became true. Returns what may come next. Raises GrammarError."""
        self._go([])  # it stands elsewhere where following a draft failed halfway
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
        return bits

    def follow(self, draft: Draft, root: Bits, room: Room) -> Followed:
        """Put forced tokens in front of a draft, walk over it and back; `root`: what may come before it. Probes stay, with what hangs off
        them, since they are never accepted; what was drawn (`Draft.law`) stays as it is: it may not be cut for what it is, and its masks
        refuse it."""
        masks: dict[tuple[int, ...], Bits] = {}
        if not draft.law:
            draft = join(self._forced(root, min(room.nodes, room.depth), masks), draft, room.nodes)
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

    def _forced(self, root: Bits, most: int, masks: dict[tuple[int, ...], Bits]) -> list[int]:
        """Tokens from the root on of which each is the only way on, at most so many, or as many as are soon found. Notes what may come
        behind each."""
        found: list[int] = []
        bits, until = root, time.thread_time() + FORCED_SECONDS
        while len(found) < most and time.thread_time() < until:
            token = self._only(bits)
            if token is None or not self._mask([*found, token], masks):
                break
            found.append(token)
            bits = masks[tuple(found)]
        return found

    def _only(self, bits: Bits) -> int | None:
        """The token that all others are beginnings of. An end is none: it comes with the token before it."""
        if not narrow(bits):
            return None
        texts = {token: self._text(token) for token in np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()}
        longest = max(texts, key=lambda token: len(texts[token]))
        alone = texts.keys().isdisjoint(self._ends) and all(texts[longest].startswith(text) for text in texts.values())
        return longest if alone else None

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
        if self._ahead is None:
            self._again()
        ahead, self._ahead = self._ahead or [], None
        same = 0
        while same < min(len(path), len(ahead)) and path[same] == ahead[same]:
            same += 1
        if same < len(ahead):
            self._live.rollback(len(ahead) - same)
        if same < len(path):
            self._live.consume_tokens(path[same:])
        self._ahead = list(path)

    def _again(self) -> None:
        """A matcher that has read what became true, and nothing else."""
        self._ahead = None
        self._live = self._compiled.deep_copy()
        self._live.consume_tokens(self._read)
        self._ahead = []

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


def join(forced: Sequence[int], draft: Draft, nodes: int) -> Draft:
    """A chain of forced tokens, at most `nodes`, with the draft laid over it: what says the same is the same node, what says otherwise at a
    forced place goes, what goes on behind the chain hangs there. At most `nodes` nodes in all, where anything is forced."""
    count = len(forced)
    if not count:
        return draft
    token, parent, confidence, probe = list(forced), list(range(-1, count - 1)), [1.0] * count, [False] * count
    source = [0] * count if draft.source else []
    place: list[int] = []
    """of each node of the draft, -1 = it went"""
    for node, (t, p) in enumerate(zip(draft.token, draft.parent)):
        at = -1 if p < 0 else place[p]
        gone = p >= 0 and at < 0
        if not gone and at + 1 < count:
            if t == token[at + 1] and not draft.probe[node]:
                place.append(at + 1)
                if source:
                    source[at + 1] |= draft.source[node]
                continue
            gone = True
        if gone or len(token) >= nodes:
            place.append(-1)
            continue
        place.append(len(token))
        token.append(t)
        parent.append(at)
        confidence.append(draft.confidence[node])
        probe.append(draft.probe[node])
        source += draft.source[node : node + 1]
    return Draft(token, parent, confidence, probe, source)


def narrow(bits: Bits) -> bool:
    """So few tokens are allowed that one of them may be the only way on."""
    return 0 < int.from_bytes(bits.tobytes(), "little").bit_count() <= MOST_BEGINNINGS


def allows(bits: Bits, token: int) -> bool:
    return 0 <= token < 8 * len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)


def first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "the library does not say why"
