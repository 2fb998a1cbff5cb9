"""Turns: one runs at a time, each has its own clock, and afterwards all run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from forerun.bench import turns as turns_module
from forerun.bench.turns import Clock, Turns, in_turns, standing

FAMILIES = [[101, 102], [201], [301]]
TURN = 0.01


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The signals that were sent, none of which arrives."""
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: signals.append((pid, signum)))
    return signals


async def test_one_family_runs_at_a_time_and_all_in_the_end(sent: list[tuple[int, int]]) -> None:
    async with Turns(FAMILIES, TURN):
        await asyncio.sleep(20 * TURN)
        running: set[int] = set()
        seen: set[int] = set()
        for pid, signum in sent:
            running = running | {pid} if signum == signal.SIGCONT else running - {pid}
            assert any(running <= set(family) for family in FAMILIES)
            seen |= running
        assert seen == {101, 102, 201, 301}
    assert {pid for pid, signum in sent[-4:] if signum == signal.SIGCONT} == seen


async def test_a_turn_ends_with_the_front_and_the_others_finish_what_they_have(sent: list[tuple[int, int]]) -> None:
    looks: list[int] = []

    def idle(pid: int) -> bool:
        looks.append(pid)
        last = dict(sent)
        assert [of for of, signum in last.items() if signum == signal.SIGCONT] == [pid], "its front stands still, and nobody else runs"
        return len(looks) > 5

    async with Turns([[101, 102], [201]], TURN, idle) as turns:
        await asyncio.sleep(20 * TURN)
        assert len(looks) >= 7 and set(looks) == {102}, "until it was idle twice in a row, or it might be between two things"
        assert turns.clock(1)() > 0


async def test_who_never_finishes_is_stopped_all_the_same(sent: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "FINISH_SECONDS", TURN)
    async with Turns([[101, 102], [201]], TURN, lambda pid: False) as turns:
        await asyncio.sleep(20 * TURN)
        assert turns.clock(0)() >= 2 * TURN
        assert turns.clock(1)() > 0


async def test_a_server_of_which_nothing_is_waited_for_is_stopped_whole(sent: list[tuple[int, int]]) -> None:
    """Its worker would go on without its front, which its answers wait for, and its clock runs."""

    async def job(clock: Clock) -> float:
        for _ in range(60):
            await asyncio.sleep(TURN / 10)
        return clock()

    assert min(await in_turns([[101, 102], [201]], [job, job], TURN, idle=None)) > 0
    front, worker = ([signum for of, signum in sent if of == pid] for pid in (101, 102))
    assert front == worker and front.count(signal.SIGSTOP) >= 2, "a front that is stopped first is stopped twice a turn"


def test_servers_that_wait_stand_still_and_go_on_whatever_happens(sent: list[tuple[int, int]]) -> None:
    with pytest.raises(ZeroDivisionError), standing(FAMILIES):
        assert sent == [(pid, signal.SIGSTOP) for pid in (101, 102, 201, 301)]
        del sent[:]
        raise ZeroDivisionError
    assert sent == [(pid, signal.SIGCONT) for pid in (101, 102, 201, 301)]


async def test_clocks_go_only_in_their_own_turn(sent: list[tuple[int, int]]) -> None:
    async with Turns(FAMILIES, TURN) as turns:
        clocks = [turns.clock(place) for place in range(3)]
        began = time.perf_counter()
        while min(clock() for clock in clocks) < 2 * TURN:
            before = [clock() for clock in clocks]
            await asyncio.sleep(0)
            later = [clock() for clock in clocks]
            assert all(one <= other for one, other in zip(before, later))
        assert sum(clock() for clock in clocks) <= time.perf_counter() - began + TURN


async def test_who_is_done_gets_no_turn(sent: list[tuple[int, int]]) -> None:
    async with Turns(FAMILIES, TURN) as turns:
        turns.leave(0)
        turns.leave(1)
        await asyncio.sleep(5 * TURN)
        stands, goes = turns.clock(1)(), turns.clock(2)()
        assert (stands, goes > 0) == (turns.clock(1)(), True)
        assert 101 not in {pid for pid, signum in sent if signum == signal.SIGCONT}


async def test_what_was_stopped_goes_on_even_after_an_error() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    try:
        with pytest.raises(ZeroDivisionError):
            async with Turns([[child.pid], [child.pid]], TURN):
                raise ZeroDivisionError
        await asyncio.wait_for(child.communicate(b"\n"), 60)
    finally:
        if child.returncode is None:
            child.kill()
    assert child.returncode == 0


async def test_a_process_that_died_keeps_nobody_stopped(sent: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, signum: int) -> None:
        if pid == 101:
            raise ProcessLookupError
        sent.append((pid, signum))

    monkeypatch.setattr(os, "kill", kill)
    async with Turns(FAMILIES, TURN) as turns:
        clocks = [turns.clock(place) for place in range(3)]
        while min(spent := [clock() for clock in clocks]) < 2 * TURN:
            await asyncio.sleep(0)
            assert [clock() for clock in clocks] >= spent
    assert {pid for pid, signum in sent[-3:] if signum == signal.SIGCONT} == {102, 201, 301}


async def test_an_interrupt_while_turns_end_leaves_nobody_stopped(sent: list[tuple[int, int]]) -> None:
    async def measure() -> None:
        try:
            async with Turns(FAMILIES, TURN):
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            raise

    task = asyncio.create_task(measure())
    await asyncio.sleep(3 * TURN)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(2 * TURN)
    assert {pid for pid, signum in sent[-4:] if signum == signal.SIGCONT} == {101, 102, 201, 301}
