from __future__ import annotations

from forerun.router.standstill import Standstill


def test_a_step_alone_out_of_all_proportion_is_one_and_the_next_like_it_is_not() -> None:
    standstill = Standstill()
    assert [standstill.saw(seconds, 0.01) for seconds in (0.01, 0.039, 0.3, 0.01, 0.3, 0.3, 0.3, 0.02, 0.05)] == [
        *(False, False, True, False),
        *(True, False, False, False, True),
    ]
