"""Row numbers of a worker, and who holds them.

A number that became free may be given out in the next plan already: that plan also drops it, and a worker applies drops before
admits. Results are matched to who held the row at their step (see `step.py`), so nobody is taken for somebody else.
"""

from __future__ import annotations

import bisect

from forerun.router.entry import Entry, Rank


class Rows:
    """`running` is in order of rank; the rest of the scheduler relies on it."""

    def __init__(self, total: int) -> None:
        self.running: list[Entry] = []
        self._free = list(range(total - 1, -1, -1))
        self._dropping: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def enter(self, entry: Entry) -> None:
        entry.number = self._free.pop()
        bisect.insort(self.running, entry, key=_rank)

    def leave(self, entry: Entry) -> None:
        del self.running[bisect.bisect_left(self.running, entry.rank, key=_rank)]
        self._free.append(entry.number)
        self._dropping.append(entry.number)
        entry.number = -1

    def drops(self) -> list[int]:
        """Numbers that were left since the last plan; the plan being made carries them."""
        dropping, self._dropping = self._dropping, []
        return dropping


def _rank(entry: Entry) -> Rank:
    return entry.rank
