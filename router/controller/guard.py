"""A circuit breaker: when guessing loses against not guessing, it stops, whatever the estimates say.

    closed ──(goodput with guesses < 0.98 of without, over 32 rounds)──▶ open for 64 rounds
    open ──(waited)──▶ half-open: 4 probe rounds ──(they paid)──▶ closed
                                 └──(they did not)──▶ open for twice as long, at most 4096 rounds

What a round would have brought without guesses is known without trying: one token for each root, in the time that the corrected
table gives a plain step. Probes of 4 rounds in at least 64, each at most a few tenths dearer than a plain one, bound the loss to
about one percent.
"""

from __future__ import annotations

_WINDOW = 32
_FLOOR = 0.98
_FIRST_WAIT = 64
_LAST_WAIT = 4096
_PROBES = 4


class Breaker:
    """One drafter under one bucket of batch sizes. States: "closed", "open", "half-open"."""

    def __init__(self) -> None:
        self.state = "closed"
        self.openings = 0
        self._wait = _FIRST_WAIT
        self._left = 0
        self._rounds = 0
        self._with = 0.0
        self._without = 0.0

    def allows(self) -> bool:
        """Asked once before each round of this bucket."""
        if self.state != "open":
            return True
        self._left -= 1
        if self._left > 0:
            return False
        self._begin("half-open")
        return True

    def observe(self, tokens: int, seconds: float, plain_tokens: int, plain_seconds: float) -> bool:
        """A finished round with guesses: what it brought, and what it would have without. Returns whether the state changed."""
        if seconds <= 0.0 or plain_seconds <= 0.0 or plain_tokens <= 0:
            return False
        self._with += tokens
        self._without += plain_tokens / plain_seconds * seconds
        self._rounds += 1
        if self._rounds < (_PROBES if self.state == "half-open" else _WINDOW):
            return False
        before, paid = self.state, self._with >= _FLOOR * self._without
        if paid:
            self._wait = max(_FIRST_WAIT, self._wait // 2)
            self._begin("closed")
        else:
            if before == "half-open":
                self._wait = min(_LAST_WAIT, 2 * self._wait)
            self._left = self._wait
            self.openings += 1
            self._begin("open")
        return self.state != before

    def _begin(self, state: str) -> None:
        self.state = state
        self._rounds = 0
        self._with = self._without = 0.0
