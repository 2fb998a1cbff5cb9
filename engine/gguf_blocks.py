"""Quantised tensors of GGUF files: blocks of 32 or 256 weights along the innermost dimension, as numbers and as `Codes`.

`BLOCKS` says how each type is laid out. Follows the ggml repository (ggml-common.h, ggml-quants.c).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from forerun.kernels import quant
from forerun.kernels.quant import Codes


def half(blocks: Tensor, start: int) -> Tensor:
    """A float16 at byte `start` of every block → float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """uint8 [blocks, n] → float32 [blocks, 2n]: all low halves, then all high halves."""
    return torch.cat([packed & 15, packed >> 4], dim=1).float()


def q8_0(blocks: Tensor) -> Tensor:
    """f16 scale, 32 × int8."""
    return half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def q4_0(blocks: Tensor) -> Tensor:
    """f16 scale, 16 bytes: (nibble − 8) · scale."""
    return half(blocks, 0) * (nibbles(blocks[:, 2:]) - 8)


def q4_1(blocks: Tensor) -> Tensor:
    """f16 scale, f16 minimum, 16 bytes: nibble · scale + minimum."""
    return half(blocks, 0) * nibbles(blocks[:, 4:]) + half(blocks, 2)


def fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [blocks, 4], a little-endian word whose bit i belongs to weight i → float32 [blocks, 32] of 0 or 16."""
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(1).float() * 16


def q5_0(blocks: Tensor) -> Tensor:
    """f16 scale, u32 of fifth bits, 16 bytes: (value − 16) · scale."""
    return half(blocks, 0) * (nibbles(blocks[:, 6:]) + fifth_bits(blocks[:, 2:6]) - 16)


def q5_1(blocks: Tensor) -> Tensor:
    """f16 scale, f16 minimum, u32 of fifth bits, 16 bytes: value · scale + minimum."""
    return half(blocks, 0) * (nibbles(blocks[:, 8:]) + fifth_bits(blocks[:, 4:8])) + half(blocks, 2)


def six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of Q4_K: eight 6-bit scales and eight 6-bit minima. Bytes 0–3 and 4–7 hold the first four of each in their low six
    bits; bytes 8–11 the low four bits of the last four (scale in the low nibble), whose upper two bits top bytes 0–3 and 4–7."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1)
    return scales.float(), minima.float()


def q4_k(blocks: Tensor) -> Tensor:
    """f16 d, f16 dmin, 12 bytes of scales, 128 bytes. Weights come in 4 groups of 64: 32 bytes hold 32 low, then 32 high nibbles.
    Each run of 32 has its own scale and minimum: d · scale · nibble − dmin · minimum."""
    return scaled(blocks, nibbles(blocks[:, 16:].reshape(-1, 32)).view(-1, 8, 32))


def q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit r of byte i belongs to weight i of run r."""
    runs = torch.arange(8, dtype=torch.uint8)[None, :, None]
    fifth = ((blocks[:, None, 16:48] >> runs) & 1).float() * 16
    return scaled(blocks, nibbles(blocks[:, 48:].reshape(-1, 32)).view(-1, 8, 32) + fifth)


def scaled(blocks: Tensor, values: Tensor) -> Tensor:
    """float32 [blocks, 8, 32], a scale and a minimum for each run of 32 → [blocks, 256]."""
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    return ((half(blocks, 0) * scales)[:, :, None] * values - (half(blocks, 2) * minima)[:, :, None]).flatten(1)


def q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 × int8 scales, f16 d. Each half (128 weights) takes 64 + 32 bytes:
    weights 0–63 the low nibbles, 64–127 the high ones; run r of 32 takes bits 2r, 2r+1 of the pairs. d · scale[i / 16] · (value − 32)."""
    low = nibbles(blocks[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[None, None, :, None]
    values = (low + (pairs & 3).float() * 16 - 32).view(-1, 16, 16)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * half(blocks, 208)
    return (scales[:, :, None] * values).flatten(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A quantised type: `bytes` hold `weights`."""

    name: str
    weights: int
    bytes: int
    expand: Callable[[Tensor], Tensor]


PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
BLOCKS = {
    2: Block("Q4_0", 32, 18, q4_0),
    3: Block("Q4_1", 32, 20, q4_1),
    6: Block("Q5_0", 32, 22, q5_0),
    7: Block("Q5_1", 32, 24, q5_1),
    8: Block("Q8_0", 32, 34, q8_0),
    12: Block("Q4_K", 256, 144, q4_k),
    13: Block("Q5_K", 256, 176, q5_k),
    14: Block("Q6_K", 256, 210, q6_k),
}
OTHER = {10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4"}


def to_codes(block: Block, blocks: Tensor, shape: tuple[int, int]) -> Codes:
    """blocks: uint8 [blocks, bytes of a block], row by row → the matrix of this shape, without a detour through numbers: Q8_0, Q4_0 and
    Q4_1 exactly, Q4_K but for its scales, products of two numbers that are rounded to float16. Other types have no format of their own and
    become `int8-groups`, which is at most 1/254 of a group's largest weight away."""
    rows = shape[0]
    match block.name:
        case "Q8_0":
            return exact("int8-groups", blocks[:, 2:].contiguous().view(torch.int8), shape, half(blocks, 0))
        case "Q4_0":
            return exact("int4-symmetric", four_bits(blocks[:, 2:]), shape, half(blocks, 0))
        case "Q4_1":
            return exact("int4", four_bits(blocks[:, 4:]), shape, half(blocks, 0), half(blocks, 2))
        case "Q4_K":
            scales, minima = six_bit_pairs(blocks[:, 4:16])
            scales, minima = half(blocks, 0) * scales, -half(blocks, 2) * minima
            codes = four_bits(blocks[:, 16:].reshape(-1, 32)).reshape(shape)
            return quant.grouped("int4", codes, scales.view(rows, -1), minima.view(rows, -1))
        case _:
            return quant.quantize(block.expand(blocks).view(shape), "int8-groups")


def exact(format: str, codes: Tensor, shape: tuple[int, int], scales: Tensor, minima: Tensor | None = None) -> Codes:
    """Scales and minima that were float16 in the file."""
    parts = (None if part is None else part.half().view(shape[0], -1) for part in (scales, minima))
    return Codes(format, codes.reshape(shape), torch.ones(shape[0]), *parts)


def four_bits(packed: Tensor) -> Tensor:
    """uint8 [blocks, n] → int8 [blocks, 2n]: all low halves, then all high halves."""
    return torch.cat([packed & 15, packed >> 4], dim=1).view(torch.int8)
