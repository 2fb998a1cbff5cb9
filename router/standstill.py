"""Which steps say nothing of what steps cost: those in which the process stood still. Knows no clock: it is told."""

from __future__ import annotations

_ABSURD = 4.0
"""times what was expected"""


class Standstill:
    """A step that took out of all proportion, alone among others, was stopped, or waited for its processor. Twice in a row it is how things
    are."""

    def __init__(self) -> None:
        self._before = False

    def saw(self, seconds: float, expected: float) -> bool:
        """Whether this step was one."""
        before, self._before = self._before, seconds > _ABSURD * expected
        return self._before and not before
