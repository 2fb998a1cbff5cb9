"""What drafters with features share in hearing what became true: when they are told (`ear.py`), what they remember (`taps.py`), and that
what is too much to remember is entered while somebody drafts.

    commit ─▶ Listener ─▶ Ear ─▶ Trail, calibration ─▶ too much waits? ─▶ `enter` of the drafter

Knows nothing of what an entry is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.engine.drafters.calibration import Calibration
from forerun.engine.drafters.draft import Commit, Late
from forerun.engine.drafters.ear import Ear
from forerun.engine.drafters.taps import Traced, Trail

CATCH_UP = 512
"""entries that are made up for in one call, beside those behind each root"""
QUIET = 64
"""commits without a question after which nobody is drafting"""


class Listener:
    """`enter`: makes the next so many entries (at most `CATCH_UP`) of a row."""

    trail: Trail
    """there from `open` on"""

    def __init__(self, calibration: Calibration, enter: Callable[[Traced, int], None]) -> None:
        self._calibration, self._enter = calibration, enter
        self._ear = Ear(self._learn, self._lose)
        self._quiet = 0

    def open(self, trail: Trail) -> None:
        self.trail = trail

    @property
    def late(self) -> int:
        """Positions of the target that the drafter never saw, so far."""
        self._ear.heed()
        return self.trail.late

    def lacks(self) -> Late:
        """The same of what was told, without telling what was put off: it is asked every step."""
        return Late(positions=self.trail.late)

    def behind(self, number: int) -> int:
        """Entries of a row that can be made and are not. Whoever wants to know drafts."""
        self.asked()
        traced = self.trail.get(number)
        return max(0, self.trail.due(traced)) if traced is not None else 0

    def absorb(self, commit: Commit) -> None:
        self._quiet += 1
        self._ear.hear(commit)

    def asked(self) -> None:
        """Somebody drafts: everything that became true has to be known."""
        self._quiet = 0
        self._ear.heed()

    def forget(self, rows: Sequence[int]) -> None:
        try:
            self._ear.heed()
        finally:
            self._lose(rows)

    def _lose(self, rows: Sequence[int]) -> None:
        for number in rows:
            self._calibration.forget(number)
        self.trail.forget(rows)

    def _learn(self, commit: Commit) -> None:
        self.trail.learn(commit, self._calibration)
        if self.trail.excess and self._quiet <= QUIET:
            self._enter_excess()
        self.trail.shed()

    def _enter_excess(self) -> None:
        """The oldest of the rows with most first. They need not be those that were told of, so one that this fails at is lost by name: its
        features are taken, and nobody wrote what they were taken for."""
        count = self.trail.excess
        for traced in reversed(self.trail.behind()):
            # Where entries have successors the newest stays: the next draft begins with what is made of it.
            part = min(count, self.trail.due(traced) - self.trail.successor)
            while part > 0:
                taken = min(part, CATCH_UP)
                try:
                    self._enter(traced, taken)
                except Exception:
                    self._ear.lose([traced.row.number])
                    raise
                part, count = part - taken, count - taken
