"""The number of threads: measured, and one core is the front's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from forerun.backends.cpu.threads import choose_threads, measure
from forerun.kernels.build import BuildError
from forerun.kernels.cpu.build import build


def taking(*seconds: Callable[[int], float]) -> Callable[[Sequence[int]], dict[int, tuple[float, ...]]]:
    return lambda counts: {count: tuple(one(count) for one in seconds) for count in counts}


def test_where_all_help_all_but_the_fronts_compute() -> None:
    ideal = taking(lambda n: 1 / n, lambda n: 1 / n)
    assert [choose_threads(cores, ideal) for cores in (1, 2, 3, 4, 9, 64)] == [1, 2, 2, 3, 8, 63]


def test_as_few_as_are_as_fast() -> None:
    """Two threads a core compute no faster than one, and eight read all that the memory gives."""
    assert choose_threads(64, taking(lambda n: 1 / min(n, 32), lambda n: 1 / min(n, 8))) == 32
    assert choose_threads(64, taking(lambda n: 1.0, lambda n: 1.0 + n / 100)) == 1
    assert choose_threads(64, taking(lambda n: 1 / n, lambda n: n)) == 63, "no number is best at both"


def test_two_cores_are_not_measured() -> None:
    def never(counts: Sequence[int]) -> dict[int, tuple[float, ...]]:
        raise AssertionError

    assert [choose_threads(cores, never) for cores in (1, 2)] == [1, 2]


def test_what_is_measured() -> None:
    try:
        taken = measure(build(), "", [2, 1])
    except (BuildError, OSError):
        pytest.skip("no native kernels here")
    assert list(taken) == [2, 1] and all(0 < one < 60 for times in taken.values() for one in times)
