"""How long work takes in this process, and what this machine can do at the most: memory read, numbers multiplied."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from forerun.backends.cpu.backend import NativeCpu
from forerun.backends.cpu.regions import huge_pages

Work = Callable[[], object]


def seconds_of(work: Work, budget: float) -> list[float]:
    """Seconds of each of as many runs as fit in `budget` seconds, at least five; one before them is not counted."""
    work()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times


def least(work: Work, budget: float) -> float:
    return min(seconds_of(work, budget))


def median(work: Work, budget: float) -> float:
    return statistics.median(seconds_of(work, budget))


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Seconds of several works, measured round by round: the i-th of each belong together."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> float:
        """How many times as long as the other: the median of the rounds' own ratios. A machine whose speed changes from second to second
        changes both sides of each, where two medians may come from different seconds."""
        return statistics.median(one / two for one, two in zip(self.seconds[name], self.seconds[other]))


def in_turns(works: dict[str, Work], budget: float) -> Rounds:
    """`budget` seconds for each, at least five rounds; one before them is not counted."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    end = time.perf_counter() + budget * len(works)
    while len(next(iter(times.values()))) < 5 or time.perf_counter() < end:
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return Rounds(times)


def reading(backend: NativeCpu, count: int) -> Work:
    """Reads memory of `count` bytes, the kind that weights lie in, on the backend's threads."""
    memory = huge_pages(count).fill_(1)
    return lambda: backend.library.read(memory.data_ptr(), count)


def arithmetic(backend: NativeCpu, format: str, budget: float) -> float:
    """Multiplications a second, on operands that the cores' own caches hold, and so many that starting them does not count."""
    rows, inputs, outputs = 448, 512, 1024
    x, weight = torch.randn(rows, inputs), backend.pack(torch.randn(outputs, inputs), format)
    return rows * inputs * outputs / least(lambda: backend.ops.matmul(x, weight), budget)


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that keeps a core busy."""
    child = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    child.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        child.terminate()
        child.join()


def _spin() -> None:
    while True:
        pass


def cpu_seconds() -> tuple[float, float]:
    """Processor seconds of the whole machine since its start, and of this process."""
    with open("/proc/stat") as file:
        fields = [int(value) for value in file.readline().split()[1:9]]
    own = os.times()
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK"), own.user + own.system
