"""How fast the tokens of one sequence arrive: time to the first, then from one to the next."""

from __future__ import annotations

import time

from forerun.server.metrics import RequestMetrics


class Pace:
    """`arrived`: monotonic seconds of the request's arrival."""

    __slots__ = ("_last", "_metrics", "_started")

    def __init__(self, metrics: RequestMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._last = arrived
        self._started = False

    def tick(self, tokens: int, accepted: int) -> None:
        """So many tokens are passed on now, of one step in which so many guesses were accepted."""
        now = time.monotonic()
        if self._started:
            self._metrics.next_tokens(now - self._last, tokens)
        else:
            self._started = True
            self._metrics.first_token(now - self._last)
        self._last = now
        self._metrics.skipped(accepted)
