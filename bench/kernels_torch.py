"""Single products beside torch's own: `torch.nn.functional.linear` in bf16, and oneDNN's linear with weights that were packed for it.

Weights pass through up to eight copies, so that large matrices come from memory, as they do in a step; small ones of the larger models come
from the last-level cache, and those of the model that fits into a core's own cache stay there. Both sides get as many threads. Ours takes
and gives float32, torch's bf16: that is what each has in a model. Up to eight products in a row are measured, so that our making of
their input, once, counts for little. They are measured in turns, and the least of each one's medians counts: what takes a few microseconds
is spoilt by a single interruption. Between two turns lies a pause, since torch's idle threads spin for a while and would take a core from
ours. Products that take long are measured one by one, so that each has as many turns as any.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from forerun.backends.base import Weight
from forerun.backends.cpu.backend import NativeCpu
from forerun.bench.clock import Work, median
from forerun.bench.random_model import SHAPES, batch
from forerun.engine.batch import Batch

COLD = 96 << 20
"""Bytes of copies that no cache holds, where eight are as many."""
PRODUCTS = 8
LONG = 1 << 31
"""Multiplications of a product that takes so long that nothing is gained by several in a row."""
TURNS, PAUSE = 4, 0.01
"""Medians of each, and seconds before one."""
PASSES = {"tiny": 2}
"""How often all products of a model are measured, once where nothing is said: a bad second spoils all turns of what takes microseconds."""
EQUAL = 1.05
"""A ratio up to here counts as equal: two runs of the same differ by as much."""
NAMES = ("qkv", "out", "gate_up", "down", "head")
ROWS = (1, 2, 4, 8, 16, 64, 512)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of one product. `packed` is None where torch has no oneDNN for bf16."""

    name: str
    rows: int
    ours: float
    linear: float
    packed: float | None

    @property
    def ratio(self) -> float:
        return self.ours / min(self.linear, self.packed or self.linear)


def compare(backend: NativeCpu, models: Sequence[str], seconds: float, quick: bool) -> list[Pair]:
    """Every kind of matrix of these shapes, at every count of rows (the output head has at most 64)."""
    torch.set_num_threads(backend.threads)
    try:
        with torch.inference_mode():
            return [pair for model in models for pair in best(list(_model(backend, model, seconds, quick)) for _ in passes(model, quick))]
    finally:
        torch.set_num_threads(1)


def passes(model: str, quick: bool) -> range:
    return range(1 if quick else PASSES.get(model, 1))


def best(measured: Iterable[Sequence[Pair]]) -> list[Pair]:
    """Of several passes over the same products the least of each side."""
    return [
        dataclasses.replace(
            same[0],
            ours=min(pair.ours for pair in same),
            linear=min(pair.linear for pair in same),
            packed=min((pair.packed for pair in same if pair.packed is not None), default=None),
        )
        for same in zip(*measured)
    ]


def _model(backend: NativeCpu, model: str, seconds: float, quick: bool) -> Iterator[Pair]:
    shape = SHAPES[model]
    for name, (outputs, inputs) in zip(NAMES, shape.kinds()):
        size = 2 * outputs * inputs
        copies = 1 if model == "tiny" else max(1, min(PRODUCTS, COLD // size))
        value = torch.randn(outputs, inputs) / inputs**0.5
        plain = [value.bfloat16().clone() for _ in range(copies)]
        ours = [backend.pack(value, "bf16") for _ in range(copies)]
        for rows in ROWS[::3] if quick else ROWS:
            if name == "head" and rows > 64:
                continue
            calls = 1 if rows * outputs * inputs > LONG else PRODUCTS // copies
            works = _works(backend, ours, plain, rows, calls)
            took = {key: value / (copies * calls) for key, value in least_median(works, seconds).items()}
            yield Pair(f"{model} {name}", rows, took["ours"], took["linear"], took.get("packed"))


def least_median(works: dict[str, Work], seconds: float) -> dict[str, float]:
    """The least of TURNS medians of each: `seconds` for each in all, if it is not long."""
    took = dict.fromkeys(works, float("inf"))
    for _ in range(TURNS):
        for key, work in works.items():
            time.sleep(PAUSE)
            took[key] = min(took[key], median(work, seconds / TURNS))
    return took


def _works(backend: NativeCpu, ours: list[Weight], plain: list[Tensor], rows: int, calls: int) -> dict[str, Work]:
    """All products, `calls` times one after the other."""
    inputs = plain[0].shape[1]
    values, one = torch.randn(1000, inputs), batch(1, rows, 0, "all")
    x = values[:rows].bfloat16()

    def native(given_rows: Batch) -> Tensor:
        product = given = backend.ops.embed(values, given_rows.tokens)
        for weight in ours * calls:
            product = backend.ops.matmul(given, weight)
        return product

    replay = backend.capture(native, None)
    works: dict[str, Work] = {
        "ours": lambda: replay(one),
        "linear": lambda: [torch.nn.functional.linear(x, weight) for weight in plain * calls],
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in plain]
        works["packed"] = lambda: [torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "") for weight in packed * calls]
    return works


def present(pairs: Sequence[Pair]) -> str:
    """A line a product: microseconds of the three, ours over torch's best, the verdict."""
    lines = [f"\n{'product':18s}{'rows':>5}{'ours µs':>10}{'linear':>10}{'packed':>10}{'ratio':>7}"]
    for pair in pairs:
        packed = "" if pair.packed is None else f"{pair.packed * 1e6:.0f}"
        verdict = "faster" if pair.ratio < 1 / EQUAL else "equal" if pair.ratio <= EQUAL else "SLOWER"
        lines.append(
            f"{pair.name:18s}{pair.rows:5d}{pair.ours * 1e6:10.0f}{pair.linear * 1e6:10.0f}{packed:>10}{pair.ratio:7.2f}  {verdict}"
        )
    slower = sum(pair.ratio > EQUAL for pair in pairs)
    return "\n".join([*lines, f"slower than torch: {slower} of {len(pairs)} products"])
