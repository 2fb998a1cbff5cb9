"""The router with a real worker: answers, refusals, deaths, silence, and the end."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from forerun.config import Config, Limits
from forerun.messages import Inject, Start
from forerun.router.guesses import Round
from forerun.router.link import Link
from forerun.router.replica import MOST_DEATHS, Replica
from forerun.router.request import Failure, Run
from forerun.router.service import Phase, Refused, Router
from tests.router.controller.streams import sequence
from tests.router.fakes import Collector, Counting, children, configuration, expected, request, running, worker_pid
from tests.router.worker_model import ready


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.005)


async def test_many_sequences_are_answered_exactly() -> None:
    async with running() as (router, observer):
        work = [(request([n, *range(n % 40)], 1 + n % 30), Collector()) for n in range(1, 120)]
        for what, stream in work:
            router.submit(what, stream)
        for what, stream in work:
            await stream.wait()
            assert stream.got == expected(what) and stream.reason == "length"
        assert sum(report.tokens for report in observer.steps) == sum(len(stream.got) for _, stream in work)
        assert observer.counts["admitted"] >= len(work)
        assert all(0 < report.seconds < 5 for report in observer.steps)
        load = router.load()
        assert (load.waiting, load.running, load.used_pages) == (0, 0, 0)


async def test_a_worker_that_cannot_be_started_for_lack_of_room_is_started_later() -> None:
    """Running out of descriptors, however often, is no death of a worker: streams wait, then go on."""
    refused: list[int] = []

    class Cramped(Router):
        def _spawn(self, start: Start, replica: Replica) -> Link:
            if replica.offer is not None and len(refused) < MOST_DEATHS:
                refused.append(len(refused))
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super()._spawn(start, replica)

    router = Cramped(configuration(), Start("none", echo=True, test_faults=True), Counting())
    router.open()
    await asyncio.wait_for(router.became_ready.wait(), 10)
    what, stream = request([5, 6], 3000), Collector()
    router.submit(what, stream)
    await until(lambda: stream.got)
    os.kill(worker_pid(router), signal.SIGKILL)
    await stream.wait(30)
    assert stream.got == expected(what) and len(refused) == MOST_DEATHS
    await router.close()


async def test_phases_limits_and_progress() -> None:
    router = Router(configuration(), Start("none", echo=True), Counting())
    router.open()
    assert router.phase is Phase.LOADING and router.limits is None and router.ready is None
    with pytest.raises(Refused, match="loading"):
        router.enter()
    with pytest.raises(Refused, match="loading"):
        router.submit(request([1]), Collector())
    await asyncio.wait_for(router.became_ready.wait(), 10)
    assert router.phase is Phase.READY
    assert router.limits is not None and router.limits.max_input_tokens == router.limits.max_total_tokens - 1
    assert router.ready is not None and router.ready.device == "echo"
    assert router.beat_age() < 5
    draining = asyncio.create_task(router.drain(5))
    await asyncio.sleep(0)
    assert router.phase is Phase.DRAINING
    with pytest.raises(Refused, match="shutting down"):
        router.enter()
    await draining
    await router.close()
    assert not children()


async def test_permits_are_refused_with_a_time_to_come_back() -> None:
    async with running(configuration(concurrent=2)) as (router, _):
        first, second = router.enter(), router.enter()
        with pytest.raises(Refused, match="overloaded") as refusal:
            router.enter()
        assert refusal.value.retry_after_seconds >= 1
        first.leave()
        first.leave()
        router.enter().leave()
        second.leave()


async def test_a_text_rule_ends_a_sequence_and_frees_its_place() -> None:
    async with running() as (router, _):
        what, stream = request([5, 6], 10_000), Collector(stop_at=7)
        router.submit(what, stream)
        await stream.wait()
        assert stream.got == expected(what)[:7]
        await until(lambda: router.load().running == 0, 1)


async def test_a_cancelled_sequence_hears_nothing_more() -> None:
    async with running() as (router, _):
        bystander, other = request([9], 400), Collector()
        router.submit(bystander, other)
        stream = Collector()
        sequence = router.submit(request([5, 6], 100_000), stream)
        await until(lambda: len(stream.got) > 3)
        router.cancel(sequence)
        count = len(stream.got)
        await until(lambda: router.load().running <= 1, 1)
        await other.wait()
        assert len(stream.got) == count and not stream.over.is_set()
        assert other.got == expected(bystander)
        router.cancel(sequence)


async def test_a_stream_that_raises_ends_alone() -> None:
    class Broken(Collector):
        def tokens(self, run: Run) -> bool:
            raise ZeroDivisionError

    async with running() as (router, _):
        broken = Broken()
        router.submit(request([5], 1000), broken)
        what, stream = request([6], 100), Collector()
        router.submit(what, stream)
        await stream.wait()
        assert stream.got == expected(what)
        assert broken.failure is not None and broken.failure.status == 500
        assert router.load().running == 0


async def test_a_stream_that_breaks_on_its_failure_keeps_no_other_from_hearing() -> None:
    class Broken(Collector):
        def fail(self, failure: Failure) -> None:
            raise ZeroDivisionError

    async with running() as (router, _):
        router.inject(Inject("slow", 0.01))
        streams = [Broken(), Collector(), Broken(), Collector()]
        for n, stream in enumerate(streams):
            router.submit(request([5 + n], 1000), stream)
        await until(lambda: all(stream.got for stream in streams))
        await router.drain(0)
        assert all(stream.failure is not None for stream in streams[1::2])


@pytest.mark.parametrize("how", ["killed", "raises", "hangs"])
async def test_a_dead_worker_is_replaced_and_every_stream_goes_on_token_exact(how: str) -> None:
    config = configuration(batch=3, timeout=1.0)
    async with running(config) as (router, observer):
        router.inject(Inject("slow", 0.005))
        work = [(request([n, 7, 8, 9] * 10, 60), Collector()) for n in range(1, 6)]
        for what, stream in work:
            router.submit(what, stream)
        await until(lambda: sum(len(stream.got) for _, stream in work) > 40)
        load = router.load()
        assert (load.running, load.waiting) == (3, 2)
        pid = worker_pid(router)
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
        elif how == "raises":
            router.inject(Inject("raise"))
        else:
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: observer.deaths, 8)
        assert router.phase is Phase.LOADING
        for what, stream in work:
            await stream.wait()
            assert stream.got == expected(what) and stream.reason == "length"
        assert worker_pid(router) != pid and len(children()) == 1
        assert router.phase is Phase.READY


async def test_deaths_at_every_moment_leave_every_stream_exact() -> None:
    """The worker dies with plans in flight, before and behind the first token, with chunks on the way; never three times a minute."""
    for moment in range(8):
        async with running(configuration(pool=4096)) as (router, _):
            work = [(request([n, *range(100 * n)], 30), Collector()) for n in range(1, 9)]
            for what, stream in work:
                router.submit(what, stream)
            await asyncio.sleep(moment * 0.002)
            os.kill(worker_pid(router), signal.SIGKILL)
            for what, stream in work:
                await stream.wait()
                assert stream.got == expected(what)


async def test_three_deaths_within_a_minute_are_the_end() -> None:
    async with running() as (router, observer):
        router.inject(Inject("slow", 0.002))
        streams = [Collector() for _ in range(4)]
        for n, stream in enumerate(streams):
            router.submit(request([n + 1], 10_000), stream)
        for death in range(1, 4):
            heard = [len(stream.got) for stream in streams]
            await until(lambda heard=heard: all(len(stream.got) > count for stream, count in zip(streams, heard)))  # type: ignore[misc]
            os.kill(worker_pid(router), signal.SIGKILL)
            await until(lambda death=death: len(observer.deaths) == death)  # type: ignore[misc]
        await asyncio.wait_for(router.failed.wait(), 5)
        for stream in streams:
            assert stream.failure is not None and stream.failure.kind == "generation" and "SIGKILL" in stream.failure.message
        assert router.phase is Phase.FAILED and router.failure is not None and "3 workers died" in router.failure.message
        with pytest.raises(Refused):
            router.enter()
        with pytest.raises(Refused):
            router.submit(request([1]), Collector())
        assert not children()


async def test_a_row_that_fails_fails_alone() -> None:
    async with running() as (router, _):
        router.inject(Inject("fail", 5))
        work = [(request([n], 50), Collector()) for n in range(1, 5)]
        for what, stream in work:
            router.submit(what, stream)
        for _, stream in work:
            await stream.wait()
        failed = [stream for _, stream in work if stream.failure]
        assert len(failed) == 1 and "injected" in failed[0].failure.message  # type: ignore[union-attr]
        assert all(stream.got == expected(what) for what, stream in work if not stream.failure)


async def test_limits_that_cannot_be_kept_end_the_start_with_a_reason() -> None:
    config = Config(limits=Limits(max_total_tokens=100_000))
    router = Router(config, Start("none", echo=True, max_pool_tokens=1024), Counting())
    router.open()
    await asyncio.wait_for(router.failed.wait(), 10)
    assert router.death is not None and "Argument validation error: `max_total_tokens` must be <=" in router.death.reason
    await router.close()


async def test_draining_finishes_running_and_queued_and_survives_a_death() -> None:
    async with running(configuration(batch=2)) as (router, _):
        router.inject(Inject("slow", 0.003))
        work = [(request([n, 3], 60), Collector()) for n in range(1, 5)]
        for what, stream in work:
            router.submit(what, stream)
        draining = asyncio.create_task(router.drain(30))
        await until(lambda: len(work[0][1].got) > 5)
        os.kill(worker_pid(router), signal.SIGKILL)
        await draining
        for what, stream in work:
            assert stream.got == expected(what)


async def test_draining_waits_for_permits_and_ends_the_rest_when_time_is_up() -> None:
    async with running() as (router, _):
        permit = router.enter()
        before = time.monotonic()
        asyncio.get_running_loop().call_later(0.3, permit.leave)
        await router.drain(10)
        assert 0.2 < time.monotonic() - before < 8
        router.inject(Inject("slow", 0.01))
        stream = Collector()
        router.submit(request([1], 100_000), stream)
        await until(lambda: stream.got)
        await router.drain(0.2)
        assert stream.failure is not None and "shutting down" in stream.failure.message


async def test_deadlines_pass_also_while_there_is_no_worker() -> None:
    async with running() as (router, _):
        os.kill(worker_pid(router), signal.SIGSTOP)
        stream = Collector()
        router.submit(request([1], 100, deadline=time.monotonic() + 0.3), stream)
        await stream.wait(2)
        assert stream.failure is not None and stream.failure.status == 504
        os.kill(worker_pid(router), signal.SIGCONT)


async def test_faults_cannot_be_injected_into_an_ordinary_server() -> None:
    async with running(start=Start("none", echo=True)) as (router, _):
        with pytest.raises(PermissionError, match="--test-faults"):
            router.inject(Inject("die"))


def test_each_change_of_a_guard_is_a_line_in_the_log() -> None:
    """Guesses lose until they are switched off, and pay when they are tried again."""
    offer = ready(max_nodes=8, costs=[(1, 0.006), (8, 0.0066), (16, 0.012), (32, 0.02)])
    controller, streams, loses = Router(configuration(), Start("none", echo=True), Counting()).controller(offer), [sequence()] * 3, True
    with capture_logs() as logged:
        for _ in range(2000):
            allowance = controller(streams)
            nodes = sum(allowance.guess) if allowance else 0
            controller.landed(streams[0], nodes, nodes, 0.9 * nodes)
            controller.stepped(
                Round(3, 3 + nodes, nodes, 3 if nodes else 0, 150, 3 if loses else 3 + nodes, 0.012 if nodes and loses else 0.0062, 1e-4)
            )
            loses = loses and not logged
            if len(logged) == 2:
                break
    assert [(line["event"], line["sequences"]) for line in logged] == [
        ("Guessing lost time and is switched off", "3 and more"),
        ("Guessing pays again", "3 and more"),
    ]
