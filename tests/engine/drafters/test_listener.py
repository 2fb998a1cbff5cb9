"""What drafters of features hear, where what waits is too much, and where making entries of it fails."""

from __future__ import annotations

import pytest

from forerun.engine.drafters.calibration import Calibration
from forerun.engine.drafters.listener import Listener
from forerun.engine.drafters.taps import Traced
from tests.engine.drafters.test_taps import commit, trail

STORED = 64


class Writer:
    """A drafter as far as it makes entries. `trouble`: its forwards fail."""

    def __init__(self) -> None:
        self.trouble = False
        self.listener = Listener(Calibration([0.5]), self.enter)
        self.listener.open(trail(stored=STORED))

    def enter(self, traced: Traced, count: int) -> None:
        self.listener.trail.take(traced, count)
        if self.trouble:
            raise RuntimeError("out of memory")
        self.listener.trail.entered(traced, traced.row.computed)


def test_a_row_whose_entries_could_not_be_made_is_lost_whoever_was_told_of() -> None:
    """Row 1 brings too much, row 0 has most, and the forward over that fails. Whoever told of row 1 knows nothing of it."""
    writer = Writer()
    listener, known = writer.listener, writer.listener.trail
    listener.asked()
    listener.absorb(commit(0, 0, list(range(60)), 60))
    listener.absorb(commit(2, 0, [1, 2], 3))
    writer.trouble = True
    with pytest.raises(RuntimeError):
        listener.absorb(commit(1, 0, list(range(30)), 30))
    writer.trouble = False
    assert known.get(0) is None and known.get(1) is None and known.get(2) is not None and known.waiting == 2
    listener.absorb(commit(0, 60, [60], 61))
    listener.asked()
    assert known.get(0) is None, "it is not told of until it begins anew"
    listener.absorb(commit(0, 0, list(range(60)), 60))
    again = known.get(0)
    assert again is not None and again.row.computed == 0, "what was about to be made is not found"


def test_it_says_how_far_it_is_behind() -> None:
    """What was put off is no exception."""
    writer = Writer()
    listener = writer.listener
    listener.absorb(commit(2, 0, list(range(40)), 40))
    listener.absorb(commit(2, 40, [40], 41))
    assert listener.behind(2) == 41 and listener.behind(3) == 0
    traced = listener.trail.get(2)
    assert traced is not None
    writer.enter(traced, 30)
    assert listener.behind(2) == 11
