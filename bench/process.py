"""What Linux tells of a process: processor time, memory, children. Reads /proc; knows nothing of servers."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads, also ended ones: utime + stime. Raises FileNotFoundError when the process is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def own_cpu_seconds() -> float:
    """Processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident_bytes(pid: int) -> int:
    """Memory of the process that is in RAM now (VmRSS)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no memory of its own (a zombie?)")


def family_bytes(pid: int) -> int:
    """Memory in RAM of the process and its descendants; a page that several of them map counts once in all (Pss)."""
    own = next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(own.split()[1]) * 1024 + sum(map(family_bytes, children(pid)))


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    return [pid, *(member for child in children(pid) for member in family(child))]


def idle(pid: int) -> bool:
    """No thread of the process is running, about to, or reading a disk; so is one that is gone."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return True
    return not any(map(_busy, threads))


def _busy(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "RD"
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile; the others may be busy
        return False


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")


class Others:
    """Watches, from its making on, how busy programs other than this process and its ended children keep the machine."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy = _busy_seconds() - _family_seconds()

    def share(self) -> float:
        """Of all cores, 0 … 1. Ask when the children have ended: a child's time is known then."""
        foreign = _busy_seconds() - _family_seconds() - self._busy
        return max(0.0, foreign / (time.monotonic() - self._began) / (os.cpu_count() or 1))


def _busy_seconds() -> float:
    """Processor time of everything on the machine since it booted."""
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + soft) / TICKS


def _family_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own_cpu_seconds() + usage.ru_utime + usage.ru_stime
