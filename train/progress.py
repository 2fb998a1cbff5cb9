"""Lines that say how far a long stage is, how fast it goes and when it will be over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

EVERY_SECONDS = 10.0

Say = Callable[[str], None]


def say(text: str) -> None:
    """One line for whoever waits."""
    print(text, file=sys.stderr, flush=True)


class Stage:
    """A stage of `total` things, of which `done` were there before. Speaks at most every ten seconds."""

    def __init__(self, stage: str, unit: str, total: int, done: int, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._stage, self._unit, self._total, self._say, self._clock = stage, unit, total, say, clock
        self._first = self._done = done
        self._began = self._spoke = clock()

    def reached(self, done: int, more: str = "") -> None:
        """`more`: what else there is to say, such as the loss."""
        self._done = done
        now = self._clock()
        if now - self._spoke >= EVERY_SECONDS:
            self._spoke = now
            self._say(self.line(now) + more)

    def line(self, now: float) -> str:
        speed = (self._done - self._first) / max(1e-9, now - self._began)
        share = 100 * self._done / max(1, self._total)
        left = f", {_span((self._total - self._done) / speed)} left" if speed > 0 and self._done < self._total else ""
        return f"{self._stage}: {share:.0f} %, {self._done:,} of {self._total:,} {self._unit}, {_speed(speed)} {self._unit}/s{left}"


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.2f}"
