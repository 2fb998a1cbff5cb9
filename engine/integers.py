"""Checkpoints of GPTQ and AWQ: 4-bit integers in int32 words, as `Codes`.

    GPTQ    qweight [K/8, N]: eight k in a word, the first in the lowest bits
            qzeros  [groups, N/8]: eight columns in a word; holds zero − 1 (in "gptq_v2" zero itself)
    AWQ     qweight [K, N/8], qzeros [groups, N/8]: eight columns in a word, in the order 0 2 4 6 1 3 5 7 from the lowest bits up
    both    scales  [groups, N] float16;    w = scale · (code − zero)

Groups of 64 and more become groups of 32 that repeat their scale. Where every zero is 8 the format is symmetric and exact; else minima are
−scale · zero, rounded to float16. Follows the layouts of AutoGPTQ and AutoAWQ. Does not know what a tensor is for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.engine.errors import StartError
from forerun.engine.weights import Checkpoint
from forerun.kernels import quant
from forerun.kernels.quant import GROUP, Codes

PARTS = ("qweight", "qzeros", "scales", "g_idx")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word, counted from the lowest, hold its columns 0 … 7."""
UNQUANTISED = "use the unquantised checkpoint of this model, with --quantize int4 for 4-bit weights"


class Integers:
    """A checkpoint in which `X.weight` stands for `X.qweight` and its companions. `settings`: config.json's `quantization_config`."""

    config: dict[str, Any] | None = None

    def __init__(self, inner: Checkpoint, settings: dict[str, Any]) -> None:
        self.inner = inner
        self.method = str(settings.get("quant_method", "")).lower()
        self.group = int(settings.get("group_size", settings.get("q_group_size", 128)))
        self.one_more = settings.get("checkpoint_format", "gptq") != "gptq_v2"
        refuse_settings(self.method, self.group, settings)
        everything = inner.names()
        self.stems = {name.removesuffix(".qweight") for name in everything if name.endswith(".qweight")}
        hidden = {f"{stem}.{part}" for stem in self.stems for part in PARTS}
        self.own = (everything - hidden) | {f"{stem}.weight" for stem in self.stems}

    def names(self) -> set[str]:
        return self.own

    def shape(self, name: str) -> tuple[int, ...]:
        stem = name.removesuffix(".weight")
        if stem not in self.stems:
            return self.inner.shape(name)
        rows, columns = self.inner.shape(f"{stem}.qweight")
        return (columns, rows * 8) if self.method == "gptq" else (columns * 8, rows)

    def read(self, name: str) -> Tensor:
        codes = self.codes(name)
        return self.inner.read(name) if codes is None else quant.expand(codes)

    def codes(self, name: str) -> Codes | None:
        stem = name.removesuffix(".weight")
        if stem not in self.stems:
            return self.inner.codes(name)
        columns = self.shape(name)[1]
        scales = self.inner.read(f"{stem}.scales").float().T
        group = self.group if self.group > 0 else columns
        if columns % GROUP or group % GROUP or scales.shape[1] != -(-columns // group):
            raise StartError(f"{stem}: {scales.shape[1]} scales for {columns} inputs in groups of {group}", UNQUANTISED)
        self.refuse_order(stem, columns, group)
        words, zeros = self.inner.read(f"{stem}.qweight"), self.inner.read(f"{stem}.qzeros")
        if self.method == "gptq":
            codes, zero = spread(words.T, range(8)), spread(zeros, range(8)).T + int(self.one_more)
        else:
            codes, zero = spread(words, AWQ_ORDER).T, spread(zeros, AWQ_ORDER).T
        scales, zero = (part.repeat_interleave(group // GROUP, 1)[:, : columns // GROUP] for part in (scales, zero))
        if (zero == 8).all():
            return Codes("int4-symmetric", codes.contiguous(), torch.ones(codes.shape[0]), scales.half())
        return quant.affine(codes.contiguous(), scales, -scales * zero)

    def refuse_order(self, stem: str, columns: int, group: int) -> None:
        """g_idx: the group of each input. Anything but ascending order needs activations to be gathered for every product."""
        name = f"{stem}.g_idx"
        if name in self.inner.names() and not torch.equal(self.inner.read(name).long(), torch.arange(columns) // group):
            raise StartError(f"{stem} was quantised in the order of activations", "use a GPTQ checkpoint made with desc_act=False")

    def release(self) -> None:
        self.inner.release()


def spread(words: Tensor, order: range | tuple[int, ...]) -> Tensor:
    """int32 [a, b] → int8 [a, 8·b]: the eight codes of each word, taken in this order of their places."""
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32)
    return ((words.unsqueeze(2) >> shifts) & 15).to(torch.int8).flatten(1)


def refuse_settings(method: str, group: int, settings: dict[str, Any]) -> None:
    bits = settings.get("bits", settings.get("w_bit", 4))
    if method not in ("gptq", "awq"):
        raise StartError(f"the checkpoint is quantised ({method or 'unknown'})", UNQUANTISED)
    if bits != 4:
        raise StartError(f"the checkpoint has {method.upper()} weights of {bits} bits; 4 are read", UNQUANTISED)
    form = settings.get("checkpoint_format", "gptq") if method == "gptq" else settings.get("version", "gemm")
    if str(form).lower() not in ("gptq", "gptq_v2", "gemm"):
        raise StartError(
            f"the checkpoint is laid out for {form}", f"use a {method.upper()} checkpoint in its plain form, or {UNQUANTISED[4:]}"
        )
    if group % GROUP and group != -1:
        raise StartError(f"the checkpoint has groups of {group}; multiples of {GROUP} are read", UNQUANTISED)
