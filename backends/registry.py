"""Which devices exist and how one is opened. The only list of device names."""

from __future__ import annotations

from forerun.backends.base import Backend

NAMES = ("auto", "cpu")


def open_backend(name: str, threads: int = 0, memory_fraction: float = 1.0) -> Backend:
    """`name`: auto or cpu; `threads`: compute threads, 0 = chosen from the cores this process may use; `memory_fraction`: share of the
    device's memory that may be taken. ValueError for a device that this version does not have."""
    if name not in NAMES:
        raise ValueError(f"device {name!r} is not available in this version; use --device cpu")
    if threads < 0:
        raise ValueError(f"--threads {threads} makes no sense; use 0 to choose by the machine, or the number of compute threads")
    if not 0.0 < memory_fraction <= 1.0:
        raise ValueError(f"memory fraction {memory_fraction} must lie in (0, 1]")
    from forerun.backends.cpu.backend import open_cpu

    return open_cpu(threads, memory_fraction)
