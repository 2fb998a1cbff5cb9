"""Percentiles and summaries."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.bench.stats import Summary, median, percentile, summarize

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(values, st.floats(0, 100))
def test_percentile_is_numpys(sample: list[float], q: float) -> None:
    assert percentile(sorted(sample), q) == pytest.approx(numpy.percentile(sample, q), rel=1e-9, abs=1e-6)


@given(values)
def test_percentiles_ascend_and_stay_inside(sample: list[float]) -> None:
    found = summarize(sample)
    assert min(sample) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(sample)
    assert found.count == len(sample)


@given(values)
def test_scale_changes_the_unit(sample: list[float]) -> None:
    assert summarize(sample, 1000).p90 == pytest.approx(summarize(sample).p90 * 1000)


def test_no_values_are_said_to_be_none() -> None:
    assert summarize([]) == Summary(count=0)
    with pytest.raises(ValueError, match="at least one"):
        median([])


@pytest.mark.parametrize("q", [-1, 100.5])
def test_a_percentile_outside_its_range_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match=r"0 … 100"):
        percentile([1.0], q)
