"""What the process may take, read from files as they look on real machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forerun.backends.cpu.memory import Limits

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1000 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"


class Machine:
    """A fake root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", MEMINFO)

    def write(self, path: str, text: object) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(str(text))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_cgroup(machine: Machine) -> None:
    assert Limits(machine.root).memory() == (8 * GIB, 16 * GIB)


@pytest.mark.parametrize(
    ("limit", "used", "cache", "expected"),
    [
        (4 * GIB, GIB, 0, (3 * GIB, 4 * GIB)),
        (4 * GIB, 3 * GIB, 2 * GIB, (3 * GIB, 4 * GIB)),
        (4 * GIB, 5 * GIB, 0, (0, 4 * GIB)),
        (64 * GIB, GIB, 0, (8 * GIB, 16 * GIB)),
        ("max", GIB, 0, (8 * GIB, 16 * GIB)),
    ],
)
def test_version_2(machine: Machine, limit: object, used: int, cache: int, expected: tuple[int, int]) -> None:
    machine.write("proc/self/cgroup", "0::/system.slice/ours\n")
    machine.write("sys/fs/cgroup/system.slice/ours/memory.max", limit)
    machine.write("sys/fs/cgroup/system.slice/ours/memory.current", used)
    machine.write("sys/fs/cgroup/system.slice/ours/memory.stat", f"anon 1\ninactive_file {cache}\n")
    assert Limits(machine.root).memory() == expected


def test_a_parent_may_be_tighter(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/ours\n")
    for folder, limit in (("pod", 2 * GIB), ("pod/ours", 3 * GIB)):
        machine.write(f"sys/fs/cgroup/{folder}/memory.max", limit)
        machine.write(f"sys/fs/cgroup/{folder}/memory.current", GIB)
    assert Limits(machine.root).memory() == (GIB, 2 * GIB)


def test_inside_a_container_the_mount_is_ours(machine: Machine) -> None:
    """The path names a folder of the host that cannot be seen from here."""
    machine.write("proc/self/cgroup", "0::/kubepods/burstable/pod1/abc\n")
    machine.write("sys/fs/cgroup/memory.max", 4 * GIB)
    machine.write("sys/fs/cgroup/memory.current", GIB)
    assert Limits(machine.root).memory() == (3 * GIB, 4 * GIB)


@pytest.mark.parametrize(("limit", "expected"), [(2 * GIB, (GIB, 2 * GIB)), (9223372036854771712, (8 * GIB, 16 * GIB))])
def test_version_1(machine: Machine, limit: int, expected: tuple[int, int]) -> None:
    machine.write("proc/self/cgroup", "11:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/docker/abc\n")
    machine.write("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", limit)
    machine.write("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", GIB + GIB // 2)
    machine.write("sys/fs/cgroup/memory/docker/abc/memory.stat", f"cache 5\ntotal_inactive_file {GIB // 2}\n")
    assert Limits(machine.root).memory() == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 8), ("150000 100000", 2), ("200000 100000", 2), ("5000 100000", 1), ("", 8)]
)
def test_cores(machine: Machine, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    machine.write("proc/self/cgroup", "0::/ours\n")
    machine.write("sys/fs/cgroup/ours/cpu.max", quota)
    assert Limits(machine.root).cores() == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("350000", 4)])
def test_cores_version_1(machine: Machine, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    machine.write("proc/self/cgroup", "4:cpu,cpuacct:/ours\n")
    machine.write("sys/fs/cgroup/cpu/ours/cpu.cfs_quota_us", quota)
    machine.write("sys/fs/cgroup/cpu/ours/cpu.cfs_period_us", "100000\n")
    assert Limits(machine.root).cores() == expected


def test_here() -> None:
    free, total = Limits().memory()
    assert 0 < free <= total
    assert 1 <= Limits().cores() <= (os.cpu_count() or 1)
