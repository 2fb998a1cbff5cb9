"""What happened lately, for the live page: the last minutes second by second, and how long tokens took.

Fed on the event loop while the metrics are, with the times that it is told; holds a bounded number of numbers and decides nothing.
Counts in a `Sample` grow from the start of the server, so that whoever has seen one knows what came since, however many it missed.
"""

from __future__ import annotations

from collections import deque
from itertools import dropwhile

import msgspec

from forerun.router.observer import Load, StepReport

KEPT_SECONDS = 300.0
SAMPLE_SECONDS = 1.0
WINDOW_SECONDS = 60.0
MOST_TIMES = 1024
"""times that quantiles look at, at most: ten of them are above the 99th percentile, and sorting them is no pause for anybody's stream"""


class Sample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`at`: monotonic seconds. Of that moment: sequences `running` and `waiting`, KV pages `used` and `cached`. Since the start: `tokens`
    generated, `prompt` tokens computed, `turns` (rows that decoded, each step anew), guesses `drafted` and `accepted`."""

    at: float
    running: int
    waiting: int
    used: int
    cached: int
    tokens: int
    prompt: int
    turns: int
    drafted: int
    accepted: int


class History:
    """Not more than a sample a second, of the last five minutes."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=round(KEPT_SECONDS / SAMPLE_SECONDS))
        self._last = -SAMPLE_SECONDS
        self._tokens = self._prompt = self._turns = self._drafted = self._accepted = 0

    def stepped(self, report: StepReport) -> None:
        self._tokens += report.tokens
        self._prompt += report.prefill_tokens
        self._turns += report.decode_rows
        self._drafted += report.drafted
        self._accepted += report.accepted

    def load(self, load: Load, now: float) -> None:
        if now - self._last < SAMPLE_SECONDS:
            return
        self._last = now
        counts = self._tokens, self._prompt, self._turns, self._drafted, self._accepted
        self._samples.append(Sample(now, load.running, load.waiting, load.used_pages, load.cached_pages, *counts))

    def since(self, then: float) -> list[Sample]:
        """Those that were taken after `then`, oldest first."""
        return list(dropwhile(lambda sample: sample.at <= then, self._samples))


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds, of so many tokens."""

    p50: float
    p95: float
    p99: float
    tokens: int


class Times:
    """How long tokens took, of the last minute."""

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: deque[tuple[float, float, int]] = deque(maxlen=MOST_TIMES)

    def observe(self, now: float, seconds: float, tokens: int = 1) -> None:
        """So many tokens took `seconds` each. Called for each step of each request."""
        self._times.append((now, seconds, tokens))

    def quantiles(self, now: float) -> Quantiles | None:
        """None when there was no token."""
        lately = sorted((seconds, tokens) for at, seconds, tokens in self._times if now - at <= WINDOW_SECONDS)
        total = sum(tokens for _, tokens in lately)
        if not total:
            return None
        found: list[float] = []
        seen = 0
        wanted = deque((0.5, 0.95, 0.99))
        for seconds, tokens in lately:
            seen += tokens
            while wanted and seen >= wanted[0] * total:
                found.append(seconds)
                wanted.popleft()
        return Quantiles(found[0], found[1], found[2], total)
