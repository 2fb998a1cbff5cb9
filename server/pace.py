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
        metrics, now = self._metrics, time.monotonic()
        seconds, self._last = now - self._last, now
        if self._started:
            metrics.between_tokens(seconds / tokens, tokens)
            metrics.gaps.observe(now, seconds / tokens, tokens)
        else:
            self._started = True
            metrics.first_token(seconds)
            metrics.first_tokens.observe(now, seconds)
        metrics.skipped(accepted)
