"""The dice: Gumbel noise of (seed, token index, token id), the same bits on every device.

Specification in plain torch of `forerun/dice.md`, which says it in words and holds the test vectors. Everything is integer arithmetic
and single float32 multiplications and additions, each rounded on its own: no fused multiply-add, no division, no library logarithm.
Elementwise throughout, so a value never depends on what it is computed together with. Knows nothing of rows or batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

LOG_COEFFICIENTS = (
    0.3333333134651184,  # 0x3eaaaaaa
    -0.2500081956386566,  # 0xbe800113
    0.20001226663589478,  # 0x3e4cd004
    -0.16623356938362122,  # 0xbe2a3922
    0.14201758801937103,  # 0x3e116d0f
    -0.13160182535648346,  # 0xbe06c2a1
    0.12761574983596802,  # 0x3e02adb4
    -0.07634493708610535,  # 0xbd9c5abc
)
"""P in ln(1+f) = f − f²/2 + f³·P(f) on [√½ − 1, √2 − 1], lowest power first: the minimax fit (Remez exchange in 50 digits, weighted so
that the relative error of ln is least), rounded to float32; 6.5e-9 relative."""

LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
SQRT_HALF_BITS = 0x3F3504F3
NEAR_ONE = 1 << 30


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). All tensors int64 holding 32-bit words and
    broadcastable; returns four words."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32×32-bit product, through two 48-bit products so that no signed 64-bit integer overflows."""
    lower, upper = a * (b & 0xFFFF), a * (b >> 16)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & WORD


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float32."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    return _assemble(mantissa - 1.0, exponent.to(torch.float32))


def _assemble(f: Tensor, exponent: Tensor) -> Tensor:
    """ln((1+f) · 2^exponent), f in [√½ − 1, √2 − 1]. The order of the operations is part of the specification."""
    square = f * f
    p = torch.full_like(f, LOG_COEFFICIENTS[-1])
    for coefficient in LOG_COEFFICIENTS[-2::-1]:
        p = p * f
        p = p + coefficient
    y = (f * square) * p
    y = y - square * 0.5
    y = y + exponent * LN2_LOW
    y = f + y
    return y + exponent * LN2_HIGH


def gumbel_of_word(v: Tensor) -> Tensor:
    """int64 tensor of 32-bit words → G = −ln(E), E = −ln(1 − u), u = (v + ½)·2⁻³², float32."""
    u = (v.to(torch.float32) + 0.5) * 2.0**-32
    x = ((WORD - v).to(torch.float32) + 0.5) * 2.0**-32
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    near = v < NEAR_ONE
    f = torch.where(near, -u, mantissa - 1.0)
    exponent = torch.where(near, 0, exponent).to(torch.float32)
    return -log(-_assemble(f, exponent))


def gumbel(seed: Tensor, index: Tensor, token: Tensor) -> Tensor:
    """Noise of (seed, index, token), int64 tensors that broadcast together; seed holds an unsigned 64-bit number's bits, index is in
    0 … 2⁶³−1, token in 0 … 2³¹−1. float32."""
    words = philox((seed & WORD, (seed >> 32) & WORD), (token >> 2, index & WORD, (index >> 32) & WORD, torch.zeros_like(token)))
    which = token & 3
    return gumbel_of_word(torch.where(which < 2, torch.where(which == 0, words[0], words[1]), torch.where(which == 2, words[2], words[3])))


def noise(seed: int, index: int, vocab: int) -> Tensor:
    """Noise of every token id 0 … vocab−1, float32 [vocab]: four ids share one Philox block."""
    block = torch.arange((vocab + 3) // 4)
    zero = torch.zeros_like(block)
    words = philox((zero + (seed & WORD), zero + (seed >> 32 & WORD)), (block, zero + (index & WORD), zero + (index >> 32 & WORD), zero))
    return gumbel_of_word(torch.stack(words, dim=1).reshape(-1)[:vocab])


def signed(seed: int) -> int:
    """An unsigned 64-bit seed as the int64 with the same bits (torch has no arithmetic on unsigned 64-bit tensors)."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
