"""The CPU as a `Backend`: where its KV lives, how weights are packed, which ops serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forerun.backends.base import Caps, Ops, Pool, PoolSpec, Weight
from forerun.backends.cpu import torch_ops
from forerun.backends.cpu.memory import Limits

PAGE_TOKENS = 16
"""Positions a page holds: one vector of scores."""

MOST_NODES = 1024
"""Guessed nodes a segment may have: the height of the score buffer, not a limit of the arithmetic."""

FORMATS = {"bf16": torch.bfloat16, "f32": torch.float32}


class CpuBackend:
    """A CPU. `threads`: compute threads; `limits`: what the process may take."""

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, ops: Ops, caps: Caps, facts: dict[str, str], limits: Limits, memory_fraction: float) -> None:
        self.ops = ops
        self.caps = caps
        self._facts = facts
        self._limits = limits
        self._fraction = memory_fraction

    def memory(self) -> tuple[int, int]:
        """(free, total): of the machine or the cgroup, whichever is less, minus the share that must stay free."""
        free, total = self._limits.memory()
        reserve = int(total * (1.0 - self._fraction))
        return max(0, free - reserve), total - reserve

    def pool(self, spec: PoolSpec, pages: int) -> Pool:
        """Keys lie transposed in memory, [.., D, page_tokens]: a step over D then reads the scores' vector of positions."""
        shape = (spec.layers, pages, spec.kv_heads, spec.head_dim, PAGE_TOKENS)
        keys = torch.zeros(shape, dtype=spec.dtype).transpose(3, 4)
        values = torch.zeros(keys.shape, dtype=spec.dtype)
        return Pool(spec, keys, values)

    def pack(self, weight: Tensor, format: str) -> Weight:
        if format not in FORMATS:
            raise ValueError(f"the CPU has no weight format {format!r}; it has: {', '.join(FORMATS)}")
        return torch_ops.pack(weight, FORMATS[format], format)

    def capture(self, function: Callable[..., Any], example: Any) -> Callable[..., Any]:
        return function

    def synchronize(self) -> None:
        return None

    def facts(self) -> dict[str, str]:
        return dict(self._facts)


def open_cpu(threads: int, memory_fraction: float) -> CpuBackend:
    """`threads` 0 = one less than the cores that this process may use, at least one: the front needs the other."""
    limits = Limits()
    cores = limits.cores()
    chosen = threads or max(1, cores - 1)
    torch.set_num_threads(chosen)
    caps = Caps(
        page_tokens=PAGE_TOKENS,
        dtypes=(torch.float32, torch.bfloat16),
        graphs=False,
        device_lengths=True,
        tree_attention=True,
        max_nodes=MOST_NODES,
        batch_invariant=True,
    )
    facts = {"kernels": "torch reference", "threads": str(chosen), "cores": str(cores)}
    return CpuBackend(torch_ops.TorchOps(), caps, facts, limits, memory_fraction)
