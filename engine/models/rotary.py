"""Rotary position embeddings: from a configuration to the tables that `ops.rope` reads.

    angle(position, i) = position · inverse frequency i         i = 0 … R/2 − 1
    cos, sin = float32 [positions, R/2], times the scaling's attention factor

Scalings whose frequencies depend on the length of the sequence (dynamic, longrope) are settled once, by the longest sequence the
server allows: a position's rotation must not depend on what else is in the batch, on chunking, or on how long a sequence has grown,
or cached keys would not fit later queries. Within the model's original length that is what Hugging Face computes for short
sequences, beyond it what it computes for long ones.

Sources: RoFormer (2104.09864); NTK-aware (dynamic); YaRN (2309.00071); LongRoPE (2402.13753); Llama 3.1's wavelength bands.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forerun.engine.errors import StartError


@dataclasses.dataclass(frozen=True, slots=True)
class Rope:
    """One kind of rotation. `dims`: how many of a head's dimensions rotate (R); `head_dim`: all of them. `max_positions`: the length the
    configuration states; `original`: the length the model was trained at before scaling. `parameters`: the scaling's own."""

    kind: str
    theta: float
    dims: int
    head_dim: int
    max_positions: int
    original: int
    parameters: dict[str, Any]

    @property
    def reach(self) -> int:
        """The longest sequence this rotation is made for."""
        if self.kind in ("linear", "dynamic"):
            return int(self.max_positions * self.parameters.get("factor", 1.0))
        if self.kind == "yarn":
            return max(self.max_positions, int(self.original * (self.parameters.get("factor") or 1.0)))
        return self.max_positions


def tables(rope: Rope, limit: int, positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), float32 [positions, R/2], for a server whose sequences are at most `limit` tokens long."""
    inverse, attention = SCALINGS[rope.kind](rope, limit)
    angles = torch.arange(positions).float()[:, None] * inverse[None, :]
    return angles.cos() * attention, angles.sin() * attention


def inverse_frequencies(theta: float, dims: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dims, 2).float() / dims)


def default(rope: Rope, limit: int) -> tuple[Tensor, float]:
    return inverse_frequencies(rope.theta, rope.dims), 1.0


def linear(rope: Rope, limit: int) -> tuple[Tensor, float]:
    """Position interpolation: positions divided by a factor."""
    return inverse_frequencies(rope.theta, rope.dims) / rope.parameters["factor"], 1.0


def dynamic(rope: Rope, limit: int) -> tuple[Tensor, float]:
    """NTK-aware: a base grown so that `limit` positions turn the slowest pair as far as `max_positions` did."""
    factor, length = rope.parameters["factor"], max(limit, rope.max_positions)
    growth = factor * length / rope.max_positions - (factor - 1)
    return inverse_frequencies(rope.theta * growth ** (rope.dims / (rope.dims - 2)), rope.dims), 1.0


def llama3(rope: Rope, limit: int) -> tuple[Tensor, float]:
    """Slow pairs (long waves) interpolated, fast ones kept, a linear passage between."""
    inverse = inverse_frequencies(rope.theta, rope.dims)
    factor, low, high = (rope.parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = rope.original / (2 * math.pi / inverse)
    passage = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - passage) * inverse / factor + passage * inverse, 1.0


def yarn(rope: Rope, limit: int) -> tuple[Tensor, float]:
    """As llama3, with a ramp over the index of the pair, and scores sharpened by an attention factor."""
    parameters = rope.parameters
    factor = parameters.get("factor") or rope.max_positions / rope.original

    def index_that_turns(rotations: float) -> float:
        return rope.dims * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = index_that_turns(parameters.get("beta_fast") or 32)
    last = index_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dims - 1)
    ramp = ((torch.arange(rope.dims // 2).float() - first) / ((last - first) or 0.001)).clamp(0, 1)
    inverse = inverse_frequencies(rope.theta, rope.dims)
    attention = parameters.get("attention_factor")
    return inverse / factor * ramp + inverse * (1 - ramp), yarn_attention(parameters, factor) if attention is None else attention


def yarn_attention(parameters: dict[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(mscale) / scale(all_dims) if mscale and all_dims else scale(1.0)


def longrope(rope: Rope, limit: int) -> tuple[Tensor, float]:
    """A divisor for every pair, one list for servers within the original length and one for servers beyond it."""
    parameters = rope.parameters
    divisors = torch.tensor(parameters["long_factor" if limit > rope.original else "short_factor"], dtype=torch.float32)
    if len(divisors) != rope.dims // 2:
        raise StartError(f"longrope has {len(divisors)} factors for {rope.dims // 2} pairs", "fetch the model's config.json again")
    attention = parameters.get("attention_factor")
    if attention is None:
        factor = parameters.get("factor") or rope.max_positions / rope.original
        attention = math.sqrt(1 + math.log(factor) / math.log(rope.original)) if factor > 1 else 1.0
    return inverse_frequencies(rope.theta, rope.dims) / divisors, attention


def proportional(rope: Rope, limit: int) -> tuple[Tensor, float]:
    """Only the first pairs turn, at the frequencies they have in a head that turns whole; the others stand still."""
    turning = int(rope.parameters.get("partial_rotary_factor", 1.0) * rope.head_dim // 2)
    inverse = torch.zeros(rope.head_dim // 2)
    inverse[:turning] = inverse_frequencies(rope.theta, rope.head_dim)[:turning]
    return inverse / rope.parameters.get("factor", 1.0), 1.0


SCALINGS: dict[str, Callable[[Rope, int], tuple[Tensor, float]]] = {
    "default": default,
    "linear": linear,
    "dynamic": dynamic,
    "yarn": yarn,
    "longrope": longrope,
    "su": longrope,
    "llama3": llama3,
    "proportional": proportional,
}


NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("long_factor", "short_factor"),
    "su": ("long_factor", "short_factor"),
}
"""what a scaling cannot do without"""


def make_rope(parameters: dict[str, Any], theta: float, head_dim: int, max_positions: int, original: int | None) -> Rope:
    """From a configuration's `rope_parameters` (transformers 5) or `rope_scaling` (4), where the type may be called `rope_type` or `type`.
    `theta`: used unless the parameters have their own. `original`: stated outside the parameters, which takes precedence."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in SCALINGS:
        raise StartError(f"rope scaling {kind} is not known", f"known are {', '.join(SCALINGS)}")
    lacking = [name for name in NEEDED.get(kind, ()) if parameters.get(name) is None]
    if lacking:
        raise StartError(f"rope scaling {kind} lacks {', '.join(lacking)}", "fetch the model's config.json again")
    partial = 1.0 if kind == "proportional" else parameters.get("partial_rotary_factor") or 1.0
    return Rope(
        kind=kind,
        theta=float(parameters.get("rope_theta") or theta),
        dims=int(head_dim * partial),
        head_dim=head_dim,
        max_positions=max_positions,
        original=original or parameters.get("original_max_position_embeddings") or max_positions,
        parameters={name: value for name, value in parameters.items() if value is not None},
    )
