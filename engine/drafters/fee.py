"""What asking a source takes: a forward by its rows, and what it has to read of them before.

Reading is paid once, when a row is asked about for the first time or after a pause, so it must not count as what every ask takes.
"""

from __future__ import annotations

from forerun.engine.drafters.pace import Pace

USUAL = 24
"""tokens of a row that are news in any step; more is something to catch up with"""
ASKS = 16
"""asks over which reading is spread"""
_STEP = 0.2


class Fee:
    def __init__(self) -> None:
        self._pace = Pace()
        self._read = 0.0
        """seconds a token, 0 = nothing is known"""

    def observe(self, rows: int, seconds: float, unread: int) -> None:
        """An ask about so many rows, of which so many tokens had to be caught up with."""
        usual = self._pace.seconds(rows)
        if not unread or not usual:  # of the first one nobody knows what took how long
            self._pace.observe(rows, seconds / 2 if unread else seconds)
        if unread:
            each = (max(0.0, seconds - usual) if usual else seconds / 2) / unread
            self._read += (each - self._read) * (_STEP if self._read else 1.0)

    def asking(self, rows: int) -> float:
        """Seconds of a forward of so many rows; 0 as long as nothing is known."""
        return self._pace.seconds(rows) if rows else 0.0

    def reading(self, unread: int) -> float:
        return self._read * unread
