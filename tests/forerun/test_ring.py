"""The ring: first in, first out, whole messages only, whatever the sizes, the room and the other end's fate."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ring import HEADER_BYTES, Reader, Ring, RingError, Writer


@contextlib.contextmanager
def both_ends(capacity: int = 1024) -> Iterator[tuple[Writer, Reader]]:
    ring = Ring.create(capacity)
    writer, reader = Writer(ring), Reader(ring)
    try:
        yield writer, reader
    finally:
        writer.close()
        reader.close()
        ring.close()


def child(body: str, *rings: Ring) -> subprocess.Popen[bytes]:
    """A second Python process that runs `body` with `rings` bound to the same rings."""
    code = (
        "import os, signal, sys, time, zlib, random\nfrom forerun.ring import Reader, Ring, Writer\n"
        "numbers = list(map(int, sys.argv[1:]))\nrings = [Ring(*numbers[i:i+3]) for i in range(0, len(numbers), 3)]\n" + body
    )
    fds = [fd for ring in rings for fd in ring.fds]
    return subprocess.Popen([sys.executable, "-c", code, *map(str, fds)], pass_fds=fds)


@given(
    capacity=st.sampled_from([64, 72, 256, 1024]),
    actions=st.lists(st.one_of(st.none(), st.integers(0, 3000)), max_size=60),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_any_interleaving_of_pushes_and_drains_is_a_queue(capacity: int, actions: list[int | None], seed: int) -> None:
    """`None` drains; a number pushes a message of that many bytes: empty ones, ones that wrap, ones larger than the whole ring."""
    rng = random.Random(seed)
    sent: collections.deque[bytes] = collections.deque()
    with both_ends(capacity) as (writer, reader):
        for action in actions:
            if action is None:
                writer.flush()
                for message in reader.drain():
                    assert message == sent.popleft()
            else:
                message = rng.randbytes(action)
                sent.append(message)
                writer.push(message)
        rounds = 0
        while sent:
            writer.flush()
            for message in reader.drain():
                assert message == sent.popleft()
            rounds += 1
            assert rounds < 100_000, "the ring is stuck"
        assert reader.drain() == []
        assert writer.flush()


def test_a_full_ring_keeps_the_rest_for_later_and_says_so() -> None:
    with both_ends(64) as (writer, reader):
        assert writer.push(b"a" * 8)
        assert writer.push(b"b" * 8)
        assert writer.push(b"c" * 8)
        assert writer.push(b"d" * 8)
        assert not writer.push(b"e" * 8)
        assert reader.drain() == [b"a" * 8, b"b" * 8, b"c" * 8, b"d" * 8]
        assert reader.drain() == []
        assert writer.flush()
        assert reader.drain() == [b"e" * 8]


def test_sequence_numbers_wrap_around() -> None:
    with both_ends() as (writer, reader):
        writer._sequence = reader._sequence = (1 << 32) - 2
        for index in range(5):
            assert writer.push(bytes([index]))
        assert reader.drain() == [bytes([index]) for index in range(5)]


def test_bytes_that_are_no_frame_are_an_error() -> None:
    ring = Ring.create(1024)
    writer, reader = Writer(ring), Reader(ring)
    writer.push(b"fine")
    os.pwrite(ring.memory, b"\xff" * 8, HEADER_BYTES)
    with pytest.raises(RingError, match="frame 0 was expected"):
        reader.drain()
    ring.close()


@pytest.mark.parametrize("capacity", [0, 32, 100])
def test_a_capacity_that_cannot_work_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        Ring.create(capacity)


def test_descriptors_are_not_inherited_by_accident() -> None:
    ring = Ring.create()
    assert not any(os.get_inheritable(fd) for fd in ring.fds)
    ring.close()


def test_beat_is_seen_by_the_other_end() -> None:
    with both_ends() as (writer, reader):
        assert reader.beat_ns == 0
        before = time.monotonic_ns()
        writer.beat()
        assert before <= reader.beat_ns <= time.monotonic_ns()


ECHO = """
reader, writer = Reader(rings[0]), Writer(rings[1])
while True:
    reader.wait(5)
    for message in reader.drain():
        if message == b"stop": sys.exit(0)
        if not writer.push(message):
            while not writer.flush(): writer.wait(5)
"""


def test_a_second_process_echoes_every_size() -> None:
    down, up = Ring.create(4096), Ring.create(4096)
    process = child(ECHO, down, up)
    writer, reader = Writer(down), Reader(up)
    rng = random.Random(1)
    messages = [rng.randbytes(rng.choice([0, 1, 7, 8, 9, 100, 1000, 4096, 6000])) for _ in range(300)]
    received: list[bytes] = []
    for message in messages:
        writer.push(message)
        received += reader.drain()
    deadline = time.monotonic() + 20
    while len(received) < len(messages) and time.monotonic() < deadline:
        if not writer.flush():
            writer.wait(0.001)
        reader.wait(0.001)
        received += reader.drain()
    assert received == messages
    writer.push(b"stop")
    assert process.wait(10) == 0


FLOOD = """
writer, rng = Writer(rings[0]), random.Random(os.getpid())
writer.push(b"\\0\\0\\0\\0")
while True:
    body = rng.randbytes(rng.randrange(20_000))
    if not writer.push(zlib.crc32(body).to_bytes(4, "little") + body):
        while not writer.flush(): writer.wait(1)
"""


@pytest.mark.parametrize("round_", range(5))
def test_a_writer_killed_at_any_moment_leaves_only_whole_messages(round_: int) -> None:
    ring = Ring.create(32_768)
    reader = Reader(ring)
    process = child(FLOOD, ring)
    count = 0

    def read() -> None:
        nonlocal count
        for message in reader.drain():
            assert zlib.crc32(message[4:]) == int.from_bytes(message[:4], "little")
            count += 1

    while count < 20:
        reader.wait(5)
        read()
    kill_at = time.monotonic() + random.Random(round_).uniform(0, 0.02)
    while time.monotonic() < kill_at:
        read()
    process.send_signal(signal.SIGKILL)
    process.wait()
    read()
    assert reader.drain() == []


def test_a_frame_that_was_written_but_not_published_is_never_read() -> None:
    ring = Ring.create(1024)
    reader = Reader(ring)
    process = child(
        "writer = Writer(rings[0])\nwriter.push(b'whole')\n"
        "os.eventfd_write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nwriter.push(b'torn' * 20)\n",
        ring,
    )
    assert process.wait(10) == -signal.SIGKILL
    assert os.pread(ring.memory, 100, HEADER_BYTES).count(b"torn") > 3, "the bytes are in the ring"
    assert reader.drain() == [b"whole"]
    assert reader.drain() == []


def test_a_reader_on_an_event_loop_is_woken_by_another_process() -> None:
    """Also the place where the round trip is measured: `pytest -s` prints it."""
    down, up = Ring.create(), Ring.create()
    process = child(ECHO, down, up)
    writer, reader = Writer(down), Reader(up)
    rounds = 500

    async def ping() -> list[float]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        times: list[float] = []
        sent = 0.0

        def on_readable() -> None:
            nonlocal sent
            for _ in reader.drain():
                times.append(time.perf_counter() - sent)
                if len(times) == rounds:
                    done.set_result(None)
                    return
                sent = time.perf_counter()
                writer.push(b"x" * 104)

        loop.add_reader(reader.fd, on_readable)
        writer.push(b"x" * 104)
        await asyncio.wait_for(done, 20)
        loop.remove_reader(reader.fd)
        return sorted(times)

    times = uvloop.run(ping())
    print(f"ring round trip: median {times[rounds // 2] * 1e6:.1f} µs, p99 {times[rounds * 99 // 100] * 1e6:.1f} µs")
    writer.push(b"stop")
    assert process.wait(10) == 0
