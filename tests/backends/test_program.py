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
from forerun.backends.cpu.backend import NativeCpu, open_cpu, open_native
from forerun.backends.cpu.library import KernelError
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


@dataclasses.dataclass
class Chain:
    """A norm, a product of heads, their rotation and their entries; a product of gate and up and its activation; an addition, a norm and a
    product whose result has the width of what is added; the same and an MLP: what a program of the whole may do in one pass."""

    spec: AttentionSpec
    weight: str
    kv: torch.dtype
    norms: str
    inner: int
    bias: bool

    def function(self, backend: Backend, pool: Pool) -> Callable[[Batch], tuple[Tensor, ...]]:
        ops, spec = backend.ops, self.spec
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        table, norm = random(1, 50, HIDDEN), random(2, HIDDEN)
        qkv, up = (backend.pack(random(seed, rows, HIDDEN) / 5, self.weight) for seed, rows in ((3, width), (4, 2 * self.inner)))
        both = backend.pack(random(11, 2 * self.inner, HIDDEN) / 5, self.weight, halves=True)
        down, last = (backend.pack(random(seed, HIDDEN, columns) / 5, self.weight) for seed, columns in ((9, self.inner), (10, HIDDEN)))
        bias = random(5, width) if self.bias else None
        angle = random(6, 400, spec.head_dim // 2)
        cos, sin = angle.cos(), angle.sin()
        of = {"none": (0, 0), "each": (spec.head_dim, spec.head_dim), "all": (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim)}
        q_norm, k_norm = (random(7 + size % 2, size) if size else None for size in of[self.norms])

        def forward(batch: Batch) -> tuple[Tensor, ...]:
            residual = ops.embed(table, batch.tokens)
            x = ops.norm(residual, norm, 1e-6)
            heads = ops.matmul(x, qkv, bias)
            ops.rope(heads, batch.positions, cos, sin, spec, q_norm, k_norm, 1e-6)
            ops.write_kv(heads, pool, 1, batch.slots, spec)
            x, residual = ops.add_norm(ops.matmul(ops.gate(ops.matmul(x, up), "silu"), down), residual, norm, 1e-6)
            x, residual = ops.add_norm(ops.matmul(x, last), residual, norm, 1e-6)
            return heads, residual, ops.mlp(x, both, down, "silu")

        return forward


@pytest.fixture(scope="module")
def forms() -> list[NativeCpu]:
    """Every instruction set of this machine, with one thread and with three."""
    if not open_cpu(1, 1.0).caps.graphs:
        pytest.skip("no native kernels here")
    return [open_native(threads, 1.0, isa) for isa in open_native(1, 1.0).library.isas() for threads in (1, 3)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chain=st.builds(
        Chain,
        st.builds(
            lambda kv, group, size: AttentionSpec(kv * group, kv, size, 0.1),
            st.integers(1, 3),
            st.integers(1, 3),
            st.sampled_from([16, 32, 64, 96]),
        ),
        st.sampled_from(["f32", "bf16", "int8", "int4"]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
        st.sampled_from(["none", "each", "all"]),
        st.sampled_from([30, 32, 96, 416]),
        st.booleans(),
    ),
    known=st.sampled_from([1, 2, 5, 8, 13, 30, 90, 1000]),
    form=st.integers(0, 99),
)
def test_neighbours_that_run_together_make_the_same_bits(forms: list[NativeCpu], chain: Chain, known: int, form: int) -> None:
    """Whether an op passes its columns on to the next one or waits for all of them: results and KV of a program and of single calls."""
    cpu = forms[form % len(forms)]
    case = make_case(cpu, [Segment(17, known)], chain.spec, chain.kv, 0, written=False)
    spec = dataclasses.replace(case.pool.spec, layers=2)
    pools = [cpu.pool(spec, case.pool.keys.shape[1]) for _ in range(2)]
    batch = dataclasses.replace(case.batch, tokens=case.batch.tokens % 50, positions=case.batch.positions % 400)
    expected = chain.function(cpu, pools[0])(batch)
    captured = cpu.capture(chain.function(cpu, pools[1]), batch)
    for pool in pools[1:]:
        pool.keys.zero_(), pool.values.zero_()
    for mine, other in zip(captured(batch), expected):
        same(mine, other)
    same(pools[1].keys.contiguous(), pools[0].keys.contiguous())
    same(pools[1].values.contiguous(), pools[0].values.contiguous())
    if chain.kv == torch.int8:
        for one, two in ((pools[0].key_scales, pools[1].key_scales), (pools[0].value_scales, pools[1].value_scales)):
            assert one is not None and two is not None
            same(one.contiguous(), two.contiguous())


@pytest.mark.parametrize("field", ["slots", "positions"])
def test_neighbours_are_refused_before_anything_is_written(forms: list[NativeCpu], field: str) -> None:
    cpu, chain = forms[0], Chain(AttentionSpec(4, 2, 64, 0.1), "f32", torch.float32, "none", 32, False)
    case = make_case(cpu, [Segment(17, 5)], chain.spec, chain.kv, 0, written=False)
    pool = cpu.pool(dataclasses.replace(case.pool.spec, layers=2), case.pool.keys.shape[1])
    batch = dataclasses.replace(case.batch, tokens=case.batch.tokens % 50)
    captured = cpu.capture(chain.function(cpu, pool), batch)
    pool.keys.zero_(), pool.values.zero_()
    for value in (-1, 1 << 20):
        spoilt = getattr(batch, field).clone()
        spoilt[3] = value
        with pytest.raises(KernelError, match="out of range"):
            captured(dataclasses.replace(batch, **{field: spoilt}))
        assert not pool.keys.any() and not pool.values.any()


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
