"""Where a stop string falls in a text that arrives in pieces. Owns the matching; knows neither tokens nor requests.

The first stop is the one that ends first (of those that end together, the one that begins first), so the answer does not depend on how
the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Prefix:
    """How much of one stop string the text so far ends with: the Knuth–Morris–Pratt automaton, built only as far as it gets."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0]
        """[k - 1] = length of the longest proper prefix of stop[:k] that is also its suffix; grows with the longest match seen"""

    def feed(self, char: str) -> bool:
        """True when the stop ends with this character. Must not be fed after that."""
        stop, borders, matched = self.stop, self._borders, self.matched
        while matched and stop[matched] != char:
            matched = borders[matched - 1]
        if stop[matched] == char:
            matched += 1
            if matched > len(borders):
                border = borders[-1]
                while border and stop[border] != char:
                    border = borders[border - 1]
                borders.append(border + 1 if stop[border] == char else 0)
        self.matched = matched
        return matched == len(stop)


class StopMatcher:
    """Finds the first of `stops`, also inside a piece or across pieces.

    keep=True (native routes, as TGI): text passes at once and is cut behind the first stop. keep=False (/v1, as OpenAI): text is cut
    before it, and the end that could still become a stop is held back. An empty stop matches with the first piece, which is kept or not.
    """

    __slots__ = ("_done", "_empty", "_first", "_held", "_keep", "_prefixes")

    def __init__(self, stops: Sequence[str], keep: bool) -> None:
        self._prefixes = [_Prefix(stop) for stop in dict.fromkeys(stops) if stop]
        self._first = frozenset(prefix.stop[0] for prefix in self._prefixes)
        self._empty = any(not stop for stop in stops)
        self._keep = keep
        self._held = 0
        """characters that the text so far ends with and that begin a stop"""
        self._done = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may leave now, and whether a stop was found: then nothing more may be pushed."""
        if self._empty:
            self._done = True
            return (text if self._keep else ""), True
        if not self._held and self._first.isdisjoint(text):
            return text, False
        held = self._held_text()
        for index, char in enumerate(text):
            hits = [len(prefix.stop) for prefix in self._prefixes if prefix.feed(char)]
            if hits:
                self._done = True
                return (text[: index + 1] if self._keep else (held + text[: index + 1])[: -max(hits)]), True
        self._held = max(prefix.matched for prefix in self._prefixes)
        if self._keep:
            return text, False
        whole = held + text
        return whole[: len(whole) - self._held], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        return "" if self._keep or self._done else self._held_text()

    def _held_text(self) -> str:
        """The held text is the beginning of the stop that has matched furthest, so it need not be stored."""
        if self._keep or not self._held:
            return ""
        return max(self._prefixes, key=lambda prefix: prefix.matched).stop[: self._held]
