"""Which sequence kills workers.

A worker that dies does not say which of its rows it choked on. But the front knows the step it was busy with and whom it fed. A sequence
that was fed in that step at two deaths in a row and got no token in between is suspect; if it is the only one, it is to blame.
If several are, they are put into the next worker one at a time (see `Admission`): those that are innocent get a token, and the next
death leaves one. A death that is explained says nothing about anybody else: it is as if it had not happened.

Owns the comparison; decides nothing about workers. Knows no time: how many deaths are too many is the replica's.
"""

from __future__ import annotations

from collections.abc import Iterable

from forerun.router.request import Sequence


class Suspects:
    def __init__(self) -> None:
        self.several = False
        """the last death that was not explained left more than one"""
        self._busy: dict[Sequence, int] = {}
        """whom the worker was busy with at that death, and how many tokens each had"""

    def died(self, busy: Iterable[Sequence]) -> Sequence | None:
        """A worker died that was busy with these. Returns the one to blame, if there is exactly one."""
        now = {sequence: len(sequence.tokens) for sequence in busy}
        suspects = [sequence for sequence, tokens in now.items() if self._busy.get(sequence) == tokens]
        if len(suspects) == 1:
            del self._busy[suspects[0]]
            return suspects[0]
        self._busy = now
        self.several = bool(suspects)
        return None
