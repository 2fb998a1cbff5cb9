"""The native CPU kernels against what the machine can do: `python -m forerun.bench.kernels`.

    products   all products of one step of a model, for 1 … 64 rows, as times the reading of its weights
    step       the whole recorded forward on random weights of that shape: decode, verify, batches, prefill
    python     what one replay costs outside of the kernels
    neighbour  the step while another process keeps one core busy, over the quiet step

The floor of a step is its weight bytes over the read bandwidth measured in the same run, on as many threads; the floor of a prefill is its
multiplications over the rate measured on operands that stay in cache. A busy machine spoils every figure: the least of many is printed,
and how much processor time others took.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from forerun.backends.base import AttentionSpec, Backend, Pool, PoolSpec, Weight
from forerun.backends.cpu.backend import NativeCpu, open_native
from forerun.backends.cpu.regions import huge_pages
from forerun.engine.batch import Batch
from forerun.engine.models.model import Output
from forerun.kernels import quant


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decoder: SmolLM2-135M unless said otherwise."""

    layers: int = 30
    hidden: int = 576
    inner: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152

    def matrices(self) -> list[tuple[int, int]]:
        wide = (self.heads + 2 * self.kv_heads) * self.head_dim
        layer = [(wide, self.hidden), (self.hidden, self.heads * self.head_dim), (2 * self.inner, self.hidden), (self.hidden, self.inner)]
        return layer * self.layers

    def layer_products(self) -> int:
        """Multiplications of a row in all layers."""
        return sum(rows * columns for rows, columns in self.matrices())


SHAPES = {
    "135m": Shape(),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128256),
    "tiny": Shape(4, 256, 512, 4, 2, 64, 4096),
}


class Model:
    """Random weights in a shape, with the decoder's ops in its order."""

    def __init__(self, shape: Shape, backend: Backend, format: str, positions: int) -> None:
        self.shape, self.ops = shape, backend.ops
        self.spec = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)

        def draw(rows: int, columns: int, format: str) -> Weight:
            return backend.pack(torch.randn(rows, columns) / columns**0.5, format)

        self.weights = [draw(*matrix, format) for matrix in shape.matrices()]
        self.head = draw(shape.vocab, shape.hidden, "int8" if format.startswith("int4") else format)  # as --quantize int4 has it
        self.bytes = self.head.bytes + sum(weight.bytes for weight in self.weights)
        self.table = torch.randn(1000, shape.hidden)
        self.tables = {columns: torch.randn(1000, columns) for columns in {weight.shape[1] for weight in self.weights} | {shape.hidden}}
        self.one = torch.ones(shape.hidden)
        angle = torch.randn(positions, shape.head_dim // 2)
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, batch: Batch, pool: Pool) -> Output:
        ops, spec = self.ops, self.spec
        residual = ops.embed(self.table, batch.tokens)
        x = ops.norm(residual, self.one, 1e-5)
        for layer in range(self.shape.layers):
            qkv, out, gate_up, down = self.weights[4 * layer : 4 * layer + 4]
            y = ops.rope(ops.matmul(x, qkv), batch.positions, self.cos, self.sin, spec)
            ops.write_kv(y, pool, layer, batch.slots, spec)
            x, residual = ops.add_norm(ops.matmul(ops.attention(y, pool, layer, batch, spec), out), residual, self.one, 1e-5)
            x, residual = ops.add_norm(ops.matmul(ops.gate(ops.matmul(x, gate_up), "silu"), down), residual, self.one, 1e-5)
        needed = x if batch.logit_rows.shape[0] == batch.rows else ops.take(x, batch.logit_rows)
        return Output(ops.logits(needed, self.head))

    def products(self, batch: Batch) -> torch.Tensor:
        """Every product of a forward, of rows of tables."""
        inputs = {columns: self.ops.embed(self.tables[columns], batch.tokens) for columns in self.tables}
        for weight in self.weights:
            self.ops.matmul(inputs[weight.shape[1]], weight)
        return self.ops.logits(inputs[self.shape.hidden], self.head)


def batch(segments: int, known: int, context: int, logits: str) -> Batch:
    """`segments` sequences of `known` rows each behind `context` positions. `logits`: of all rows, or of each segment's last."""
    pages = -(-(context + known) // 16)
    row = torch.arange(segments).repeat_interleave(known)
    positions = torch.arange(context, context + known).repeat(segments)
    last = torch.arange(segments) * known + known - 1
    tensors = (
        torch.arange(segments * known) % 1000,
        positions,
        row * pages * 16 + positions,
        torch.full((segments * known,), -1),
        torch.arange(segments + 1) * known,
        torch.full((segments,), known),
        torch.full((segments,), context),
        torch.arange(segments * pages).view(segments, pages),
        torch.arange(segments * known) if logits == "all" else last,
    )
    return Batch(*(tensor.int() for tensor in tensors))


def least(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of as many runs as fit in `seconds`, at least five."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def bandwidth(backend: NativeCpu, count: int, seconds: float) -> float:
    """Bytes a second that memory of the weights' size and kind is read with."""
    memory = huge_pages(count).fill_(1)
    return count / least(lambda: backend.library.read(memory.data_ptr(), count), seconds)


def arithmetic(backend: Backend, format: str, seconds: float) -> float:
    """Multiplications a second on operands in cache."""
    x, weight = torch.randn(192, 512), backend.pack(torch.randn(256, 512), format)
    return 192 * 512 * 256 / least(lambda: backend.ops.matmul(x, weight), seconds)


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that keeps a core busy."""
    child = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    child.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        child.terminate()
        child.join()


def _spin() -> None:
    while True:
        pass


def cpu_seconds() -> tuple[float, float]:
    """Processor seconds of the whole machine since its start, and of this process."""
    with open("/proc/stat") as file:
        fields = [int(value) for value in file.readline().split()[1:9]]
    own = os.times()
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK"), own.user + own.system


def measure(model: Model, backend: NativeCpu, format: str, seconds: float) -> None:
    shape = model.shape
    read, rate = bandwidth(backend, model.bytes, seconds), arithmetic(backend, format, seconds)
    floor = model.bytes / read
    print(
        f"weights {model.bytes / 1e6:.0f} MB, read {read / 1e9:.1f} GB/s: floor {floor * 1e3:.2f} ms; {2 * rate / 1e9:.0f} GFLOP/s in cache"
    )
    print("\nproducts          ms    / floor   / 1 row")
    first = 0.0
    multiply = backend.capture(model.products, None)
    for rows in (1, 2, 4, 8, 12, 16, 24, 32, 64):
        one = batch(1, rows, 0, "all")
        took = least(lambda one=one: multiply(one), seconds)  # type: ignore[misc]
        first = first or took
        print(f"{rows:5d} rows    {took * 1e3:7.2f} {took / floor:8.2f} {took / first:8.2f}")
    pool = backend.pool(PoolSpec(shape.layers, shape.kv_heads, shape.head_dim, torch.bfloat16), 400)
    run = backend.capture(lambda one: model.forward(one, pool), None)
    print("\nstep                    ms    / floor   / 1 row   tokens/s")
    cases = [("decode", n, 1, 100, "all") for n in (1, 4, 8, 16)] + [("verify", 1, n, 100, "all") for n in (2, 4, 8, 16)]
    cases += [("decode at 1000", 1, 1, 1000, "all")]
    single = 0.0
    for name, segments, known, context, logits in cases:
        one = batch(segments, known, context, logits)
        took = least(lambda one=one: run(one), seconds)  # type: ignore[misc]
        single = single or took
        rows = segments * known
        print(f"{name:15s}{rows:3d}  {took * 1e3:7.2f} {took / floor:8.2f} {took / single:8.2f} {rows / took:10.0f}")
    print("\nprefill                 ms    / floor   tokens/s")
    for tokens in (64, 512):
        one = batch(1, tokens, 0, "last")
        took = least(lambda one=one: run(one), seconds)  # type: ignore[misc]
        limit = max(floor, (tokens * shape.layer_products() + shape.vocab * shape.hidden) / rate)
        print(f"{tokens:6d} tokens     {took * 1e3:7.1f} {took / limit:8.2f} {tokens / took:10.0f}")
    with neighbour():
        one = batch(1, 1, 100, "all")
        times = [least(lambda: run(one), 0.0) for _ in range(20)]
        print(f"\ndecode of one row beside a busy process: {sorted(times)[10] / single:.2f} times the quiet step")


def python_share(backend: Backend) -> float:
    """Seconds that a replay costs when its ops cost nothing."""
    table, weight = torch.ones(4, 4), torch.ones(4)
    run = backend.capture(lambda one: backend.ops.norm(backend.ops.embed(table, one.tokens), weight, 1e-6), None)
    one = batch(1, 1, 1, "all")
    return least(lambda: run(one), 0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="135m", help="shape of the model; weights are random")
    parser.add_argument("--format", choices=("bf16", "f32", *quant.FORMATS), default="bf16")
    parser.add_argument("--threads", type=int, nargs="+", default=[0], help="0 = as the server chooses")
    parser.add_argument("--isa", default="", help="an instruction set instead of the best")
    parser.add_argument("--seconds", type=float, default=1.0, help="a figure")
    options = parser.parse_args()
    torch.manual_seed(0)
    for threads in options.threads:
        backend = open_native(threads, 1.0, options.isa)
        before = cpu_seconds()
        print(f"\n== {options.model} {options.format}, {', '.join(f'{key} {value}' for key, value in backend.facts().items())}")
        model = Model(SHAPES[options.model], backend, options.format, 4096)
        measure(model, backend, options.format, options.seconds)
        print(f"a replay costs {python_share(backend) * 1e6:.0f} µs outside of the kernels")
        after = cpu_seconds()
        foreign = (after[0] - before[0]) - (after[1] - before[1])
        print(f"others took {foreign:.0f} s of processor time meanwhile")


if __name__ == "__main__":
    main()
