"""How many threads compute: as few as are as fast as all, by measuring. Knows no model; its caller knows the cores.

Threads on the second halves of cores (SMT), and threads beyond what the memory can feed, take time from the front and from other processes
and give nothing back. Results do not depend on the number of threads, so a measurement that a neighbour spoils costs speed alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from forerun.backends.cpu.library import Library
from forerun.backends.cpu.native_ops import NativeOps
from forerun.backends.cpu.regions import Regions
from forerun.backends.cpu.weights import pack

Times = Mapping[int, tuple[float, ...]]
"""By number of threads: seconds of each kind of work."""

WORTH = 1.05
"""More threads must be so much faster, in one kind of work at least."""
ROUNDS, LONGEST = 5, 1.0
"""Turns, and seconds after which there is no further one."""
WEIGHT = (16384, 1024)
"""32 MiB of bf16. One row is bound by memory, MANY rows by arithmetic."""
MANY = 16


def choose_threads(cores: int, timed: Callable[[Sequence[int]], Times]) -> int:
    """Of one or two cores all: the pool itself steps back to one thread when another process wants a core. Of more, one is left to the
    front, and of the others the smallest number, halving it each time, that is within 5 % of the best in everything measured."""
    if cores <= 2:
        return cores
    counts = [cores - 1]
    while counts[-1] > 1:
        counts.append((counts[-1] + 1) // 2)
    taken = timed(counts)
    best = [min(times) for times in zip(*taken.values())]
    good = [count for count, times in taken.items() if all(one <= WORTH * least for one, least in zip(times, best))]
    return min(good, default=cores - 1)


def measure(path: Path, isa: str, counts: Sequence[int]) -> Times:
    """The least seconds of a product of one row and of one of MANY, with so many threads each, in turns."""
    weight = pack(torch.ones(WEIGHT), "bf16", Regions())
    rows = [torch.ones(count, WEIGHT[1]) for count in (1, MANY)]
    taken = {count: [float("inf")] * len(rows) for count in counts}
    until = time.perf_counter() + LONGEST
    libraries = {count: Library(path, count, isa) for count in counts}
    try:
        for _ in range(ROUNDS):
            for count, library in libraries.items():
                for kind, x in enumerate(rows):
                    begin = time.perf_counter()
                    NativeOps(library).matmul(x, weight)
                    taken[count][kind] = min(taken[count][kind], time.perf_counter() - begin)
            if time.perf_counter() > until:
                break
    finally:
        for library in libraries.values():
            library.close()
    return {count: tuple(times) for count, times in taken.items()}
