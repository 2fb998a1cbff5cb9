"""Checkpoints of GPTQ and AWQ: integers in int32 words, as `Codes`.

    GPTQ    qweight [K/p, N], p = 32 / bits: the first k in the lowest bits
            qzeros  [groups, N/p]: p columns in a word; holds zero − 1 modulo 2^bits (in "gptq_v2" zero itself)
            g_idx   [K]: the group of each k; k // group where there is none
    AWQ     qweight [K, N/8], qzeros [groups, N/8]: eight columns in a word, in the order 0 2 4 6 1 3 5 7 from the lowest bits up
    both    scales  [groups, N];    w = scale · (code − zero)

Groups of 64 and more become groups of 32 that repeat their scale. Codes of 4 bits stay as they are: where every zero is 8 the format is
symmetric and exact; else minima are −scale · zero, rounded to float16. Codes of 8 bits stay where every zero is 128, and are made anew
(groups of 32) where not. Follows the layouts of AutoGPTQ and AutoAWQ, and TGI's in where their settings are kept. Does not know what a
tensor is for.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.engine.errors import StartError
from forerun.engine.weights import Checkpoint
from forerun.kernels import quant
from forerun.kernels.quant import GROUP, Codes

PARTS = ("qweight", "qzeros", "scales", "g_idx")
NOTES = ("gptq_bits", "gptq_groupsize", "gptq_sym")
"""Tensors in which TGI's own `quantize` command leaves its settings."""
FILES = ("quantize_config.json", "quant_config.json")
"""Where AutoGPTQ and AutoAWQ keep theirs beside, or instead of, config.json."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word, counted from the lowest, hold its columns 0 … 7."""
UNQUANTISED = "use the unquantised checkpoint of this model, with --quantize int4 for 4-bit weights"


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint is quantised. `group`: inputs that share a scale, −1 = all; `added`: what was taken from a zero before it was
    stored."""

    method: str
    bits: int = 4
    group: int = 128
    added: int = 0


def settings_of(folder: Path, config: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What the checkpoint says of its quantisation: in config.json, else in a file of its own, else in tensors. None: nothing."""
    inner = config.get("text_config") or {}
    found: dict[str, Any] | None = config.get("quantization_config") or inner.get("quantization_config")
    names = checkpoint.names()
    if found or not any(name.endswith(".qweight") for name in names):
        return found
    for name in FILES:
        if (folder / name).is_file():
            method = "gptq" if name == FILES[0] else "awq"
            kept: dict[str, Any] = json.loads((folder / name).read_text())
            return {"quant_method": method} | kept
    if {"gptq_bits", "gptq_groupsize"} <= names:
        bits, group = (int(checkpoint.read(name)) for name in NOTES[:2])
        return {"quant_method": "gptq", "bits": bits, "group_size": group}
    raise StartError("the weights are packed integers, but nothing says how", f"add the model's {FILES[0]}, or fetch the model again")


def read_scheme(settings: dict[str, Any]) -> Scheme:
    """StartError for what is not read."""
    method = str(settings.get("quant_method", "")).lower()
    if method not in ("gptq", "awq"):
        raise StartError(f"the checkpoint is quantised ({method or 'unknown'})", UNQUANTISED)
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits != 4 and not (bits == 8 and method == "gptq"):
        raise StartError(f"the checkpoint has {method.upper()} weights of {bits} bits; 4 are read, and 8 of GPTQ", UNQUANTISED)
    form = (settings.get("checkpoint_format") or "gptq") if method == "gptq" else (settings.get("version") or "gemm")
    form = str(form).lower()
    if form not in ("gptq", "gptq_v2", "gemm"):
        raise StartError(
            f"the checkpoint is laid out for {form}", f"use a {method.upper()} checkpoint in its plain form, or {UNQUANTISED[4:]}"
        )
    if any(not str(rule).startswith("-") for rule in settings.get("dynamic") or ()):
        raise StartError("the checkpoint has other bits or groups for some modules (`dynamic`)", UNQUANTISED)
    group = int(settings.get("group_size", settings.get("q_group_size", 128)) or -1)
    if group % GROUP and group != -1:
        raise StartError(f"the checkpoint has groups of {group}; multiples of {GROUP} are read", UNQUANTISED)
    return Scheme(method, bits, group, int(form == "gptq"))


class Integers:
    """A checkpoint in which `X.weight` stands for `X.qweight` and its companions. `remake`: matrices whose groups are out of order are
    read as numbers, to be quantised anew; otherwise they are refused."""

    config: dict[str, Any] | None = None

    def __init__(self, inner: Checkpoint, scheme: Scheme, remake: bool = False) -> None:
        self.inner = inner
        self.scheme = scheme
        self.remake = remake
        everything = inner.names()
        self.stems = {name.removesuffix(".qweight") for name in everything if name.endswith(".qweight")}
        hidden = {f"{stem}.{part}" for stem in self.stems for part in PARTS} | set(NOTES)
        self.own = (everything - hidden) | {f"{stem}.weight" for stem in self.stems}

    def names(self) -> set[str]:
        return self.own

    def shape(self, name: str) -> tuple[int, ...]:
        stem = name.removesuffix(".weight")
        if stem not in self.stems:
            return self.inner.shape(name)
        rows, columns = self.inner.shape(f"{stem}.qweight")
        each = 32 // self.scheme.bits
        return (columns, rows * each) if self.scheme.method == "gptq" else (columns * each, rows)

    def read(self, name: str) -> Tensor:
        stem = name.removesuffix(".weight")
        if stem not in self.stems:
            return self.inner.read(name)
        codes, scales, zeros = self.parts(stem)
        groups = self.order(stem, codes.shape[1], scales.shape[1])
        return scales[:, groups] * (codes - zeros[:, groups])

    def codes(self, name: str) -> Codes | None:
        stem = name.removesuffix(".weight")
        if stem not in self.stems:
            return self.inner.codes(name)
        codes, scales, zeros = self.parts(stem)
        columns = codes.shape[1]
        group = columns if self.scheme.group < 0 else self.scheme.group
        if not torch.equal(self.order(stem, columns, scales.shape[1]), torch.arange(columns) // group):
            if self.remake:
                return None
            raise StartError(
                f"{stem} was quantised in the order of activations (desc_act)",
                "use a GPTQ checkpoint made with desc_act=False, or --quantize int8, which makes 8-bit weights of this one",
            )
        if self.scheme.bits == 8 and not (zeros == 128).all():
            return quant.quantize(self.read(name), "int8-groups")
        scales, zeros = (part.repeat_interleave(group // GROUP, 1)[:, : columns // GROUP] for part in (scales, zeros))
        if self.scheme.bits == 8:
            return quant.grouped("int8-groups", codes - 128, scales)
        if (zeros == 8).all():
            return quant.grouped("int4-symmetric", codes, scales)
        return quant.grouped("int4", codes, scales, -scales * zeros)

    def parts(self, stem: str) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int16 [N, K], scales float32 [N, groups], zeros int16 [N, groups]."""
        scheme, columns = self.scheme, self.shape(f"{stem}.weight")[1]
        words, packed, scales = (self.part(stem, part) for part in PARTS[:3])
        group = columns if scheme.group < 0 else scheme.group
        if columns % GROUP or scales.shape[0] != -(-columns // group):
            raise StartError(f"{stem}: {scales.shape[0]} scales for {columns} inputs in groups of {group}", UNQUANTISED)
        if scheme.method == "awq":
            codes, zeros = spread(words, 4, AWQ_ORDER).T, spread(packed, 4, AWQ_ORDER)
        else:
            codes, zeros = spread(words.T, scheme.bits), spread(packed, scheme.bits) + scheme.added & (1 << scheme.bits) - 1
        return codes.contiguous(), scales.float().T, zeros.T

    def part(self, stem: str, part: str) -> Tensor:
        name = f"{stem}.{part}"
        if name not in self.inner.names():
            raise StartError(f"the checkpoint lacks {name}, which goes with {stem}.qweight", "fetch the model again")
        return self.inner.read(name)

    def order(self, stem: str, columns: int, groups: int) -> Tensor:
        """The group of each input."""
        if f"{stem}.g_idx" not in self.inner.names():
            return torch.arange(columns) // (columns if self.scheme.group < 0 else self.scheme.group)
        order = self.inner.read(f"{stem}.g_idx").long()
        if order.shape != (columns,) or int(order.min()) < 0 or int(order.max()) >= groups:
            raise StartError(f"{stem}.g_idx does not fit {columns} inputs in {groups} groups", "fetch the model again")
        return order

    def release(self) -> None:
        self.inner.release()


def spread(words: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """int32 [a, b] → int16 [a, b · 32/bits]: the codes of each word, from the lowest bits up or in this order of their places."""
    shifts = torch.tensor([bits * place for place in order or range(32 // bits)], dtype=torch.int32)
    return ((words.unsqueeze(2) >> shifts) & (1 << bits) - 1).to(torch.int16).flatten(1)
