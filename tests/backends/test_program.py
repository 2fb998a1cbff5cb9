"""Recording and replaying: the same bits as calling op by op, for every size, and an honest refusal of what cannot be replayed."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.backends.base import AttentionSpec, Backend, Pool
from forerun.backends.cpu.backend import open_cpu
from forerun.engine.batch import Batch, empty_batch

from .cases import Case, Segment, int32, make_case, segments
from .contract import random, same

SPEC = AttentionSpec(4, 2, 16, 0.25)
HIDDEN, VOCAB = 24, 61


@pytest.fixture(scope="module")
def cpu() -> Backend:
    backend = open_cpu(1, 1.0)
    if not backend.caps.graphs:
        pytest.skip("no native kernels here")
    return backend


@dataclasses.dataclass
class Out:
    logits: Tensor
    taps: Tensor | None
    extra: tuple[int, list[Tensor]]


class Toy:
    """Two layers, with and without logits."""

    def __init__(self, backend: Backend) -> None:
        self.ops = backend.ops
        self.table = random(0, 50, HIDDEN)
        self.weights = [
            [
                backend.pack(random(i * 9 + j, *shape) / 5, "f32")
                for j, shape in enumerate([(128, HIDDEN), (HIDDEN, 64), (60, HIDDEN), (HIDDEN, 30)])
            ]
            for i in range(2)
        ]
        self.norm = random(4, HIDDEN)
        self.head = backend.pack(random(5, VOCAB, HIDDEN), "bf16")
        angle = random(6, 400, 8)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.calls = 0

    def forward(self, batch: Batch, pool: Pool) -> Out:
        self.calls += 1
        ops = self.ops
        residual = ops.embed(self.table, batch.tokens)
        x = ops.norm(residual, self.norm, 1e-6)
        taps = []
        for layer, (qkv, out, up, down) in enumerate(self.weights):
            y = ops.matmul(x, qkv)
            ops.rope(y, batch.positions, self.cos, self.sin, SPEC)
            ops.write_kv(y, pool, layer, batch.slots, SPEC)
            x, residual = ops.add_norm(ops.matmul(ops.attention(y, pool, layer, batch, SPEC), out), residual, self.norm, 1e-6)
            x, residual = ops.add_norm(ops.matmul(ops.gate(ops.matmul(x, up), "silu"), down), residual, self.norm, 1e-6)
            taps.append(residual)
        needed = x if batch.logit_rows.shape[0] == batch.rows else ops.take(x, batch.logit_rows)
        logits = ops.logits(needed, self.head) if needed.shape[0] else torch.empty(0, VOCAB)
        return Out(logits, ops.concat(taps), (7, [residual, logits]))


def toy_case(backend: Backend, parts: list[Segment], seed: int, logit_rows: list[int]) -> Case:
    case = make_case(backend, parts, SPEC, torch.bfloat16, seed, written=False)
    for layer in range(2):  # every context position written, everywhere
        case.pool.keys[layer].copy_(random(seed, *case.pool.keys.shape[1:]))
        case.pool.values[layer].copy_(random(seed + 1, *case.pool.values.shape[1:]))
    rows = case.batch.rows
    case.batch.logit_rows = int32(sorted({row % rows for row in logit_rows}))
    return case


def compare(left: Out, right: Out) -> None:
    same(left.logits, right.logits)
    assert left.taps is not None and right.taps is not None
    same(left.taps, right.taps)
    assert left.extra[0] == right.extra[0] == 7
    for a, b in zip(left.extra[1], right.extra[1]):
        same(a, b)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    runs=st.lists(
        st.tuples(
            st.lists(segments(most_context=40, most_known=30, long=False), min_size=1, max_size=4), st.lists(st.integers(0, 99), max_size=5)
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 1000),
)
def test_a_replay_is_the_function(cpu: Backend, runs: list[tuple[list[Segment], list[int]]], seed: int) -> None:
    """One captured function, batches of all sizes one after the other: results and KV equal those of plain calls. Earlier results stay."""
    toy = Toy(cpu)
    case = toy_case(cpu, runs[0][0], seed, runs[0][1])
    pool = cpu.pool(case.pool.spec, 64)
    captured = cpu.capture(lambda batch: toy.forward(batch, pool), None)
    kept: list[tuple[Out, Out]] = []
    for parts, logit_rows in runs:
        case = toy_case(cpu, parts, seed, logit_rows)
        pages = case.pool.keys.shape[1]
        for mine, given_ in ((pool.keys, case.pool.keys), (pool.values, case.pool.values)):
            mine[:, :pages].copy_(given_)
        expected = toy.forward(case.batch, case.pool)
        actual = captured(case.batch)
        same(pool.keys[:, :pages].clone(), case.pool.keys.clone())
        same(pool.values[:, :pages].clone(), case.pool.values.clone())
        kept.append((actual, expected))
    for actual, expected in kept:
        compare(actual, expected)


def test_it_is_recorded_once_a_kind(cpu: Backend) -> None:
    toy = Toy(cpu)
    case = toy_case(cpu, [Segment(20, 9, (-1, 0))], 3, [4])
    captured = cpu.capture(lambda batch: toy.forward(batch, case.pool), case.batch)
    assert toy.calls == 1
    for _ in range(3):
        captured(case.batch)
    assert toy.calls == 1, "some rows have logits"
    for rows in ([], list(range(11))):
        case.batch.logit_rows = int32(rows)
        for _ in range(3):
            captured(case.batch)
    assert toy.calls == 3, "no rows have logits, and all do"


def test_results_share_no_memory_with_later_replays(cpu: Backend) -> None:
    toy = Toy(cpu)
    case = toy_case(cpu, [Segment(20, 9)], 3, [4])
    captured = cpu.capture(lambda batch: toy.forward(batch, case.pool), case.batch)
    first = captured(case.batch)
    before = first.logits.clone()
    case.batch.tokens[:] = 7
    captured(case.batch)
    same(first.logits, before)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda toy, batch: toy.ops.norm(toy.ops.embed(toy.table, batch.tokens) * 2, toy.norm, 1e-6),
        lambda toy, batch: toy.ops.embed(toy.table, batch.tokens + 1),
        lambda toy, batch: toy.ops.embed(toy.table, batch.tokens, float(batch.positions[0].item())),
        lambda toy, batch: toy.ops.norm(toy.table, toy.norm, 1e-6),
        lambda toy, batch: batch.positions,
        lambda toy, batch: toy.norm,
    ],
    ids=["a torch operator", "an operator on the batch", "a value read back", "rows of a constant", "a field", "a constant"],
)
def test_what_cannot_be_replayed_is_called_each_time(cpu: Backend, spoil: Callable[[Toy, Batch], Tensor]) -> None:
    toy = Toy(cpu)
    captured = cpu.capture(lambda batch: spoil(toy, batch), None)
    for seed in range(3):
        batch = toy_case(cpu, [Segment(seed, 3 + seed)], seed, []).batch
        same(captured(batch), spoil(toy, batch))


def test_an_error_of_the_function_is_the_callers(cpu: Backend) -> None:
    """And ops work as before."""

    def fail(batch: Batch) -> Tensor:
        cpu.ops.embed(torch.ones(3, 4), batch.tokens)
        raise KeyError("mine")

    captured = cpu.capture(fail, None)
    with pytest.raises(KeyError):
        captured(dataclasses.replace(empty_batch(), tokens=int32([1])))
    assert cpu.ops.add(torch.ones(2, 3), torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2


def test_the_arena_is_small(cpu: Backend) -> None:
    """Buffers of results whose lives do not overlap are shared: the layers of a deep model add nothing."""
    toy = Toy(cpu)
    case = toy_case(cpu, [Segment(20, 9)], 3, [4])
    places = []
    for depth in (2, 40):
        deep = Toy(cpu)
        deep.weights = toy.weights[:1] * depth

        def forward(batch: Batch, deep: Toy = deep) -> Tensor:
            residual = deep.ops.embed(deep.table, batch.tokens)
            for qkv, out, *_ in deep.weights:
                y = deep.ops.matmul(residual, qkv)
                _, residual = deep.ops.add_norm(
                    deep.ops.matmul(deep.ops.attention(y, case.pool, 0, batch, SPEC), out), residual, deep.norm, 1e-6
                )
            return residual

        captured = cpu.capture(forward, case.batch)
        captured(case.batch)
        (program,) = captured._programs.values()  # type: ignore[attr-defined]
        places.append(len(program._buffers))
    assert places[0] == places[1]


def test_a_replay_costs_python_little(cpu: Backend) -> None:
    """Far below 100 µs a step: nothing is done op by op."""
    captured = cpu.capture(lambda batch: cpu.ops.norm(cpu.ops.embed(table, batch.tokens), weight, 1e-6), None)
    table, weight = torch.ones(4, 4), torch.ones(4)
    batch = dataclasses.replace(empty_batch(), tokens=int32([1]))
    captured(batch)
    gc.collect()
    times = []
    for _ in range(300):
        begin = time.thread_time_ns()
        captured(batch)
        times.append(time.thread_time_ns() - begin)
    assert min(times) < 60_000
