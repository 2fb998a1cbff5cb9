"""Where the newest tokens of a sequence stood before: token sequences and two hash chains over them.

The window of LZ77 (Ziv and Lempel 1977), kept the way deflate keeps it: a table of heads, one for each hash of a context, and for
each place a link to the place before it with the same hash. Entering a token and following a link cost O(1); hashes are checked by
comparing tokens, so a collision costs a step and never a wrong answer. Memory is fixed; the oldest tokens fall out.

    place        0    1    2    3    4    5    6          place − base = index into the arrays
    token       −1    7    8    9    7    8    9          −1 = a gap: stands before every sequence, equals no token
    by one       ·    0    0    0    1    2    ·          the last place whose token is the same
    by three     ·    0    0    0    ·    ·    ·          the last place whose three last tokens are the same; 0 = none

A place is entered when the token behind it is known, so the newest token is in no chain and whoever is found has a successor.
Knows nothing of rows, drafts or probabilities.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from forerun.engine.drafters.draft import Commit

GAP = -1
LONGEST = 16
"""A common suffix longer than this counts as this long."""
Match = tuple[int, int, int, "array[int]", int]
"""(−length of the common suffix, source, −index of the token behind it, tokens, period): in ascending order the longest come first, then
those of the first source, then the newest. `period`: in a text's match with itself, after how many tokens the continuation meets the end
of the text, from where on it is taken to repeat; 0 elsewhere."""
_STEPS = 4
"""links followed in one chain before giving up: collisions, and contexts that occur everywhere"""
_A, _B, _C, _WORD = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0xFFFFFFFF
"""Odd multipliers (Knuth's multiplicative hashing; the high bits of the word are used)"""


class History:
    """`most`: the newest tokens that are certain to be remembered (up to twice as many are). `size`: tokens expected soon; the tables
    of heads grow with what they hold."""

    __slots__ = ("_base", "_bits", "_heads_one", "_heads_three", "_most", "_ones", "_threes", "tokens")

    def __init__(self, most: int, size: int = 256) -> None:
        self.tokens = array("i", [GAP])
        self._ones = array("q", [0])
        self._threes = array("q", [0])
        self._base = 0
        self._most = most
        self._open(min(size, most))

    def __len__(self) -> int:
        """Tokens told so far, gaps included."""
        return self._base + len(self.tokens) - 1

    @property
    def held(self) -> int:
        """Tokens in memory."""
        return len(self.tokens)

    def extend(self, new: Iterable[int]) -> None:
        """The sequence goes on. A GAP among the tokens ends it and begins another."""
        tokens, ones, threes = self.tokens, self._ones, self._threes
        heads_one, heads_three = self._heads_one, self._heads_three
        shift = 32 - self._bits
        mask = (1 << self._bits) - 1
        place = self._base + len(tokens) - 1
        b = tokens[-1]
        a = tokens[-2] if len(tokens) > 1 else GAP
        z = tokens[-3] if len(tokens) > 2 else GAP
        for token in new:
            one = b & mask
            three = (z * _A + a * _B + b * _C & _WORD) >> shift
            ones[-1] = heads_one[one]
            threes[-1] = heads_three[three]
            heads_one[one] = heads_three[three] = place
            tokens.append(token)
            ones.append(0)
            threes.append(0)
            place += 1
            z, a, b = a, b, token
        if len(tokens) > 2 * self._most:
            self._cut()
        elif len(tokens) > 2 << self._bits and 1 << self._bits < self._most:
            self._grow()

    def find(self, tail: array[int], most: int, source: int = 0) -> list[Match]:
        """Where the tokens at the end of `tail` stood before: at most `most` matches, those of three tokens and more before shorter ones,
        each kind newest first. `tail`: this history's own tokens or another's, with a GAP at the start and nowhere else."""
        tokens, base = self.tokens, self._base
        at = len(tail) - 1
        if at < 1:
            return []
        b = tail[at]
        own = len(tokens) - 1 if tail is tokens else 0
        found: list[Match] = []
        y, z = tail[at - 1], tail[at - 2]
        if at > 2:
            index = self._heads_three[(z * _A + y * _B + b * _C & _WORD) >> 32 - self._bits] - base
            if index > 0:
                longest = LONGEST if at > LONGEST else at
                suffix = tail[at - LONGEST + 1 :] if at >= LONGEST else None
                links = self._threes
                steps = _STEPS
                while index > 0 and steps:
                    if tokens[index] == b and tokens[index - 1] == y and tokens[index - 2] == z:
                        if tokens[index - LONGEST + 1 : index + 1] == suffix:
                            same = LONGEST
                        else:
                            same = 3
                            while same < longest and tokens[index - same] == tail[at - same]:
                                same += 1
                        found.append((-same, source, -index - 1, tokens, own and own - index))
                        if len(found) == most:
                            return found
                    index = links[index] - base
                    steps -= 1
        index = self._heads_one[b & (1 << self._bits) - 1] - base
        links = self._ones
        steps = _STEPS
        while index > 0 and steps:
            if tokens[index] == b:
                if tokens[index - 1] != y or at < 2:
                    found.append((-1, source, -index - 1, tokens, own and own - index))
                elif tokens[index - 2] != z or at < 3:
                    found.append((-2, source, -index - 1, tokens, own and own - index))
                if len(found) == most:
                    return found
            index = links[index] - base
            steps -= 1
        return found

    def since(self, place: int) -> array[int]:
        """The tokens behind the first `place` ones, as far as they are remembered."""
        return self.tokens[max(1, place + 1 - self._base) :]

    def _open(self, size: int) -> None:
        self._bits = max(8, size.bit_length())
        self._heads_one = array("q", bytes(8 << self._bits))
        self._heads_three = array("q", bytes(8 << self._bits))

    def _grow(self) -> None:
        """Twice the heads; everything is entered again."""
        known = self.tokens
        self.tokens, self._ones, self._threes = array("i", [known[0]]), array("q", [0]), array("q", [0])
        self._open(2 << self._bits)
        self.extend(known[1:])

    def _cut(self) -> None:
        """Forget the oldest half. What links to it leads nowhere from now on."""
        gone = len(self.tokens) - self._most
        del self.tokens[:gone], self._ones[:gone], self._threes[:gone]
        self.tokens[0] = GAP
        self._base += gone


def fresh(commit: Commit, i: int, known: int) -> list[int]:
    """What the commit tells of its i-th row behind the row's first `known` tokens, the newest token included. ValueError where some before
    were never told (what was put off may go astray in a failure): guesses for a text with a hole in it would only be wrong."""
    start = commit.start[i]
    if known < start:
        raise ValueError(f"row {commit.rows[i]} goes on at position {start}, and only {known} tokens of it are known")
    told = commit.tokens[i][known - start :]
    newest = commit.next[i]
    return told if newest is None else [*told, newest]
