from __future__ import annotations

import pytest

from forerun.router.policy import Policy
from forerun.router.sizes import Sizes
from tests.router.worker_model import ready


def test_limits_are_the_lower_of_both_sides() -> None:
    worker = ready(rows=8, pages=100, page_tokens=16, max_tokens=512, max_step_tokens=256)
    sizes = Sizes.of(worker, Policy(max_batch_total_tokens=1000, max_batch_size=4, max_batch_prefill_tokens=9999, max_step_tokens=128))
    assert (sizes.rows, sizes.pages, sizes.step_tokens, sizes.prefill_tokens, sizes.longest) == (4, 63, 128, 128, 512)
    assert Sizes.of(worker, Policy()).pages == 100


def test_the_longest_sequence_always_fits() -> None:
    sizes = Sizes.of(ready(pages=3, page_tokens=4, max_tokens=4096), Policy())
    assert sizes.longest == 12
    assert Sizes.of(ready(), Policy(max_total_tokens=10)).longest == 10


@pytest.mark.parametrize("policy", [Policy(max_batch_total_tokens=0), Policy(max_batch_size=0), Policy(max_step_tokens=0)])
def test_limits_that_leave_nothing_are_refused_with_a_cure(policy: Policy) -> None:
    with pytest.raises(ValueError, match="raise max_"):
        Sizes.of(ready(), policy)


def test_the_reserve_never_takes_the_whole_pool() -> None:
    assert Sizes.of(ready(pages=1), Policy(watermark=1.0)).reserve == 0
