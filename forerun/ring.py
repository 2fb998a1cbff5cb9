"""One direction of a link between two processes: a ring of bytes in anonymous shared memory.

Owns the layout of the memory and the two kernel counters that order it. Knows nothing of messages' meaning, of asyncio or of who is
at the other end.

    memory   ┌──────────────┬──────────────────────────────────────────────────────────┐
             │ header 64 B  │ frame │ frame │ … │  free  │ … │ a frame may wrap ─┐     │
             │ beat (u64)   │ ◀─────────────────────────────────────────────────┘     │
             └──────────────┴──────────────────────────────────────────────────────────┘
    frame    u32 length (top bit: more frames of this message follow) │ u32 sequence │ bytes │ padding to 8
    filled   eventfd: how many frames were published and not yet fetched   (writer adds, reader takes)
    freed    eventfd: how many bytes were consumed and not yet reclaimed   (reader adds, writer takes)

There are no shared positions. Each end keeps its own, and the two counters carry everything that must be agreed: a frame exists for
the reader only after the kernel has counted it, so a writer killed in the middle of a frame leaves nothing that could be read, and
the order of memory comes from the kernel on every architecture. One writer and one reader a ring. A message of any size passes: it is
cut into frames of at most a quarter of the ring. A full ring is waited for; nothing is ever dropped.

Nothing has a name in a file system: after a crash nothing is left behind, and /dev/shm needs no size.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import mmap
import os
import select
import struct
import time

HEADER_BYTES = 64
DEFAULT_CAPACITY = 1 << 20
_FRAME = struct.Struct("<II")
_MORE = 1 << 31
_SEQUENCE_MASK = (1 << 32) - 1


class RingError(Exception):
    """The other end wrote something that is not a frame: the two processes do not run the same code."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """The three file descriptors of a ring; whoever holds them can map it. Passed to a child with `pass_fds`."""

    memory: int
    filled: int
    freed: int

    @staticmethod
    def create(capacity: int = DEFAULT_CAPACITY) -> Ring:
        """A new, empty ring of `capacity` data bytes (a multiple of 8, at least 64). Descriptors are closed on exec unless passed."""
        if capacity < 64 or capacity % 8:
            raise ValueError(f"a ring of {capacity} bytes: the capacity must be a multiple of 8 and at least 64")
        with contextlib.ExitStack() as undo:
            memory = os.memfd_create("forerun-ring", os.MFD_CLOEXEC)
            undo.callback(os.close, memory)
            os.ftruncate(memory, HEADER_BYTES + capacity)
            filled = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, filled)
            freed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.pop_all()
        return Ring(memory, filled, freed)

    @property
    def fds(self) -> tuple[int, int, int]:
        return self.memory, self.filled, self.freed

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def _span(length: int) -> int:
    """Bytes that a frame of `length` takes in the ring. A multiple of 8, so that a frame's header never wraps."""
    return (_FRAME.size + length + 7) & ~7


class Writer:
    """The writing end. Messages that do not fit yet wait here, in order, until `flush` finds room."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._map = mmap.mmap(ring.memory, 0)
        self._view = memoryview(self._map)
        self._words = self._view[:HEADER_BYTES].cast("Q")
        self._data = self._view[HEADER_BYTES:]
        self._capacity = len(self._data)
        self._most = self._capacity // 4 - _FRAME.size
        self._credit = self._capacity
        self._at = 0
        self._sequence = 0
        self._backlog: collections.deque[tuple[memoryview, int]] = collections.deque()
        self._poll = select.poll()
        self._poll.register(ring.freed, select.POLLIN)

    @property
    def space_fd(self) -> int:
        """Readable when the reader has freed space since the last `flush`."""
        return self._ring.freed

    def beat(self) -> None:
        """A sign of life that the other end sees in `Reader.beat_ns` (one aligned store; no wake-up)."""
        self._words[0] = time.monotonic_ns()

    def push(self, message: bytes) -> bool:
        """Queue a message and write what fits. True: all of it is published. False: call `flush` when `space_fd` is readable."""
        view = memoryview(message)
        while len(view) > self._most:
            self._backlog.append((view[: self._most], _MORE))
            view = view[self._most :]
        self._backlog.append((view, 0))
        return self.flush()

    def flush(self) -> bool:
        """Write as much of the backlog as fits. True when nothing is left."""
        written = 0
        while self._backlog:
            piece, more = self._backlog[0]
            span = _span(len(piece))
            if span > self._credit and not self._reclaim(span):
                break
            self._write(piece, more, span)
            self._backlog.popleft()
            written += 1
        if written:
            os.eventfd_write(self._ring.filled, written)
        return not self._backlog

    def wait(self, seconds: float) -> None:
        """Sleep until the reader has freed space, at most so long."""
        self._poll.poll(seconds * 1000)

    def close(self) -> None:
        """Unmap; the descriptors stay the caller's."""
        for view in (self._words, self._data, self._view):
            view.release()
        self._map.close()

    def _reclaim(self, span: int) -> bool:
        try:
            self._credit += os.eventfd_read(self._ring.freed)
        except BlockingIOError:
            return False
        return span <= self._credit

    def _write(self, piece: memoryview, more: int, span: int) -> None:
        length = len(piece)
        _FRAME.pack_into(self._data, self._at, length | more, self._sequence)
        start = self._at + _FRAME.size
        first = min(length, self._capacity - start)
        self._data[start : start + first] = piece[:first]
        if first < length:
            self._data[: length - first] = piece[first:]
        self._at = (self._at + span) % self._capacity
        self._credit -= span
        self._sequence = (self._sequence + 1) & _SEQUENCE_MASK


class Reader:
    """The reading end."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._map = mmap.mmap(ring.memory, 0)
        self._view = memoryview(self._map)
        self._words = self._view[:HEADER_BYTES].cast("Q")
        self._data = self._view[HEADER_BYTES:]
        self._capacity = len(self._data)
        self._at = 0
        self._sequence = 0
        self._parts: list[bytes] = []
        self._poll = select.poll()
        self._poll.register(ring.filled, select.POLLIN)

    @property
    def fd(self) -> int:
        """Readable when frames are waiting."""
        return self._ring.filled

    @property
    def beat_ns(self) -> int:
        """The writer's last sign of life on the monotonic clock, in nanoseconds; 0 = none yet."""
        return self._words[0]

    def drain(self) -> list[bytes]:
        """All messages that are complete, oldest first; possibly none. Never waits.

        Raises RingError when the bytes are no frames."""
        try:
            frames = os.eventfd_read(self._ring.filled)
        except BlockingIOError:
            return []
        messages: list[bytes] = []
        consumed = 0
        for _ in range(frames):
            length, sequence = _FRAME.unpack_from(self._data, self._at)
            more, length = length & _MORE, length & ~_MORE
            if sequence != self._sequence or _span(length) > self._capacity:
                raise RingError(f"frame {self._sequence} was expected, found number {sequence} of {length} bytes")
            self._parts.append(self._read(length))
            if not more:
                messages.append(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
                self._parts = []
            self._at = (self._at + _span(length)) % self._capacity
            self._sequence = (self._sequence + 1) & _SEQUENCE_MASK
            consumed += _span(length)
        os.eventfd_write(self._ring.freed, consumed)
        return messages

    def wait(self, seconds: float) -> bool:
        """Sleep until a frame is there, at most so long. Returns whether there is one."""
        return bool(self._poll.poll(seconds * 1000))

    def close(self) -> None:
        """Unmap; the descriptors stay the caller's."""
        for view in (self._words, self._data, self._view):
            view.release()
        self._map.close()

    def _read(self, length: int) -> bytes:
        start = self._at + _FRAME.size
        first = min(length, self._capacity - start)
        if first == length:
            return bytes(self._data[start : start + length])
        return bytes(self._data[start : start + first]) + bytes(self._data[: length - first])
