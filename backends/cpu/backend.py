"""The CPU as a `Backend`: where its KV lives, how weights are packed, which ops serve.

Two forms. Native: C++ kernels for the best instruction set the machine has, built when they are first needed. Torch: the reference ops,
where there is no compiler; slow, and said so once in the log. Both keep the promise of batch invariance.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forerun.backends.base import Backend, Caps, Ops, Pool, PoolSpec, Weight
from forerun.backends.cpu import quant as packed_codes
from forerun.backends.cpu import torch_ops, weights
from forerun.backends.cpu.library import Library
from forerun.backends.cpu.memory import Limits
from forerun.backends.cpu.native_ops import Captured, NativeOps
from forerun.backends.cpu.regions import Regions, huge_pages
from forerun.backends.cpu.threads import choose_threads, measure
from forerun.kernels import quant
from forerun.kernels.build import BuildError
from forerun.kernels.cpu.build import build
from forerun.kernels.quant import Codes

log = logging.getLogger(__name__)

PAGE_TOKENS = 16
"""Positions a page holds: one vector of scores."""

MOST_NODES = 1024
"""Guessed nodes a segment may have: a bound for tables, not a limit of the arithmetic."""

KV_TYPES = (torch.bfloat16, torch.float32, torch.int8)
FORMATS = {"bf16": torch.bfloat16, "f32": torch.float32}


class CpuBackend:
    """What both forms share. `limits`: what the process may take; `memory_fraction`: the part of it that we take."""

    name = "cpu"
    device = torch.device("cpu")
    caps: Caps
    ops: Ops

    def __init__(self, threads: int, limits: Limits, memory_fraction: float) -> None:
        self.threads = threads
        self._limits = limits
        self._fraction = memory_fraction

    def memory(self) -> tuple[int, int]:
        """(free, total): of the machine or the cgroup, whichever is less, minus the share that must stay free."""
        free, total = self._limits.memory()
        reserve = int(total * (1.0 - self._fraction))
        return max(0, free - reserve), total - reserve

    def pool(self, spec: PoolSpec, pages: int) -> Pool:
        """Keys lie transposed in memory, [.., D, page_tokens]: one load gives the same dimension of sixteen positions. Scales lie
        behind the entries of their page and head (`kernels/cpu/kv.h`)."""
        shape, entries = (spec.layers, pages, spec.kv_heads), spec.head_dim * PAGE_TOKENS * spec.dtype.itemsize
        block = spec.position_bytes * PAGE_TOKENS // (2 * spec.layers * spec.kv_heads)
        keys, values = (huge_pages(math.prod(shape) * block).view(*shape, block) for _ in range(2))
        scales = [part[..., entries:].view(torch.float32) for part in (keys, values)] if block > entries else [None, None]
        keys, values = (part[..., :entries].view(spec.dtype) for part in (keys, values))
        keys, values = keys.view(*shape, spec.head_dim, PAGE_TOKENS), values.view(*shape, PAGE_TOKENS, spec.head_dim)
        return Pool(spec, keys.transpose(3, 4), values, *scales)

    def synchronize(self) -> None:
        return None

    def facts(self) -> dict[str, str]:
        return {"threads": str(self.threads), "cores": str(self._limits.cores())}


class NativeCpu(CpuBackend):
    """C++ kernels. `library`: for benchmarks."""

    def __init__(self, library: Library, threads: int, limits: Limits, memory_fraction: float) -> None:
        super().__init__(threads, limits, memory_fraction)
        self.library = library
        self._regions = Regions()
        self.ops = self._ops = NativeOps(library)
        self.caps = _caps((torch.bfloat16, torch.float32) if library.isa != "scalar" else (torch.float32, torch.bfloat16), graphs=True)

    def pack(self, weight: Tensor, format: str, halves: bool = False) -> Weight:
        _check_format(format)
        if format in quant.FORMATS:
            return self.pack_codes(quant.quantize(weight, format), halves)
        return weights.pack(weight, format, self._regions, halves)

    def pack_codes(self, codes: Codes, halves: bool = False) -> Weight:
        return packed_codes.pack(codes, self._regions, halves)

    def capture(self, function: Callable[..., Any], example: Any) -> Callable[..., Any]:
        captured = Captured(function, self._ops)
        if example is not None:
            captured(example)
        return captured

    def facts(self) -> dict[str, str]:
        return {"kernels": f"native, {self.library.isa}", "build": self.library.build, **super().facts()}


class TorchCpu(CpuBackend):
    """The reference ops."""

    def __init__(self, threads: int, limits: Limits, memory_fraction: float) -> None:
        super().__init__(threads, limits, memory_fraction)
        self.ops = torch_ops.TorchOps()
        self.caps = _caps((torch.float32, torch.bfloat16), graphs=False)

    def pack(self, weight: Tensor, format: str, halves: bool = False) -> Weight:
        _check_format(format)
        if format in quant.FORMATS:
            return self.pack_codes(quant.quantize(weight, format), halves)
        return torch_ops.pack(weight, FORMATS[format], format, halves)

    def pack_codes(self, codes: Codes, halves: bool = False) -> Weight:
        return Weight(codes.shape, codes.format, codes, codes.nbytes, halves)

    def capture(self, function: Callable[..., Any], example: Any) -> Callable[..., Any]:
        return function

    def facts(self) -> dict[str, str]:
        return {"kernels": "torch reference (slow)", **super().facts()}


def _caps(dtypes: tuple[torch.dtype, ...], graphs: bool) -> Caps:
    return Caps(PAGE_TOKENS, dtypes, KV_TYPES, graphs, device_lengths=True, tree_attention=True, max_nodes=MOST_NODES, batch_invariant=True)


def _check_format(format: str) -> None:
    if format not in (*FORMATS, *quant.FORMATS):
        raise ValueError(f"the CPU has no weight format {format!r}; it has: {', '.join((*FORMATS, *quant.FORMATS))}")


def open_cpu(threads: int, memory_fraction: float) -> Backend:
    """`threads`: compute threads, 0 = as `choose_threads` says. Torch itself gets one thread: its own pool would spin beside ours."""
    try:
        return open_native(threads, memory_fraction)
    except (BuildError, OSError) as error:
        log.warning("no native CPU kernels, serving with slow reference ops: %s", error)
        return open_torch(memory_fraction)


def open_native(threads: int, memory_fraction: float, isa: str = "") -> NativeCpu:
    """`isa`: an instruction set, or "" for the best there is; ValueError if the machine lacks it. BuildError or OSError if the kernels
    cannot be built or loaded."""
    limits, path = Limits(), build()
    torch.set_num_threads(1)
    chosen = threads or choose_threads(limits.cores(), functools.partial(measure, path, isa))
    return NativeCpu(Library(path, chosen, isa), chosen, limits, memory_fraction)


def open_torch(memory_fraction: float) -> TorchCpu:
    torch.set_num_threads(1)
    return TorchCpu(1, Limits(), memory_fraction)
