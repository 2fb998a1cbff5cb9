"""The front's end of one worker: its process, its two rings, and how it ends.

Owns the process from the moment it is started until it is reaped. Knows messages, not what they mean: what arrives goes to the
`Listener`, at once and in order, on the event loop.

A worker ends in one of four ways, and each becomes a `Death` with a reason that an operator can use:
it says `Fault`; it exits or is killed (the process descriptor becomes readable); it goes silent (its heartbeat stands still for longer
than the patience, then it is killed); or the front closes it, which is no death and is not reported.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from typing import Protocol

import msgspec

from forerun.messages import Down, Fault, Profile, Progress, Ready, Start, StepPlan, StepResult, Stop, Up
from forerun.ring import Reader, Ring, RingError, Writer

WORKER_COMMAND = (sys.executable, "-P", "-X", "faulthandler", "-m", "forerun.engine.worker")
TICK_SECONDS = 0.5
LOADING_PATIENCE = 10
"""While it loads, a worker may be silent this many times longer than while it serves."""
IDLE_SECONDS = 10.0
"""silence of a worker that has nothing to do"""
STEP_PATIENCE = 20
"""A silence is a hang only when it is also longer than this many of the most expensive steps."""
STOP_SECONDS = 5.0
KEPT_LINES = 20
MOST_DRAINS = 3
"""So often in a row it hears what came while it was hearing: a front that is behind then writes the tokens of several steps at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Death:
    """Why a worker is gone. `fatal`: it would end alike if it were started again."""

    reason: str
    cure: str = ""
    fatal: bool = False


class Listener(Protocol):
    """Who hears a worker. Called on the event loop; nothing is called after `died`, nor after `Link.close`."""

    def progress(self, message: Progress) -> None: ...
    def ready(self, message: Ready) -> None: ...
    def profiled(self, message: Profile) -> None: ...
    def result(self, message: StepResult) -> None: ...
    def said(self, line: str) -> None:
        """A line the worker wrote to its standard output or error."""
        ...

    def died(self, death: Death) -> None: ...


class Link:
    """A running worker. Made on the event loop; the process is started at once and told `start`. `environment`: the process's;
    None = ours. OSError, with nothing left open, when this machine has no room for it (descriptors, memory, processes)."""

    def __init__(
        self,
        start: Start,
        listener: Listener,
        patience_seconds: float,
        environment: dict[str, str] | None = None,
        command: tuple[str, ...] = WORKER_COMMAND,
    ) -> None:
        self._listener = listener
        self._patience = patience_seconds
        self._step_silence = patience_seconds
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
        self._fault: Fault | None = None
        self._verdict = ""
        self._closing = False
        self._loading = True
        self._owed = 0
        """plans that were sent and not answered"""
        self._gone = asyncio.Event()
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._text = b""
        self._started_ns = time.monotonic_ns()
        with contextlib.ExitStack() as undo:
            self._rings = self._ring(undo), self._ring(undo)
            self._writer, self._reader = Writer(self._rings[0]), Reader(self._rings[1])
            undo.callback(self._writer.close)
            undo.callback(self._reader.close)
            self._process = self._spawn(command, environment, undo)
            self._pidfd = os.pidfd_open(self._process.pid)
            undo.pop_all()
        self._loop.add_reader(self._reader.fd, self._on_frames)
        self._loop.add_reader(self._stderr, self._on_text)
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._last_beat, self._silent_seconds, self._ticked_at = 0, 0.0, self._loop.time()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        self.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Down) -> None:
        """Send, in order; what does not fit into the ring waits here and goes out as the worker reads."""
        if self._gone.is_set():
            return
        self._owed += isinstance(message, StepPlan)
        if not self._writer.push(self._encoder.encode(message)):
            self._loop.add_reader(self._writer.space_fd, self._on_space)

    def beat_age(self) -> float:
        """Seconds since the worker's last sign of life (since its start, while there was none)."""
        beat_ns = self._last_beat if self._gone.is_set() else self._reader.beat_ns
        return (time.monotonic_ns() - (beat_ns or self._started_ns)) / 1e9

    def kill(self, reason: str) -> None:
        """End the worker now; `Listener.died` follows with this reason."""
        if not self._gone.is_set():
            self._verdict = self._verdict or reason
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self, seconds: float = STOP_SECONDS) -> None:
        """Tell the worker to stop and wait until it is gone; kill it if it takes longer, or while it is still loading and would not
        hear. The listener hears nothing any more."""
        self._closing = True
        self.send(Stop())
        if self._loading:
            self.kill("was not needed any more")
        try:
            await asyncio.wait_for(self._gone.wait(), seconds)
        except TimeoutError:
            self.kill("did not stop")
            await self._gone.wait()

    def _ring(self, undo: contextlib.ExitStack) -> Ring:
        ring = Ring.create()
        undo.callback(ring.close)
        return ring

    def _spawn(self, command: tuple[str, ...], environment: dict[str, str] | None, undo: contextlib.ExitStack) -> subprocess.Popen[bytes]:
        fds = [fd for ring in self._rings for fd in ring.fds]
        read_end, write_end = os.pipe()
        undo.callback(os.close, read_end)
        os.set_blocking(read_end, False)
        self._stderr = read_end
        try:
            process = subprocess.Popen(
                [*command, str(os.getpid()), *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=fds,
                env=environment,
                process_group=0,
            )
        finally:
            os.close(write_end)
        undo.callback(_end, process)
        return process

    def _on_frames(self) -> None:
        try:
            for _ in range(MOST_DRAINS):
                frames = self._reader.drain()
                if not frames:
                    break
                for frame in frames:
                    self._hear(self._decoder.decode(frame))
        except (RingError, msgspec.MsgspecError) as error:
            self.kill(f"sent something that is not a message: {error}")

    def _hear(self, message: Up) -> None:
        if self._closing:
            return
        if isinstance(message, StepResult):
            self._owed -= 1
            self._listener.result(message)
        elif isinstance(message, Progress):
            self._listener.progress(message)
        elif isinstance(message, Ready):
            self._loading = False
            self._step_silence = max(self._patience, STEP_PATIENCE * max(message.step_seconds))
            self._listener.ready(message)
        elif isinstance(message, Profile):
            self._listener.profiled(message)
        else:
            self._fault = message

    def _on_space(self) -> None:
        if self._writer.flush():
            self._loop.remove_reader(self._writer.space_fd)

    def _on_text(self) -> None:
        """Relay whole lines; the beginning of a line waits for its end."""
        try:
            data = os.read(self._stderr, 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._stderr)
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._relay(line)

    def _relay(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._lines.append(text)
            if not self._closing:
                self._listener.said(text)

    def _tick(self) -> None:
        """Count the silence in this loop's own ticks: when the whole container was paused or this process starved, the time that
        went by is nobody's silence."""
        now = self._loop.time()
        passed, self._ticked_at = min(now - self._ticked_at, 2 * TICK_SECONDS), now
        beat = self._reader.beat_ns
        if beat != self._last_beat:
            self._last_beat, self._silent_seconds = beat, 0.0
        else:
            self._silent_seconds += passed
        if self._silent_seconds > self._allowed_silence():
            self.kill(f"gave no sign of life for {self._silent_seconds:.1f} s")
        else:
            self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    def _allowed_silence(self) -> float:
        """A worker beats while it waits, not inside a step: only one that owes an answer may take as long as a step does."""
        if self._loading:
            return self._patience * LOADING_PATIENCE
        return self._step_silence if self._owed else min(self._patience, IDLE_SECONDS)

    def _on_exit(self) -> None:
        """Hear out what it had published, then report its death."""
        code = self._process.wait()
        self._on_frames()
        self._on_text()
        self._relay(self._text)
        self._release()
        if not self._closing:
            self._listener.died(self._death(code))

    def _release(self) -> None:
        self._timer.cancel()
        for fd in (self._reader.fd, self._writer.space_fd, self._pidfd, self._stderr):
            self._loop.remove_reader(fd)
        self._gone.set()
        self._writer.close()
        self._reader.close()
        for ring in self._rings:
            ring.close()
        os.close(self._pidfd)
        os.close(self._stderr)

    def _death(self, code: int) -> Death:
        if self._fault is not None:
            return Death(self._fault.error, self._fault.cure, self._fault.fatal)
        if self._verdict:
            return Death(f"the worker {self._verdict} and was killed")
        if code < 0:
            name = signal.Signals(-code).name
            cure = "if nobody killed it, the kernel's out-of-memory killer may have (see the kernel log)" if name == "SIGKILL" else ""
            return Death(f"the worker was ended by {name}{self._last_words()}", cure)
        return Death(f"the worker ended with exit code {code}{self._last_words()}")

    def _last_words(self) -> str:
        return "".join(f" | {line}" for line in list(self._lines)[-3:])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
