"""The front's end of a worker, against real processes: what arrives, and every way a worker can end."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.engine.echo import answer
from forerun.messages import Admit, Feed, Inject, Progress, Ready, SamplingParams, Start, StepPlan, StepResult
from forerun.router.link import Death, Link

ECHO = Start("none", echo=True, test_faults=True)


class Ear:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.progressed: list[Progress] = []
        self.readies: list[Ready] = []
        self.results: list[StepResult] = []
        self.lines: list[str] = []
        self.deaths: list[Death] = []

    def progress(self, message: Progress) -> None:
        self.progressed.append(message)

    def ready(self, message: Ready) -> None:
        self.readies.append(message)

    def result(self, message: StepResult) -> None:
        self.results.append(message)

    def said(self, line: str) -> None:
        self.lines.append(line)

    def died(self, death: Death) -> None:
        self.deaths.append(death)


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.005)


def script(body: str) -> tuple[str, ...]:
    """A misbehaving worker: `writer`, `reader` and `messages` are at hand."""
    code = (
        "import os, signal, sys, time, msgspec\nfrom forerun import messages\nfrom forerun.ring import Reader, Ring, Writer\n"
        "fds = list(map(int, sys.argv[2:]))\nreader, writer = Reader(Ring(*fds[:3])), Writer(Ring(*fds[3:]))\n"
        "def say(message):\n    writer.push(msgspec.msgpack.encode(message))\n"
    )
    return (sys.executable, "-c", code + body)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_a_listener_that_is_slow_hears_in_one_turn_what_came_meanwhile() -> None:
    turns: list[int] = []

    class Slow(Ear):
        def result(self, message: StepResult) -> None:
            super().result(message)
            time.sleep(0.05)
            if message.step == 1:
                asyncio.get_running_loop().call_soon(lambda: turns.append(len(self.results)))

    ear = Slow()
    link = Link(ECHO, ear, 30)
    await until(lambda: ear.readies)
    link.send(StepPlan(1))
    link.send(Inject("slow", 0.01))
    for step in range(2, 6):
        link.send(StepPlan(step))
    await until(lambda: len(ear.results) == 5)
    assert turns[0] > 1
    assert [result.step for result in ear.results] == [1, 2, 3, 4, 5]
    await link.close()


async def test_a_worker_gets_ready_answers_and_stops() -> None:
    ear = Ear()
    link = Link(ECHO, ear, 30)
    await until(lambda: ear.readies)
    prompt = [1, 2, 3]
    params = SamplingParams(1, 3, 3)
    link.send(StepPlan(1, [Admit(0, prompt, 0, [0], params)], [Feed(0, 3)]))
    link.send(StepPlan(2, [], [Feed(0, 1)]))
    link.send(StepPlan(3, [], [Feed(0, 1)]))
    await until(lambda: len(ear.results) == 3)
    assert [result.step for result in ear.results] == [1, 2, 3]
    assert [token for result in ear.results for token in result.emit[0].tokens] == answer(prompt, params, 32000)
    assert link.beat_age() < 5
    pid = link.pid
    await link.close()
    assert is_gone(pid) and not ear.deaths


async def test_messages_larger_than_the_ring_pass_both_ways() -> None:
    ear = Ear()
    link = Link(Start("none", echo=True, max_pool_tokens=1 << 20), ear, 30)
    await until(lambda: ear.readies)
    prompt = list(range(20_000, 20_000 + 700_000))
    pages = list(range(700_000 // 16))
    link.send(StepPlan(1, [Admit(0, prompt, 0, pages, SamplingParams(1, len(prompt), 1, prompt_logprobs=True))], [Feed(0, len(prompt))]))
    await until(lambda: ear.results, 30)
    assert len(ear.results[0].emit[0].prompt_logprobs) == len(prompt) - 1
    await link.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
async def test_death_by_a_signal_is_named(number: signal.Signals) -> None:
    ear = Ear()
    link = Link(ECHO, ear, 30)
    await until(lambda: ear.readies)
    before = time.monotonic()
    os.kill(link.pid, number)
    await until(lambda: ear.deaths)
    assert time.monotonic() - before < 5
    assert f"ended by {number.name}" in ear.deaths[0].reason and not ear.deaths[0].fatal
    assert ("out-of-memory" in ear.deaths[0].cure) == (number == signal.SIGKILL)
    link.send(StepPlan(1))
    assert link.beat_age() >= 0
    link.kill("already gone")


async def test_interrupts_and_termination_signals_do_not_end_a_worker() -> None:
    ear = Ear()
    link = Link(ECHO, ear, 30)
    await until(lambda: ear.readies)
    os.kill(link.pid, signal.SIGINT)
    os.kill(link.pid, signal.SIGTERM)
    link.send(StepPlan(1))
    await until(lambda: ear.results)
    await link.close()
    assert not ear.deaths


async def test_an_exception_in_a_step_is_a_fault_with_its_text() -> None:
    ear = Ear()
    link = Link(ECHO, ear, 30)
    link.send(Inject("raise"))
    link.send(StepPlan(1))
    await until(lambda: ear.deaths)
    assert ear.deaths == [Death("RuntimeError: a fault was injected into this step")]
    assert any("Traceback" in line for line in ear.lines)


async def test_a_plan_the_worker_cannot_follow_is_a_fault() -> None:
    ear = Ear()
    link = Link(ECHO, ear, 30)
    link.send(StepPlan(1, [Admit(10_000, [1], 0, [0], SamplingParams(1, 1, 1))]))
    await until(lambda: ear.deaths)
    assert "row 10000 does not exist" in ear.deaths[0].reason


async def test_faults_are_refused_unless_asked_for_at_the_start() -> None:
    ear = Ear()
    link = Link(Start("none", echo=True), ear, 30)
    link.send(Inject("die"))
    link.send(StepPlan(1))
    await until(lambda: ear.results)
    assert any("refused to inject die" in line for line in ear.lines)
    await link.close()
    assert not ear.deaths


@pytest.mark.parametrize("how", ["stopped by a signal", "hanging in its loop"])
async def test_a_silent_worker_is_killed(how: str) -> None:
    ear = Ear()
    link = Link(ECHO, ear, 1.5)
    await until(lambda: ear.readies)
    pid = link.pid
    if how == "stopped by a signal":
        os.kill(pid, signal.SIGSTOP)
    else:
        link.send(Inject("hang"))
    await until(lambda: link.beat_age() > 1)
    await until(lambda: ear.deaths, 5)
    assert "no sign of life for" in ear.deaths[0].reason and is_gone(pid)


async def test_an_idle_worker_is_not_silent() -> None:
    ear = Ear()
    link = Link(ECHO, ear, 1.0)
    await until(lambda: ear.readies)
    await asyncio.sleep(2.2)
    assert not ear.deaths and link.beat_age() < 1
    await link.close()


async def test_a_slow_step_is_not_a_hang_when_steps_are_known_to_be_slow() -> None:
    ear = Ear()
    ready = "say(messages.Ready(1, 1, 16, 0, 10, 'd', 'd', 'n', 9, 9, step_seconds=(0.01, 0.1)))\n"
    link = Link(ECHO, ear, 0.6, command=script(ready + "writer.beat()\ntime.sleep(1.5)\nsay(messages.StepResult(1))\ntime.sleep(60)"))
    link.send(StepPlan(1))
    link.send(StepPlan(2))
    await until(lambda: ear.results)
    assert not ear.deaths
    await until(lambda: ear.deaths)
    assert "no sign of life for 2" in ear.deaths[0].reason


async def test_a_worker_that_owes_no_step_may_not_be_silent_for_as_long_as_one_takes() -> None:
    ear = Ear()
    ready = "say(messages.Ready(1, 1, 16, 0, 10, 'd', 'd', 'n', 9, 9, step_seconds=(1.0, 10.0)))\n"
    link = Link(ECHO, ear, 0.6, command=script(ready + "say(messages.StepResult(1))\ntime.sleep(60)"))
    link.send(StepPlan(1))
    await until(lambda: ear.results)
    await until(lambda: ear.deaths, 5)
    assert "no sign of life for" in ear.deaths[0].reason


@pytest.mark.parametrize("room", range(14))
async def test_a_machine_without_room_for_a_worker_says_so_and_nothing_stays_open(room: int) -> None:
    """So many more descriptors and no more: two rings take six, the output two, the process one and, for a moment, some of its own."""
    before = sorted(os.listdir("/proc/self/fd"))
    free = next(fd for fd in range(1 << 20) if str(fd) not in before)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + room, hard))
    try:
        link = Link(ECHO, Ear(), 30)
    except OSError as error:
        assert error.errno == errno.EMFILE
        link = None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if link is not None:
        await link.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_time_in_which_the_front_itself_stood_still_is_not_silence() -> None:
    ear = Ear()
    link = Link(ECHO, ear, 2.0)
    await until(lambda: ear.readies)
    os.kill(link.pid, signal.SIGSTOP)
    time.sleep(3)  # noqa: ASYNC251 (the whole machine paused, as it were)
    os.kill(link.pid, signal.SIGCONT)
    await asyncio.sleep(0.7)
    assert not ear.deaths
    await link.close()


async def test_results_published_before_death_are_heard_first() -> None:
    ear = Ear()
    Link(ECHO, ear, 30, command=script("say(messages.StepResult(7))\nos.kill(os.getpid(), signal.SIGKILL)"))
    await until(lambda: ear.deaths)
    assert [result.step for result in ear.results] == [7]


async def test_last_words_are_in_the_reason() -> None:
    ear = Ear()
    Link(ECHO, ear, 30, command=script("print('one', flush=True)\nsys.stderr.write('two\\nno end')\nsys.exit(3)"))
    await until(lambda: ear.deaths)
    assert "exit code 3" in ear.deaths[0].reason
    assert ear.lines == ["one", "two", "no end"]
    assert ear.deaths[0].reason.endswith("exit code 3 | one | two | no end")


async def test_a_fault_carries_its_cure() -> None:
    ear = Ear()
    Link(ECHO, ear, 30, command=script("say(messages.Fault('no such model', 'give --model-id a folder', True))\nsys.exit(1)"))
    await until(lambda: ear.deaths)
    assert ear.deaths == [Death("no such model", "give --model-id a folder", True)]


async def test_garbage_on_the_ring_ends_the_worker() -> None:
    ear = Ear()
    Link(ECHO, ear, 30, command=script("writer.push(b'\\xc1')\ntime.sleep(60)"))
    await until(lambda: ear.deaths)
    assert "not a message" in ear.deaths[0].reason


async def test_close_kills_a_worker_that_does_not_stop() -> None:
    ear = Ear()
    link = Link(ECHO, ear, 30)
    await until(lambda: ear.readies)
    link.send(Inject("hang"))
    pid = link.pid
    await link.close(0.2)
    assert is_gone(pid) and not ear.deaths


async def test_many_workers_leave_no_descriptor_and_no_zombie() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    ear = Ear()
    await Link(ECHO, ear, 30, command=script("sys.exit(0)")).close()
    before = descriptors()
    for _ in range(10):
        links = [Link(ECHO, ear, 30, command=(sys.executable, "-c", "pass")) for _ in range(5)]
        await asyncio.gather(*(link.close() for link in links))
    assert descriptors() == before


async def test_closing_while_loading_does_not_wait() -> None:
    ear = Ear()
    link = Link(ECHO, ear, 30, command=script("time.sleep(60)"))
    before = time.monotonic()
    await link.close()
    assert time.monotonic() - before < 10 and not ear.deaths
