"""Packed weights: the layouts of `kernels/cpu/kernels.h` and `forerun_cpu.h`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backends.base import Weight
from forerun.backends.cpu.regions import Regions

PANEL = 32
"""Output columns that lie together."""


def side_by_side(weight: Tensor) -> Tensor:
    """Rows of gate, then of up, [2F, …] → panels of sixteen of gate and the same of up, each half padded with zeros to whole panels."""
    half, inner, rest = PANEL // 2, weight.shape[0] // 2, weight.shape[1:]
    blocks = -(-inner // half)
    padded = weight.new_zeros(2, blocks * half, *rest)
    padded[0, :inner], padded[1, :inner] = weight[:inner], weight[inner:]
    return padded.view(2, blocks, half, *rest).transpose(0, 1).reshape(2 * blocks * half, *rest)


def pack(weight: Tensor, format: str, regions: Regions, halves: bool = False) -> Weight:
    """weight [N, K] of any floating type → bf16 [N/32][K/2][32][2] or f32 [N/32][K][32], padded with zeros."""
    shape = weight.shape
    if halves:
        weight = side_by_side(weight)
    rows, columns = weight.shape
    dtype, run = (torch.bfloat16, 2) if format == "bf16" else (torch.float32, 1)
    panels, steps = -(-rows // PANEL), -(-columns // run)
    source = weight.detach().to(dtype)
    if rows % PANEL or columns % run:
        source = F.pad(source, (0, steps * run - columns, 0, panels * PANEL - rows))
    data = regions.take(panels * steps * PANEL * run * dtype.itemsize)
    packed = data.view(dtype).view(panels, steps, PANEL, run)
    packed.copy_(source.view(panels, PANEL, steps, run).permute(0, 2, 1, 3))
    return Weight((shape[0], shape[1]), format, data, data.nbytes, halves)
