"""Packed weights of 8 and 4 bits: the layout of `kernels/cpu/quant.h`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backends.base import Weight
from forerun.backends.cpu.regions import Regions
from forerun.backends.cpu.weights import PANEL, side_by_side
from forerun.kernels.quant import GROUP, Codes


def pack(codes: Codes, regions: Regions, halves: bool = False) -> Weight:
    """Panels of 32 output columns, each [groups][codes, scales, minima] and 32 units. What is padded stands for zero: its units are."""
    shape = codes.shape
    if halves:
        scales, minima = (None if part is None else side_by_side(part) for part in (codes.scales, codes.minima))
        codes = Codes(codes.format, side_by_side(codes.codes), side_by_side(codes.units), scales, minima)
    rows, columns = codes.shape
    panels, groups = -(-rows // PANEL), -(-columns // GROUP)
    room = (0, groups * GROUP - columns, 0, panels * PANEL - rows)
    parts = [_codes(F.pad(codes.codes, room).view(panels, PANEL, groups, GROUP), codes.format)]
    for values in (codes.scales, codes.minima):
        if values is not None:
            full = F.pad(values, (0, 0, 0, panels * PANEL - rows))
            parts.append(_bytes(full.view(panels, PANEL, groups).transpose(1, 2).contiguous()))
    units = _bytes(F.pad(codes.units, (0, panels * PANEL - rows)).view(panels, PANEL))
    body = sum(part.shape[2] for part in parts)
    data = regions.take(panels * (groups * body + units.shape[1])).view(panels, -1)
    data[:, groups * body :] = units
    blocks, at = data[:, : groups * body].view(panels, groups, body), 0
    for part in parts:
        blocks[:, :, at : at + part.shape[2]] = part
        at += part.shape[2]
    return Weight(shape, codes.format, data, data.nbytes, halves)


def _codes(codes: Tensor, format: str) -> Tensor:
    """int8 [panels, column, groups, k] → the bytes of each group, uint8 [panels, groups, …]."""
    panels, _, groups, _ = codes.shape
    if not format.startswith("int4"):
        return _bytes(codes.view(panels, PANEL, groups, GROUP // 2, 2).permute(0, 2, 3, 1, 4).reshape(panels, groups, -1))
    nibbles = codes.view(panels, PANEL, groups, 4, 4, 2).permute(4, 0, 2, 3, 1, 5).to(torch.int16)  # plane first
    words = nibbles[0] | nibbles[1] << 4 | nibbles[2] << 8 | nibbles[3] << 12
    return _bytes(words.reshape(panels, groups, -1))


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
