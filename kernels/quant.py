"""Weights of 8 and 4 bits: what their codes mean, how they are made from numbers, and how activations are rounded to meet them; and the
8 bits that a KV cache may have.

    w[n, k] = units[n] · (scales[n, g] · (codes[n, k] − offset) + minima[n, g]),    g = k // 32

    format           codes          offset   scales   minima
    int8             −127 … 127          0   –        –        one unit for each output column
    int8-groups      −128 … 127          0   f16      –        GGUF Q8_0
    int4             0 … 15              0   f16      f16      GGUF Q4_1, Q4_K, GPTQ and AWQ with zero points
    int4-symmetric   0 … 15              8   f16      –        GGUF Q4_0, GPTQ and AWQ without

Knows nothing of devices and packed layouts.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Weights along K that share a scale."""
SPAN = 512
"""Activations along K that share one: as many as can meet codes of 8 bits, their sum still in 32."""

FORMATS = ("int8", "int8-groups", "int4", "int4-symmetric")

LARGEST = 32767 - 128
"""Of the whole numbers that activations are rounded to: with a code added they still have 16 bits."""
SMALLEST = 1e-30
"""A span of activations, or an entry of a KV cache, whose largest value is below counts as zeros."""


@dataclasses.dataclass(frozen=True, slots=True)
class Codes:
    """A quantised matrix [N, K]. `codes`: int8 [N, K]; `units`: float32 [N]; `scales`, `minima`: float16 [N, ceil(K / 32)], or None as the
    module's table says."""

    format: str
    codes: Tensor
    units: Tensor
    scales: Tensor | None = None
    minima: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def offset(self) -> int:
        return 8 if self.format == "int4-symmetric" else 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.units, self.scales, self.minima) if part is not None)

    def rows(self, order: Tensor) -> Codes:
        """The rows of these indices, in this order."""
        scales, minima = (None if part is None else part[order] for part in (self.scales, self.minima))
        return Codes(self.format, self.codes[order], self.units[order], scales, minima)


def join(parts: list[Codes]) -> Codes:
    """One matrix of all rows. The parts are of one format."""
    scales = [part.scales for part in parts if part.scales is not None]
    minima = [part.minima for part in parts if part.minima is not None]
    return Codes(
        parts[0].format,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.units for part in parts]),
        torch.cat(scales) if scales else None,
        torch.cat(minima) if minima else None,
    )


def expand(codes: Codes) -> Tensor:
    """The numbers that the codes stand for: float32 [N, K]."""
    values = codes.codes.float() - codes.offset
    if codes.scales is not None:
        values *= _by_group(codes.scales.float(), values.shape[1])
    if codes.minima is not None:
        values += _by_group(codes.minima.float(), values.shape[1])
    return values * codes.units.unsqueeze(1)


def quantize(weight: Tensor, format: str) -> Codes:
    """The nearest codes. weight [N, K] of any floating type, finite.

    int8: each row's largest value is 127. Groups: the largest value of each is 127 or, with 4 bits and a sign, the one of largest size is
    −8; with a minimum, smallest and largest are 0 and 15. `units` are powers of two, so that scales are well inside of float16's range, and
    weights that were made by the same rule (as Q4_1 is) get their codes back."""
    w = weight.detach().float()
    rows, columns = w.shape
    largest = w.abs().amax(1) if columns else torch.zeros(rows)
    if format == "int8":
        units = largest / 127
        return Codes(format, _nearest(w, units.unsqueeze(1), -127, 127), units)
    units = torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(largest))), torch.ones(()))
    # Padding repeats a value of the last group, so that it changes neither its smallest nor its largest one.
    padded = F.pad((w / units.unsqueeze(1)).unsqueeze(0), (0, -columns % GROUP), mode="replicate").squeeze(0)
    groups = padded.view(rows, -1, GROUP)
    minima = None
    if format == "int4":
        minima = groups.amin(2).half()
        scales = ((groups.amax(2) - minima.float()) / 15).half()
        codes = _nearest(groups - minima.float().unsqueeze(2), scales.float().unsqueeze(2), 0, 15)
    elif format == "int4-symmetric":
        peak = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
        scales = (peak / -8).half()
        codes = _nearest(groups, scales.float().unsqueeze(2), -8, 7) + 8
    else:
        scales = (groups.abs().amax(2) / 127).half()
        codes = _nearest(groups, scales.float().unsqueeze(2), -127, 127)
    return Codes(format, codes.flatten(1)[:, :columns], units, scales, minima)


def grouped(format: str, codes: Tensor, scales: Tensor, minima: Tensor | None = None) -> Codes:
    """Codes [N, K] that are there already, with their scales and minima in float32 [N, groups]: these are rounded to float16 beside a power
    of two a row, which is exact for what was float16 before."""
    largest = scales.abs().amax(1) if minima is None else torch.maximum(scales.abs(), minima.abs()).amax(1)
    units = torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(largest))), torch.ones(()))
    parts = (None if part is None else (part / units.unsqueeze(1)).half() for part in (scales, minima))
    return Codes(format, codes.to(torch.int8), units, *parts)


def round_rows(x: Tensor) -> Tensor:
    """What a product with codes sees of its activations, float32 [n, K]: each span of 512 as multiples of its largest value / 32639. Small
    values beside large ones lose digits that bfloat16 would keep, but all of a span together less than the large ones lose there. A span
    that holds a NaN or an infinity is NaN."""
    width = x.shape[1]
    spans = F.pad(x, (0, -width % SPAN)).view(x.shape[0], -(-width // SPAN), SPAN)
    peak = spans.abs().amax(2, keepdim=True)
    inverse = torch.where(peak > SMALLEST, LARGEST / peak, 0.0)
    step = torch.where(peak > SMALLEST, peak / LARGEST, 0.0)
    rounded = (spans * inverse).round() * step
    rounded = torch.where(peak.isfinite(), rounded, torch.nan)
    return rounded.flatten(1)[:, :width]


def entries(x: Tensor) -> tuple[Tensor, Tensor]:
    """Entries of a KV cache, float32 [..., D] → (codes int8 [..., D], scales float32 [...]): the largest value of each is ±127. A NaN or an
    infinity makes the scale a NaN."""
    peak = x.abs().amax(-1)
    scales = torch.where(peak > SMALLEST, peak / 127, 0.0)
    codes = torch.where(scales.unsqueeze(-1) > 0, x / scales.unsqueeze(-1), 0.0).round()
    return codes.nan_to_num(0, 0, 0).to(torch.int8), torch.where(peak.isfinite(), scales, torch.nan)


def _by_group(values: Tensor, columns: int) -> Tensor:
    return values.repeat_interleave(GROUP, 1)[:, :columns]


def _nearest(values: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Multiples of `scale`, int8; zero where the scale is."""
    return torch.where(scale != 0, values / scale, 0.0).round().clamp(low, high).to(torch.int8)
