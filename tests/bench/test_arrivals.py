"""Arrival processes: rate, spread and repeatability."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.bench.arrivals import arrivals


def gaps(rate: float, burstiness: float, count: int, seed: int = 0) -> list[float]:
    times = [0.0, *itertools.islice(arrivals(rate, burstiness, seed), count)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_mean_and_spread(rate: float, burstiness: float) -> None:
    sample = gaps(rate, burstiness, 20_000)
    mean = statistics.fmean(sample)
    assert mean == pytest.approx(1 / rate, rel=0.05)
    assert statistics.stdev(sample) / mean == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_counts_have_the_variance_of_their_mean() -> None:
    """Counts in windows tell Poisson from anything else; bursts have more variance, regular arrivals less."""

    def dispersion(burstiness: float) -> float:
        windows = [0] * 2000
        for time in itertools.takewhile(lambda time: time < len(windows), arrivals(5, burstiness, 1)):
            windows[int(time)] += 1
        return statistics.variance(windows) / statistics.fmean(windows)

    assert dispersion(1.0) == pytest.approx(1, abs=0.1)
    assert dispersion(0.2) > 2
    assert dispersion(5.0) < 0.5


@settings(max_examples=30)
@given(st.floats(0.1, 1000), st.floats(0.1, 10), st.integers(0, 2**32))
def test_ascending_and_repeatable(rate: float, burstiness: float, seed: int) -> None:
    first = gaps(rate, burstiness, 20, seed)
    assert first == gaps(rate, burstiness, 20, seed)
    assert all(gap >= 0 for gap in first)


def test_another_seed_is_another_process() -> None:
    assert gaps(1, 1, 5, seed=1) != gaps(1, 1, 5, seed=2)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (1, 0)])
def test_nonsense_is_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        next(arrivals(rate, burstiness))
