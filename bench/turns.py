"""Servers that share a machine take turns of a second or less: one runs, the processes of the others are stopped.

The speed of a virtual machine moves by half within ten seconds, so loads that are measured one after the other tell the weather: the same
steps of one server took 31 and then 52 ms. In turns this short all of them get the same weather. Each has a clock that runs while it does.

A step that is stopped in the middle would look as long to its server as the others' turns, and this project's learns from what its steps
take. So a turn may end with the first process of a server, its front: the others finish what they were given, and are stopped once they
have nothing to do. That is for steps on CPUs: whoever sleeps until another device is done looks idle. And it is for servers that are given
each step by their front. A worker that goes on by itself is never idle: it would run on while its answers wait for the next turn, on its
own clock. Such servers are stopped whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from forerun.bench import process

SECONDS = 0.25
FINISH_SECONDS, LOOK_SECONDS = 0.5, 0.001
"""that the others have to finish, and between two looks whether they did: two in a row are believed"""
T = TypeVar("T")
Clock = Callable[[], float]
Idle = Callable[[int], bool]


async def in_turns(
    families: Sequence[Sequence[int]],
    jobs: Sequence[Callable[[Clock], Awaitable[T]]],
    seconds: float = SECONDS,
    idle: Idle | None = process.idle,
) -> list[T]:
    """What the jobs return, one for each family of process ids; each goes by the clock of its own, whose turns end with it. `seconds`: of a
    turn. `idle`: as `Turns` has it."""

    async def done(place: int, turns: Turns) -> T:
        result = await jobs[place](turns.clock(place))
        turns.leave(place)
        return result

    async with Turns(families, seconds, idle) as turns, asyncio.TaskGroup() as group:
        tasks = [group.create_task(done(place, turns)) for place in range(len(families))]
    return [task.result() for task in tasks]


@contextlib.contextmanager
def standing(families: Iterable[Sequence[int]]) -> Iterator[None]:
    """These processes stand still inside."""
    stopped = [pid for family in families for pid in family]
    _signal(stopped, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(stopped, signal.SIGCONT)


def _signal(pids: Iterable[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it died: its server's requests tell, and the others go on
            os.kill(pid, signum)


class Turns:
    """`async with Turns(families) as turns`, each family the process ids of a server, its front's first. They run again afterwards, all of
    them. `idle`: whether a process has nothing to do, which is waited for at the end of a turn. None: nothing is waited for, a server is
    stopped whole."""

    def __init__(self, families: Sequence[Sequence[int]], seconds: float = SECONDS, idle: Idle | None = process.idle) -> None:
        self._families = families
        self._seconds = seconds
        self._idle = idle
        self._spent = [0.0 for _ in families]
        self._left = [asyncio.Event() for _ in families]
        self._running: tuple[int, float] | None = None
        """whose turn it is, and since when"""
        self._rotation: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Turns:
        for place in range(len(self._families)):
            _signal(self._families[place], signal.SIGSTOP)
        self._rotation = asyncio.create_task(self._rotate())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._rotation is not None
        self._rotation.cancel()
        # Before anything is awaited: whoever is impatient and interrupts twice must leave nobody stopped.
        for place in range(len(self._families)):
            _signal(self._families[place], signal.SIGCONT)
        await asyncio.gather(self._rotation, return_exceptions=True)

    def clock(self, place: int) -> Clock:
        """Seconds for which this family had its turn so far."""

        def spent() -> float:
            running = self._running
            return self._spent[place] + (time.perf_counter() - running[1] if running and running[0] == place else 0.0)

        return spent

    def leave(self, place: int) -> None:
        """This family has done what it had to; it gets no more turns."""
        self._left[place].set()

    async def _rotate(self) -> None:
        for place in itertools.cycle(range(len(self._families))):
            if all(left.is_set() for left in self._left):
                return
            if not self._left[place].is_set():
                await self._turn(place)

    async def _turn(self, place: int) -> None:
        self._running = place, time.perf_counter()
        _signal(self._families[place], signal.SIGCONT)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await self._left[place].wait()
            if self._idle is not None:
                await self._finish(self._idle, *self._families[place])
        finally:
            self._spent[place], self._running = self.clock(place)(), None
        _signal(self._families[place], signal.SIGSTOP)  # not where the turns were ended meanwhile: all run then

    async def _finish(self, done: Idle, front: int, *others: int) -> None:
        """Nobody is given anything new; what was given before is done first."""
        _signal([front], signal.SIGSTOP)
        until, idle = time.perf_counter() + FINISH_SECONDS, 0
        while others and idle < 2 and time.perf_counter() < until:
            await asyncio.sleep(LOOK_SECONDS)
            idle = idle + 1 if all(map(done, others)) else 0
