"""The native kernels, loaded once: `kernels/cpu/forerun_cpu.h` through ctypes. Knows no op, only how a program is run."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

OP = struct.Struct("=2i12i10i4f")
"""One `fr_op`: code, row kind, 12 tensor places, 10 integers, 4 floats."""

PLACES, INTEGERS, FLOATS = 12, 10, 4
FAULTS = {
    1: "the kernel library does not know an op of this version; remove kernels/cpu/_build and start again",
    2: "out of memory in a CPU kernel",
    3: "a token, position, slot, page, row, parent or length of a batch is out of range",
}


class KernelError(RuntimeError):
    """A kernel refused its operands."""


class Library:
    """A context of the kernels: an instruction set and a pool of `threads` threads. `isa`: a name of `isas`, or "" for the best one."""

    def __init__(self, path: Path, threads: int, isa: str = "") -> None:
        self.build = path.stem
        """names the sources and flags"""
        self._lib = ctypes.CDLL(str(path))
        self._lib.fr_open.restype = ctypes.c_void_p
        self._lib.fr_open.argtypes = [ctypes.c_int32, ctypes.c_char_p]
        self._lib.fr_close.argtypes = [ctypes.c_void_p]
        self._lib.fr_isa.argtypes = [ctypes.c_void_p]
        self._lib.fr_isa.restype = ctypes.c_char_p
        self._lib.fr_isas.restype = ctypes.c_char_p
        self._lib.fr_isas.argtypes = [ctypes.c_int32]
        self._lib.fr_stalls.argtypes = [ctypes.c_void_p]
        self._lib.fr_stalls.restype = ctypes.c_uint64
        self._lib.fr_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._lib.fr_read.restype = ctypes.c_uint64
        run = self._lib.fr_run
        run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p]
        run.restype = ctypes.c_int32
        self._run = run
        self._context = ctypes.c_void_p(self._lib.fr_open(threads, isa.encode() or None))
        if not self._context.value:
            raise ValueError(f"this CPU has no {isa}; it has: {', '.join(self.isas())}")

    def isas(self) -> list[str]:
        """Instruction sets this machine runs, best first."""
        names: list[str] = []
        while name := self._lib.fr_isas(len(names)):
            names.append(name.decode())
        return names

    @property
    def isa(self) -> str:
        return str(self._lib.fr_isa(self._context).decode())

    @property
    def stalls(self) -> int:
        """How often another process kept one of our threads from a core for so long that the pool stepped back to one thread."""
        return int(self._lib.fr_stalls(self._context))

    def read(self, address: int, count: int) -> int:
        """Reads `count` bytes from a multiple of 8 on, on all threads; the sum of the 64-bit words of their whole lines of 64 bytes."""
        return int(self._lib.fr_read(self._context, address, count))

    def run(self, ops: int, count: int, table: int, sizes: int) -> None:
        """Runs `count` ops at address `ops` over the table of addresses and the four sizes. Not for two threads at once."""
        status = self._run(self._context, ops, count, table, sizes)
        if status:
            raise KernelError(FAULTS[status])

    def close(self) -> None:
        if self._context.value:
            self._lib.fr_close(self._context)
            self._context = ctypes.c_void_p(None)

    def __del__(self) -> None:
        if hasattr(self, "_context"):
            self.close()
