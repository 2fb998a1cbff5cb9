"""What asking takes, apart from what reading takes."""

from __future__ import annotations

import pytest

from forerun.engine.drafters.asking import Asking


def test_reading_is_no_part_of_what_an_ask_takes() -> None:
    """Whichever of them comes first: an ask of three milliseconds, of a source that reads fifty tokens in one."""
    for unread in (500, 0), (0, 500):
        asking = Asking()
        assert asking.seconds(1) == asking.reading(100) == 0.0, "nothing is known"
        for _ in range(20):
            for count in unread:
                asking.observe(1, count, 0.003 + 0.00002 * count)
        assert asking.seconds(1) == pytest.approx(0.003, rel=0.2) and asking.reading(100) == pytest.approx(0.002, rel=0.2)
        assert asking.seconds(0) == asking.reading(0) == 0.0


def test_an_ask_that_drafts_nothing_is_all_reading() -> None:
    """A prompt of which a part was read; also before anybody knows what an ask takes, and where that is more than reading a part."""
    for first in (False, True):
        asking = Asking()
        if first:
            asking.observe(1, 0, 0.016)
        asking.observe(0, 100, 0.005)
        assert asking.reading(100) == pytest.approx(0.005) and asking.seconds(1) == pytest.approx(0.016 * first)
