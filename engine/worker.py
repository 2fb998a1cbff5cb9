"""A worker process: `python -m forerun.engine.worker PARENT down… up…` (two times three descriptors of a ring).

Owns the process: its end of the two rings, its life and death, its heartbeat. What a step does is the stepper's business.

    Start ─▶ build ─▶ Progress … Ready ─▶ (StepPlan ─▶ StepResult)* ─▶ Stop
                └─────── Fault ◀────────────────┘ any exception: one line, a cure, exit code 1

The heartbeat comes from the loop itself, never from a thread: it says that plans are being answered, not that the process exists.
Interrupts and termination signals are ignored, because the front drains first and then says `Stop`; when the front dies, the kernel
kills this process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import msgspec

from forerun.engine.errors import StartError
from forerun.messages import Down, Fault, Inject, Message, Profile, Progress, Ready, Start, StepPlan, StepResult, Stop
from forerun.ring import Reader, Ring, Writer

BEAT_SECONDS = 0.5
PAUSE_SECONDS = 0.05
"""of silence, before idle moments are used for something"""
PROGRESS_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1

ReportProgress = Callable[[str, int, int], None]
"""(stage, done, total), as in `messages.Progress`; also a sign of life, so call it often while loading"""


class Stepper(Protocol):
    """What answers plans: the engine, or `echo.Echo`."""

    @property
    def ready(self) -> Ready: ...
    def step(self, plan: StepPlan) -> StepResult:
        """Apply one plan. A failure of one row is `Emit.error`; an exception ends the worker."""
        ...

    def inject(self, message: Inject) -> None:
        """Test hook for faults inside a step; receives `fail` only."""
        ...

    @property
    def resting(self) -> bool:
        """It has something to do while nobody wants anything."""
        ...

    def rest(self, wanted: Callable[[], bool]) -> Profile | None:
        """Do a little of that, until somebody `wanted` a step at the latest. Returns what the front should know."""
        ...


class Worker:
    """The loop. `build` makes the stepper from the first message."""

    def __init__(self, reader: Reader, writer: Writer, build: Callable[[Start, ReportProgress], Stepper]) -> None:
        self._reader = reader
        self._writer = writer
        self._build = build
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
        self._reported = ("", 0.0)
        self._delay_seconds = 0.0
        self._raise_next = False

    def run(self) -> int:
        """Serve until `Stop` or a fault. Returns the process's exit code."""
        loading = True
        try:
            start, *early = self._receive()
            if not isinstance(start, Start):
                raise TypeError(f"the first message must be Start, not {type(start).__name__}")
            stepper = self._build(start, self._progress)
            # What loading left behind lives as long as the process: keep the collector from walking it in the middle of a step.
            gc.collect()
            gc.freeze()
            loading = False
            self._send(stepper.ready)
            self._serve(start, stepper, early)
        except StartError as error:
            self._send(Fault(error.error, error.cure, fatal=True))
            return 1
        except Exception as error:
            traceback.print_exc()
            self._send(fault_of(error, fatal=loading))
            return 1
        return 0

    def _serve(self, start: Start, stepper: Stepper, messages: list[Down]) -> None:
        while True:
            for message in messages:
                if isinstance(message, StepPlan):
                    self._step(stepper, message)
                elif isinstance(message, Inject):
                    self._inject(start, stepper, message)
                elif isinstance(message, Stop):
                    return
            while stepper.resting and not self._reader.wait(PAUSE_SECONDS):
                self._rest(stepper)
            messages = self._receive()

    def _rest(self, stepper: Stepper) -> None:
        self._writer.beat()
        news = stepper.rest(lambda: self._reader.wait(0.0))
        if news is not None:
            self._send(news)

    def _receive(self) -> list[Down]:
        """Wait for messages, beating."""
        while True:
            self._writer.beat()
            self._reader.wait(BEAT_SECONDS)
            frames = self._reader.drain()
            if frames:
                self._writer.beat()
                return [self._decoder.decode(frame) for frame in frames]

    def _send(self, message: Message) -> None:
        if not self._writer.push(self._encoder.encode(message)):
            while not self._writer.flush():
                self._writer.wait(BEAT_SECONDS)
                self._writer.beat()

    def _step(self, stepper: Stepper, plan: StepPlan) -> None:
        if self._delay_seconds:
            time.sleep(self._delay_seconds)
        if self._raise_next:
            raise RuntimeError("a fault was injected into this step")
        self._send(stepper.step(plan))
        self._writer.beat()

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._writer.beat()
        now = time.monotonic()
        last_stage, last_time = self._reported
        if stage != last_stage or done >= total or now - last_time >= PROGRESS_SECONDS:
            self._reported = (stage, now)
            self._send(Progress(stage, done, total))

    def _inject(self, start: Start, stepper: Stepper, message: Inject) -> None:
        if not start.test_faults:
            print(f"refused to inject {message.kind}: the worker was started without test faults", file=sys.stderr)
        elif message.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif message.kind == "hang":
            while True:
                time.sleep(3600)
        elif message.kind == "slow":
            self._delay_seconds = message.value
        elif message.kind == "raise":
            self._raise_next = True
        else:
            stepper.inject(message)


def fault_of(error: Exception, fatal: bool) -> Fault:
    """An unexpected exception as one line; its traceback is in the log."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    memory = "give the process more memory, or lower --max-batch-total-tokens or --max-batch-prefill-tokens"
    return Fault(text, memory if isinstance(error, MemoryError) else "", fatal)


def build(start: Start, progress: ReportProgress) -> Stepper:
    """The engine, or the echo when asked. Imported late, so that an echo worker is small and starts at once."""
    if start.echo:
        from forerun.engine.echo import Echo

        return Echo(start)
    from forerun.engine.build import build_engine

    engine: Stepper = build_engine(start, progress)
    return engine


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends; leave at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"the process {parent} that started this worker is gone")


def main(arguments: list[str]) -> int:
    parent, *fds = map(int, arguments)
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return Worker(Reader(Ring(*fds[:3])), Writer(Ring(*fds[3:])), build).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
