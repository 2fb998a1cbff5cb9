from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.router.shares import divide


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 60), st.integers(0, 8))
def test_nothing_is_wasted_and_nobody_gets_more_than_needed(needs: list[int], budget: int, fresh: int) -> None:
    fresh = min(fresh, budget, len(needs))
    shares = divide(budget, needs, fresh)
    assert sum(shares) == min(budget, sum(needs))
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    assert all(share >= 1 for share in shares[len(needs) - fresh :])
    assert shares[0] >= min(needs[0], (budget - fresh) // 2), "the oldest has half"


def test_equals_are_served_one_after_the_other() -> None:
    assert divide(10, [8, 8, 8], 0) == [8, 2, 0]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    assert divide(100, [8000, 20], 1) == [80, 20]


def test_a_stream_of_short_prompts_leaves_the_long_one_half() -> None:
    assert divide(100, [8000, 40, 40, 40], 3) == [50, 40, 9, 1]
