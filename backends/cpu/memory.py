"""How much memory and how many cores this process may use: the machine's, cut by its cgroup (version 1 or 2) and affinity."""

from __future__ import annotations

import math
import os
from pathlib import Path

UNLIMITED = 1 << 60
"""cgroup v1 writes a huge number where there is no limit; anything from here on means none."""


class Limits:
    """Reads /proc and /sys below `root` (tests give their own)."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def memory(self) -> tuple[int, int]:
        """(available, total) bytes: the least over the machine and every cgroup from ours up to the top. Page cache that the kernel can
        drop counts as available."""
        meminfo = self._meminfo()
        free, total = meminfo["MemAvailable"], meminfo["MemTotal"]
        for limit, used in self._cgroup_memory():
            free, total = min(free, max(0, limit - used)), min(total, limit)
        return free, total

    def cores(self) -> int:
        """Cores that this process may keep busy: its affinity, cut by the CPU quota (rounded up), at least 1."""
        cores = len(os.sched_getaffinity(0))
        for folder in self._folders("cpu"):
            quota = self._text(folder / "cpu.max").split() or [
                self._text(folder / "cpu.cfs_quota_us").strip(),
                self._text(folder / "cpu.cfs_period_us").strip(),
            ]
            if len(quota) == 2 and quota[0] not in ("max", "", "-1") and float(quota[1]) > 0:
                cores = min(cores, math.ceil(float(quota[0]) / float(quota[1])))
        return max(1, cores)

    def _meminfo(self) -> dict[str, int]:
        pairs = (line.split(":") for line in self._text(self.root / "proc/meminfo").splitlines() if ":" in line)
        return {name: int(value.split()[0]) * 1024 for name, value in pairs}

    def _cgroup_memory(self) -> list[tuple[int, int]]:
        """(limit, bytes in use that cannot be dropped) of every cgroup that has a limit."""
        found = []
        for folder in self._folders("memory"):
            limit = self._text(folder / "memory.max") or self._text(folder / "memory.limit_in_bytes")
            used = self._text(folder / "memory.current") or self._text(folder / "memory.usage_in_bytes")
            if not limit.strip().isdigit() or int(limit) >= UNLIMITED or not used.strip().isdigit():
                continue
            stat = dict(line.split() for line in self._text(folder / "memory.stat").splitlines() if len(line.split()) == 2)
            cache = int(stat.get("inactive_file", stat.get("total_inactive_file", "0")))
            found.append((int(limit), max(0, int(used) - cache)))
        return found

    def _folders(self, controller: str) -> list[Path]:
        """Our cgroup's folder for a controller and its parents up to the mount, innermost first. Inside a container the path in
        /proc/self/cgroup may not exist below the mount: then the mount itself is ours."""
        folders: list[Path] = []
        for line in self._text(self.root / "proc/self/cgroup").splitlines():
            number, names, path = line.split(":", 2)
            if number == "0":
                mount = self.root / "sys/fs/cgroup"
            elif controller in names.split(","):
                mount = self.root / "sys/fs/cgroup" / controller
            else:
                continue
            folder = mount / path.lstrip("/")
            while folder != mount and mount in folder.parents:
                folders.append(folder)
                folder = folder.parent
            folders.append(mount)
        return [folder for folder in folders if folder.is_dir()]

    @staticmethod
    def _text(path: Path) -> str:
        try:
            return path.read_text()
        except OSError:
            return ""
