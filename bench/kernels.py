"""The native CPU kernels against what the machine can do: `python -m forerun.bench.kernels`.

    step      a decode step of SmolLM2-135M's shape, verify steps, a long context, what Python adds, a busy neighbour
    rows      step time against 1 … 64 rows, between the two floors (the picture of --plot)
    prompt    prefill of 512 tokens, the first token of 57, decoding at batch 16, in this process
    sizes     a model of 1B class, far larger than the cache, and one that a core's own cache holds
    codes     weights of 8 and 4 bits
    torch     every product by itself, beside torch's own linear layers

A step is one recorded forward on random weights and the pick of a token. Its memory floor is its weight bytes over the read bandwidth
measured in the same rounds, on as many threads; its arithmetic floor is its multiplications over the rate measured on operands that stay
in cache. Figures are medians, and ratios medians of the ratios of each round, in which everything runs once, so that the machine's
changing speed cancels. A busy machine spoils them: the last line says how much processor time others took. Bars that depend on how fast a
machine multiplies beside how fast it reads are given as multiples of its limit too (`limits.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forerun.backends.base import Draws, PoolSpec
from forerun.backends.cpu.backend import NativeCpu, open_native
from forerun.bench import kernels_torch, plots
from forerun.bench.bars import Bar, present
from forerun.bench.cli import machine
from forerun.bench.clock import Rounds, Work, arithmetic, cpu_seconds, in_turns, least, median, neighbour, reading
from forerun.bench.limits import Limits, Load, allowed_rows, multiples
from forerun.bench.random_model import SHAPES, Model, Shape, batch
from forerun.kernels import quant

CONTEXT = 100
ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)


@dataclasses.dataclass
class Bench:
    """What parts measure with and leave behind. `seconds`: for a figure."""

    backend: NativeCpu
    seconds: float
    quick: bool
    bars: list[Bar] = dataclasses.field(default_factory=list)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def rate(self) -> float:
        """Multiplications a second of bf16 that stays in cache."""
        return arithmetic(self.backend, "bf16", self.seconds)

    def bar(self, name: str, measured: float, limit: float, note: str, unit: str = "") -> None:
        self.bars.append(Bar(name, measured, "≤", limit, unit, note))


class Steps:
    """A model's recorded step, and how fast this machine reads its weights."""

    def __init__(self, bench: Bench, shape: Shape, format: str) -> None:
        self.backend, self.shape = bench.backend, shape
        self.model = Model(shape, self.backend, format, 4096)
        pool = self.backend.pool(PoolSpec(shape.layers, shape.kv_heads, shape.head_dim, torch.bfloat16), 64 * 8)
        self._run = self.backend.capture(lambda one: self.model.forward(one, pool), None)
        self.read = reading(self.backend, self.model.bytes)

    def step(self, segments: int, known: int, context: int, logits: str = "all") -> Work:
        one = batch(segments, known, context, logits)
        draws = Draws.greedy(len(one.logit_rows))
        return lambda: self.model.choose(self._run(one).hidden, draws)

    def decode(self, rows: int) -> Work:
        return self.step(rows, 1, CONTEXT)

    def load(self, rows: int, logits: int) -> Load:
        return Load(self.model.bytes, rows * self.shape.layer_products() + logits * self.shape.vocab * self.shape.hidden)

    def limits(self, floor: float, rate: float) -> Limits:
        """Of this machine. `floor`: seconds that reading the weights takes."""
        return Limits(self.model.bytes / floor, rate)


def table(title: str, took: Rounds, tokens: dict[str, int]) -> None:
    """Each beside "read", the memory floor, and beside the first one."""
    first = next(iter(tokens))
    print(f"\n{title:24s}     ms    / floor  / first   tokens/s")
    for name, count in tokens.items():
        seconds = took.median(name)
        print(f"{name:22s} {seconds * 1e3:8.3f} {took.ratio(name, 'read'):8.2f} {took.ratio(name, first):8.2f} {count / seconds:10.0f}")


def medians(took: Rounds) -> dict[str, float]:
    return {"floor" if name == "read" else name: took.median(name) for name in took.seconds}


def step(bench: Bench) -> None:
    steps = Steps(bench, SHAPES["135m"], "bf16")
    cases = {f"decode of {n}": (n, 1, CONTEXT) for n in (1, 4, 8, 16)} | {f"verify of {n}": (1, n, CONTEXT) for n in (2, 4, 8, 16)}
    cases["decode at 1000"] = (1, 1, 1000)
    took = in_turns({"read": steps.read} | {name: steps.step(*case) for name, case in cases.items()}, bench.seconds)
    floor, one = took.median("read"), took.median("decode of 1")
    print(f"weights {steps.model.bytes / 1e6:.0f} MB, read with {steps.model.bytes / floor / 1e9:.1f} GB/s: floor {floor * 1e3:.2f} ms")
    table("step", took, {name: case[0] * case[1] for name, case in cases.items()})
    bench.bar("bf16: 1 row / memory floor", took.ratio("decode of 1", "read"), 1.15, f"{one * 1e3:.2f} of {floor * 1e3:.2f} ms")
    for rows, limit in ((8, 1.25), (16, 1.6)):
        beside_one_row(bench, steps, took, "bf16", rows, limit)
    bench.bar("what a replay costs beside the kernels", python_share(bench) * 1e6, 100, "", "µs")
    decode = steps.decode(1)
    with neighbour():
        busy = median(decode, 2 * bench.seconds)
    bench.bar(
        "1 row beside a busy process / quiet",
        busy / one,
        1.25,
        f"{busy * 1e3:.2f} ms; one thread alone reads in {alone(bench, steps):.2f} ×",
    )
    bench.details["step"] = medians(took)


def alone(bench: Bench, steps: Steps) -> float:
    """How much longer a single thread reads the weights than all do: what a neighbour that keeps the others' cores costs at the least."""
    single = open_native(1, 1.0)
    took = in_turns({"all": steps.read, "one": reading(single, steps.model.bytes)}, bench.seconds)
    single.library.close()
    return took.ratio("one", "all")


def beside_one_row(bench: Bench, steps: Steps, took: Rounds, format: str, rows: int, limit: float) -> None:
    seconds, load = took.median(f"decode of {rows}"), steps.load(rows, rows)
    share = multiples(load, seconds, steps.limits(took.median("read"), bench.rate), allowed_rows(load, limit))
    bench.bar(f"{format}: {rows} rows / 1 row", took.ratio(f"decode of {rows}", "decode of 1"), limit, f"{seconds * 1e3:.2f} ms, {share}")


def python_share(bench: Bench) -> float:
    """Seconds that a replay costs when its ops cost nothing."""
    backend, table, weight = bench.backend, torch.ones(4, 4), torch.ones(4)
    run = backend.capture(lambda one: backend.ops.norm(backend.ops.embed(table, one.tokens), weight, 1e-6), None)
    one = batch(1, 1, 1, "all")
    return least(lambda: run(one), 0.2)


def rows(bench: Bench) -> None:
    steps = Steps(bench, SHAPES["135m"], "bf16")
    counts = ROWS[::3] if bench.quick else ROWS
    took = in_turns({"read": steps.read} | {f"{n} rows": steps.decode(n) for n in counts}, bench.seconds)
    table("rows", took, {f"{n} rows": n for n in counts})
    bench.details["rows"] = {
        "rows": list(counts),
        "seconds": [took.median(f"{n} rows") for n in counts],
        "memory": took.median("read"),
        "arithmetic": [steps.load(n, n).multiplications / bench.rate for n in counts],
    }


def prompt(bench: Bench) -> None:
    """Each beside its limit: the longer one of reading the weights and multiplying in cache."""
    steps = Steps(bench, SHAPES["135m"], "bf16")
    works = {"512": steps.step(1, 512, 0, "last"), "57": steps.step(1, 57, 0, "last"), "16": steps.decode(16)}
    took = in_turns({"read": steps.read} | works, 2 * bench.seconds)
    here = steps.limits(took.median("read"), bench.rate)
    loads = {name: steps.load(int(name), 16 if name == "16" else 1) for name in works}
    print(f"\nthe machine's limits here: {here.bandwidth / 1e9:.1f} GB/s, {2 * here.rate / 1e9:.0f} GFLOP/s")
    bench.details["prompt"] = {}
    for name, what in (("16", "decoding at batch 16"), ("57", "prompt of 57, first token"), ("512", "prefill of 512")):
        seconds, limit = took.median(name), here.seconds(loads[name])
        pace, most = int(name) / seconds, int(name) / limit
        print(f"{what:26s} {seconds * 1e3:7.2f} ms {pace:7.0f} tokens/s, limit {limit * 1e3:7.2f} ms {most:7.0f} tokens/s")
        bench.details["prompt"][name] = {"seconds": seconds, "limit": limit}
    first = took.median("57")
    bench.bar("first token of 57, in-process", first * 1e3, 25, multiples(loads["57"], first, here, 25e-3), "ms")


def sizes(bench: Bench) -> None:
    for name in ("tiny",) if bench.quick else ("tiny", "1b"):
        steps = Steps(bench, SHAPES[name], "bf16")
        took = in_turns(
            {"read": steps.read, **{f"decode of {n}": steps.decode(n) for n in (1, 8, 16)}}, bench.seconds * (3 if name == "1b" else 1)
        )
        table(f"{name}, {steps.model.bytes / 1e6:.1f} MB", took, {f"decode of {n}": n for n in (1, 8, 16)})
        bench.details[name] = medians(took)
        one, floor = took.median("decode of 1"), took.median("read")
        if name == "1b":
            note = f"{one * 1e3:.1f} of {floor * 1e3:.1f} ms"
            bench.bar("1B class, bf16: 1 row / memory floor", took.ratio("decode of 1", "read"), 1.15, note)


def codes(bench: Bench) -> None:
    limits = {"int8": 1.5, "int4": 1.5}
    for format in limits if bench.quick else quant.FORMATS:
        steps = Steps(bench, SHAPES["135m"], format)
        took = in_turns({"read": steps.read, **{f"decode of {n}": steps.decode(n) for n in (1, 4, 8, 16)}}, bench.seconds)
        table(f"{format}, {steps.model.bytes / 1e6:.0f} MB", took, {f"decode of {n}": n for n in (1, 4, 8, 16)})
        bench.details[format] = medians(took)
        if format in limits:
            beside_one_row(bench, steps, took, format, 8, limits[format])


def beside_torch(bench: Bench) -> None:
    pairs = kernels_torch.compare(
        bench.backend, ("tiny", "135m") if bench.quick else ("tiny", "135m", "1b"), bench.seconds / 5, bench.quick
    )
    print(kernels_torch.present(pairs))
    worst = max(pairs, key=lambda pair: pair.ratio)
    bench.bar("slowest product / torch's best", worst.ratio, kernels_torch.EQUAL, f"{worst.name}, {worst.rows} rows")
    bench.details["torch"] = [dataclasses.asdict(pair) for pair in pairs]


PARTS: dict[str, Callable[[Bench], None]] = {
    "step": step,
    "rows": rows,
    "prompt": prompt,
    "sizes": sizes,
    "codes": codes,
    "torch": beside_torch,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS), metavar="PART,…", help=", ".join(PARTS))
    parser.add_argument("--threads", type=int, default=0, help="0 = as the server chooses")
    parser.add_argument("--isa", default="", help="an instruction set instead of the best")
    parser.add_argument("--seconds", type=float, default=1.0, help="for a figure")
    parser.add_argument("--quick", action="store_true", help="less than a minute, rougher, without the model of 1B class")
    parser.add_argument("--plot", action="store_true", help="bench/out/kernels.png: step time against rows")
    parser.add_argument("--out", type=Path, default=Path("bench/out/kernels.json"))
    options = parser.parse_args()
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    torch.manual_seed(0)
    bench = Bench(
        open_native(options.threads, 1.0, options.isa), min(options.seconds, 0.2) if options.quick else options.seconds, options.quick
    )
    facts, before = bench.backend.facts(), cpu_seconds()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    for name in options.only:
        PARTS[name](bench)
    after = cpu_seconds()
    foreign = (after[0] - before[0]) - (after[1] - before[1])
    print("\n" + present(bench.bars, [f"others took {foreign:.0f} s of processor time meanwhile"]))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "facts": facts, "foreign_seconds": foreign, "bars": [dataclasses.asdict(bar) for bar in bench.bars]}
    options.out.write_text(json.dumps(result | {"details": bench.details}, indent=1) + "\n")
    print(f"result: {options.out}")
    if options.plot and "rows" in bench.details:
        picture = options.out.with_suffix(".png")
        plots.roofline(bench.details["rows"], picture, f"SmolLM2-135M's shape, bf16, {facts['threads']} threads")
        print(f"plot: {picture}")


if __name__ == "__main__":
    main()
