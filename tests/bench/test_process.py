"""What /proc says of a process, checked on processes that do a known thing."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
import time

import pytest

from forerun.bench.process import Others, children, command_line, cpu_seconds, idle, own_cpu_seconds, resident_bytes


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
    block = mmap.mmap(-1, 50_000_000)  # not the allocator's: it may hand out what was touched before
    before = resident_bytes(os.getpid())
    block.write(bytes(len(block)))
    assert resident_bytes(os.getpid()) - before > 40_000_000
    block.close()


def test_who_waits_is_idle_and_who_works_is_not() -> None:
    work = "import time\nprint(flush=True)\ninput()\nuntil = time.monotonic() + 60\nwhile time.monotonic() < until: pass"
    child = subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdin and child.stdout and child.stdout.readline()
        deadline = time.monotonic() + 10
        while not idle(child.pid) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert idle(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        while idle(child.pid) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not idle(child.pid)
    finally:
        child.kill()
        child.communicate()
    assert idle(child.pid), "it is gone"


def test_who_works_is_not_idle_because_a_thread_of_it_ended_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was listed, and is gone when its state is read; the thread that asks is running."""
    monkeypatch.setattr(os, "listdir", lambda folder, listed=os.listdir: ["0", *listed(folder)])
    assert not idle(os.getpid())


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


def test_others_are_those_who_are_not_family() -> None:
    """The machine is never idle in a test, so only lower bounds hold: a busy stranger counts, and a busy child is subtracted."""
    work = "import time\nwhile time.process_time() < 0.8: pass"
    adopt = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {work!r}])"
    subprocess.run([sys.executable, "-c", adopt], check=True)
    others = Others()
    time.sleep(0.5)
    stranger = others.share() * (os.cpu_count() or 1)
    assert stranger > 0.1
    before, watched = _children_seconds(), Others()
    subprocess.run([sys.executable, "-c", work], check=True)
    assert _children_seconds() - before >= 0.7
    assert 0 <= watched.share() <= 1


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
