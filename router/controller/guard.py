"""A circuit breaker: when guessing loses against not guessing, it stops, whatever the estimates say.

What a round would have brought without guesses is known without trying: one token for each root, in the time that the corrected cost
table gives a plain step. The shortfall is summed up in plain rounds, never below nothing (Page's test), and believed when it is larger
than chance would make it: guesses that pay well also pay in bursts.

    closed ──(2 rounds short, and 3 standard deviations)──▶ open
    open ──(waited)──▶ half-open ──(16 rounds without being half a round short)──▶ closed
                           └──(half a round short)──▶ open

Each wait is twice as long as the one before, from 64 to 4096 rounds; guesses that were let be for eight times the last wait start over.
A loss of up to one percent is no loss: noise would be one otherwise. So the price of trying is a few rounds each time, ever more
rarely, and that of being wrong for long is one percent.
"""

from __future__ import annotations

import math

from forerun.router.guesses import Guard

_SLACK = 0.01
_SHORT, _SURE = 2.0, 3.0
_SHORT_AGAIN, _SURE_AGAIN = 0.5, 1.5
_TRIALS = 16
_FIRST_WAIT, _LAST_WAIT = 64, 4096
_LONG = 8
_MEMORY, _PRIOR = 32, 8
"""rounds whose spread counts as chance, and how many of them the assumption counts for that it is two plain rounds"""


class Breaker:
    """One drafter under one bucket of batch sizes. States: "closed", "open", "half-open"."""

    def __init__(self) -> None:
        self.state = "closed"
        self.openings = 0
        self._wait = _FIRST_WAIT // 2
        self._free = 0
        """rounds since it last stood open"""
        self._left = 0
        """rounds to wait while open, rounds to survive while half-open"""
        self._short = 0.0
        self._rounds = 0
        """since nothing was short"""
        self._mean = 0.0
        self._square = 4.0
        """of a round's shortfall"""
        self._seen = _PRIOR

    def view(self) -> Guard:
        return Guard(self.state, self.openings, self._wait if self.openings else 0, round(self._short, 3))

    def allows(self) -> bool:
        """Asked once before each round of this bucket."""
        if self.state != "open":
            return True
        self._left -= 1
        if self._left > 0:
            return False
        self.state, self._left = "half-open", _TRIALS
        self._short, self._rounds = 0.0, 0
        return True

    def observe(self, tokens: float, seconds: float, plain_tokens: int, plain_seconds: float) -> bool:
        """A finished round with guesses: what it brought, and what a plain one would have. Returns whether it opened or closed."""
        if seconds <= 0.0 or plain_seconds <= 0.0 or plain_tokens <= 0 or self.state == "open":
            return False
        trying = self.state == "half-open"
        self._free += 1
        if self._loses((1 - _SLACK) * seconds / plain_seconds - tokens / plain_tokens, *_AGAIN if trying else _FIRST):
            self._wait = min(_LAST_WAIT, 2 * self._wait) if self._free < _LONG * self._wait else _FIRST_WAIT
            self.state, self._left, self._free = "open", self._wait, 0
            self.openings += 1
            return True
        if trying:
            self._left -= 1
            if self._left <= 0:
                self.state = "closed"
                return True
        return False

    def _loses(self, short: float, enough: float, sure: float) -> bool:
        self._seen = min(self._seen + 1, _MEMORY)
        self._mean += (short - self._mean) / self._seen
        self._square += (short * short - self._square) / self._seen
        self._short = max(0.0, self._short + short)
        self._rounds = self._rounds + 1 if self._short else 0
        if self._short <= enough:
            return False
        spread = math.sqrt(max(0.0, self._square - self._mean * self._mean))
        return self._short > sure * spread * math.sqrt(self._rounds)


_FIRST, _AGAIN = (_SHORT, _SURE), (_SHORT_AGAIN, _SURE_AGAIN)
