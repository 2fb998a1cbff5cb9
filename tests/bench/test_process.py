"""What /proc says of a process, checked on processes that do a known thing."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from forerun.bench.process import children, command_line, cpu_seconds, own_cpu_seconds, resident_bytes


def test_processor_time_counts_work_not_waiting() -> None:
    before = cpu_seconds(os.getpid()), own_cpu_seconds()
    time.sleep(0.2)
    assert cpu_seconds(os.getpid()) - before[0] < 0.1
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    assert cpu_seconds(os.getpid()) - before[0] >= 0.15
    assert own_cpu_seconds() - before[1] >= 0.2


def test_memory_counts_what_is_touched() -> None:
    before = resident_bytes(os.getpid())
    block = b"x" * 50_000_000
    assert resident_bytes(os.getpid()) - before > 40_000_000
    del block


def test_children_and_their_command_lines() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()", "a b"], stdin=subprocess.PIPE)
    try:
        assert child.pid in children(os.getpid())
        deadline = time.monotonic() + 10
        while command_line(child.pid)[0] != sys.executable and time.monotonic() < deadline:
            time.sleep(0.01)
        assert command_line(child.pid) == [sys.executable, "-c", "input()", "a b"]
    finally:
        child.communicate(b"\n")
    with pytest.raises(FileNotFoundError):
        cpu_seconds(child.pid)
