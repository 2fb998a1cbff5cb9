"""How long asking a drafter that computes takes: by the rows it is asked about, and by what it has not read of them yet.

It reads a prompt when it is asked about a row for the first time, and whatever was written since when it was not asked for a while: a
part at each ask, and it has no guess before it has read all. That is paid once, so it must not count as what every ask takes; nor may it be
forgotten, where a row ends before it has paid.
"""

from __future__ import annotations

from forerun.engine.drafters.pace import Pace

USUAL = 24
"""tokens a row that are news at any ask; more is something to catch up with"""
_LEAST = 0.05
"""share of a measured time that is attributed at the least to reading"""


class Asking:
    """Seconds. Nothing as long as nothing is known."""

    def __init__(self) -> None:
        self._pace, self._read = Pace(), Pace()

    def observe(self, rows: int, unread: int, seconds: float) -> None:
        """An ask took so long. `rows`: those that it drafted for; `unread`: tokens that it caught up with, beyond the usual."""
        asking = self.seconds(rows)
        if not unread:
            self._pace.observe(rows, seconds)
        elif asking or not rows:
            self._read.observe(1, max(seconds - asking, _LEAST * seconds) / unread)
        else:  # the first one: nobody knows what took how long
            self._pace.observe(rows, seconds / 2)
            self._read.observe(1, seconds / 2 / unread)

    def seconds(self, rows: int) -> float:
        """Of an ask about rows that it has read."""
        return self._pace.seconds(rows) if rows else 0.0

    def reading(self, unread: int) -> float:
        return self._read.seconds(1) * unread
