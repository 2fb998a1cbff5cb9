"""The CPU backend keeps the contract in each of its forms: every instruction set that this machine runs, and the reference ops."""

from __future__ import annotations

import functools
import itertools
import logging
import threading

import pytest
import torch

from forerun.backends.base import AttentionSpec, Backend, PoolSpec
from forerun.backends.cpu import backend as module
from forerun.backends.cpu.backend import NativeCpu, open_cpu, open_native, open_torch
from forerun.backends.cpu.library import KernelError
from forerun.backends.registry import open_backend
from forerun.kernels import quant
from forerun.kernels.build import BuildError

from .cases import Segment, int32, make_case
from .contract import Contract, random, same

NATIVE = ["amx", "avx512bf16", "avx512", "avx2", "scalar"]
SPEC = AttentionSpec(6, 2, 64, 0.125, softcap=20.0)
PARTS = [Segment(300, 60, (-1, 0, 0, 2)), Segment(0, 1), Segment(40, 1, (-1, -1))]


@functools.cache
def opened(form: str, threads: int) -> NativeCpu | str:
    try:
        return open_native(threads, 1.0, form)
    except (ValueError, BuildError) as error:
        return str(error)


def native(form: str, threads: int) -> NativeCpu:
    found = opened(form, threads)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(params=[*NATIVE, "torch"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return native(request.param, 2) if request.param != "torch" else open_torch(1.0)


class TestCpu(Contract):
    pass


@pytest.mark.parametrize("form", NATIVE)
@pytest.mark.parametrize("count", [64, 192, (2 << 20) + 64])
def test_what_is_read_is_all_of_it(form: str, count: int) -> None:
    """A floor that leaves something out would be no floor: each 64-bit word counts, in parts of any size."""
    words = torch.arange(1, count // 8 + 1)
    assert native(form, 2).library.read(words.data_ptr(), count) == int(words.sum())


def work(backend: Backend) -> list[torch.Tensor]:
    """Results of ops that are large enough to be shared between threads."""
    case, exact = (make_case(backend, PARTS, SPEC, kind, 5) for kind in (torch.bfloat16, torch.float32))
    x, tall = random(1, 200, 192), random(8, 300, 64)  # tall: rows enough for tasks that have all columns
    results = [backend.ops.attention(case.qkv, case.pool, 1, case.batch, SPEC), backend.ops.noise(3, 4, 70000)]
    for format in ("f32", "bf16", *quant.FORMATS):
        w = backend.pack(random(2, 1000, 192), format)
        results += [backend.ops.matmul(x, w), backend.ops.matmul(x[:3], w), backend.ops.logits(x[:20], w, 0.5, 30.0)]
        results.append(backend.ops.matmul(tall, backend.pack(random(9, 100, 64), format)))
    results += [
        backend.ops.norm(x, random(3, 192), 1e-5),
        backend.ops.gate(x, "silu"),
        backend.ops.pick(random(4, 30, 5000), None).logprobs,
        backend.ops.attention(exact.qkv, exact.pool, 1, exact.batch, SPEC),
    ]
    long = random(6, 20, 1100)  # more than a span of activations
    results += [backend.ops.matmul(long, backend.pack(random(7, 100, 1100), format)) for format in quant.FORMATS]
    return results


@pytest.mark.parametrize("form", NATIVE)
@pytest.mark.parametrize("threads", [2, 3, 9])
def test_the_number_of_threads_changes_nothing(form: str, threads: int) -> None:
    for _ in range(3):
        for one, many in zip(work(native(form, 1)), work(native(form, threads))):
            same(one, many)


@pytest.mark.parametrize("form", NATIVE)
def test_rows_are_the_same_among_any_others(form: str) -> None:
    """Of a weight that no cache of a core holds, whose K is multiplied in parts and ends within one."""
    x, w = random(1, 160, 2081), random(2, 330, 2081)
    packed = {threads: native(form, threads).pack(w, "bf16") for threads in (1, 3)}
    whole = native(form, 1).ops.matmul(x, packed[1])
    for rows, threads in itertools.product((1, 5, 16, 17, 33, 65, 131), packed):
        same(native(form, threads).ops.matmul(x[:rows], packed[threads]), whole[:rows])


def test_tiles_round_as_they_are_said_to() -> None:
    """Even and odd k of 32 apart, each product fused into its addition, then both together, then to the sum; what is subnormal is zero.
    Products of these numbers and their sums are exact in float64, so that each step here is rounded once."""
    backend = native("amx", 1)
    x, w = ((random(seed, *size).clamp(-15, 15) * 64).round() / 64 for seed, size in ((1, (1, 150)), (2, (70, 150))))
    got = backend.ops.matmul(x, backend.pack(w, "bf16"))[0]
    a, b = x.bfloat16().double()[0], w.bfloat16().double()
    total = torch.zeros(70)
    for begin in range(0, 150, 32):
        sides = torch.zeros(2, 70)
        for k in range(begin, min(begin + 32, 150)):
            sides[k % 2] = (sides[k % 2].double() + a[k] * b[:, k]).float()
        total = total + (sides[0] + sides[1])
    same(got, total)
    tiny = backend.pack(torch.tensor([[2.0**-40] * 32, [2.0**-130] * 32]), "bf16")
    assert backend.ops.matmul(torch.full((1, 32), 2.0**-100), tiny).tolist() == [[0.0, 0.0]]
    assert backend.ops.matmul(torch.full((1, 32), 2.0**20), tiny)[0, 1] == 0.0


@pytest.mark.parametrize("form", ["amx", "avx512bf16", "avx512"])
def test_instruction_sets_agree(form: str) -> None:
    """Vectors of 256 and of 512 bits round alike; only dot products of bf16, with weights and with a cache, are another instruction.
    Sums of codes are whole numbers."""
    for index, (wide, narrow) in enumerate(zip(work(native(form, 1)), work(native("avx2", 1)))):
        if form == "avx512" or index not in (0, 6, 7, 8, 9):
            same(wide, narrow)


@pytest.mark.parametrize("form", NATIVE)
@pytest.mark.parametrize("format", quant.FORMATS)
def test_codes_and_numbers_at_their_largest(form: str, format: str) -> None:
    """Where rows are crossed, a code is added to a number of 16 bits."""
    x, w = torch.ones(8, 1100), torch.ones(70, 1100)
    x[3:5], w[40:60] = -1.0, -1.0
    backend = native(form, 1)
    torch.testing.assert_close(backend.ops.matmul(x, backend.pack(w, format)), x @ w.T, rtol=1e-3, atol=0.0)


def test_threads_that_outnumber_the_cores_neither_hang_nor_err() -> None:
    backend = native("", 16)
    x, w = random(1, 40, 256), backend.pack(random(2, 640, 256), "f32")
    expected = backend.ops.matmul(x, w)
    for _ in range(300):
        same(backend.ops.matmul(x, w), expected)


def test_each_backend_has_its_own_threads() -> None:
    """Two contexts in one process run at the same time."""
    pair = [open_cpu(2, 1.0), open_cpu(2, 1.0)]
    x, w = random(1, 40, 256), random(2, 640, 256)
    results: list[torch.Tensor] = []

    def run(backend: Backend) -> None:
        packed = backend.pack(w, "f32")
        results.extend(backend.ops.matmul(x, packed) for _ in range(50))

    threads = [threading.Thread(target=run, args=(backend,)) for backend in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        same(result, results[0])


def test_what_is_out_of_range_is_an_error() -> None:
    """And never a read or write outside."""
    backend = native("", 1)
    with pytest.raises(KernelError, match="range"):
        backend.ops.embed(torch.ones(3, 4), int32([3]))
    with pytest.raises(KernelError, match="range"):
        backend.ops.embed(torch.ones(3, 4), int32([-1]))
    spec = AttentionSpec(1, 1, 16, 1.0)
    pool, qkv = backend.pool(PoolSpec(1, 1, 16, torch.float32), 2), torch.ones(1, 48)
    with pytest.raises(KernelError, match="range"):
        backend.ops.write_kv(qkv, pool, 0, int32([32]), spec)
    with pytest.raises(KernelError, match="range"):
        backend.ops.keep_kv(pool, int32([0]), int32([99]))
    with pytest.raises(KernelError, match="range"):
        backend.ops.rope(qkv, int32([5]), torch.ones(5, 8), torch.ones(5, 8), spec)
    case = make_case(backend, [Segment(5, 2)], spec, torch.float32, 0)
    case.batch.pages[0, 0] = 77
    with pytest.raises(KernelError, match="range"):
        backend.ops.attention(case.qkv, case.pool, 1, case.batch, spec)


def test_shapes_that_do_not_match_are_an_error() -> None:
    backend = native("", 1)
    with pytest.raises(ValueError, match=r"weight multiplies has the shape \[2, 5\] and must have \[any, 4\]"):
        backend.ops.matmul(torch.ones(2, 5), backend.pack(torch.ones(3, 4), "f32"))
    with pytest.raises(ValueError, match="norm"):
        backend.ops.norm(torch.ones(2, 5), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="qkv"):
        backend.ops.rope(torch.ones(1, 40), int32([0]), torch.ones(5, 8), torch.ones(5, 8), AttentionSpec(1, 1, 16, 1.0))


def test_packed_weights_are_aligned_and_apart() -> None:
    backend = native("", 1)
    weights = [backend.pack(torch.full((33, 7), float(i)), "bf16") for i in range(20)]
    spans = sorted((w.data.data_ptr(), w.data.data_ptr() + w.bytes) for w in weights)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for i, w in enumerate(weights):
        assert backend.ops.matmul(torch.ones(1, 7), w).tolist() == [[7.0 * i] * 33]


def test_a_weight_outlives_its_source_and_the_backend() -> None:
    backend = open_cpu(1, 1.0)
    other = open_cpu(1, 1.0)
    w = backend.pack(torch.ones(64, 64), "f32")
    del backend
    assert other.ops.matmul(torch.ones(1, 64), w).sum() == 64 * 64


def test_without_a_compiler_the_reference_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise BuildError("no C++ compiler found; install g++")

    monkeypatch.setattr(module, "build", fail)
    with caplog.at_level(logging.WARNING):
        backend = open_cpu(0, 1.0)
    assert len(caplog.records) == 1 and "install g++" in caplog.text
    assert "torch" in backend.facts()["kernels"]
    assert backend.caps.batch_invariant and backend.caps.dtypes[0] == torch.float32


def test_threads_that_were_asked_for() -> None:
    assert open_cpu(3, 1.0).facts()["threads"] == "3"


def test_memory_fraction() -> None:
    _, all_of_it = open_cpu(1, 1.0).memory()
    free, half = open_cpu(1, 0.5).memory()
    assert half == pytest.approx(all_of_it / 2, rel=0.01) and 0 <= free <= half


def test_registry() -> None:
    assert open_backend("auto", 1).name == open_backend("cpu", 1).name == "cpu"
    with pytest.raises(ValueError, match="--device cpu"):
        open_backend("cuda")
    with pytest.raises(ValueError, match="threads"):
        open_backend("cpu", -1)
    with pytest.raises(ValueError, match="fraction"):
        open_backend("cpu", 1, 0.0)
