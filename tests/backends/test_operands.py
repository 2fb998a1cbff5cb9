"""No caller makes the kernels read or write past an operand: another size, kind or layout is refused, and so is every number in
it that points nowhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.backends.base import AttentionSpec, Draws, Ops, Pool, PoolSpec, Weight
from forerun.backends.cpu.backend import NativeCpu, open_cpu, open_native, open_torch
from forerun.backends.cpu.library import KernelError
from forerun.engine.batch import Batch
from forerun.kernels import quant

from .cases import Segment, int32, make_case
from .contract import random, same

SPEC = AttentionSpec(4, 2, 16, 0.25, sinks=torch.zeros(4))
FIELDS = ("positions", "slots", "parents", "starts", "known", "context", "pages")
few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def cpu() -> NativeCpu:
    if not open_cpu(1, 1.0).caps.graphs:
        pytest.skip("no native kernels here")
    return open_native(1, 1.0)


@dataclasses.dataclass(frozen=True)
class Op:
    """`bound`: dimensions of an operand that another operand gives the size."""

    run: Callable[[Ops, dict[str, Any]], object]
    made: Callable[[NativeCpu], dict[str, Any]]
    bound: dict[str, tuple[int, ...]]


def batch_of(a: dict[str, Any]) -> Batch:
    n = a["positions"].numel()
    return Batch(torch.zeros(n, dtype=torch.int32), *(a[name] for name in FIELDS), torch.zeros(0, dtype=torch.int32))


def attention_case(cpu: NativeCpu) -> dict[str, Any]:
    case = make_case(cpu, [Segment(20, 3, (-1, 0, 0, 2)), Segment(5, 1, (-1,))], SPEC, torch.float32, 0)
    return {"qkv": case.qkv, "pool": case.pool, "sinks": torch.zeros(4)} | {name: getattr(case.batch, name) for name in FIELDS}


def weights(cpu: NativeCpu, *shapes: tuple[int, int]) -> list[Weight]:
    return [cpu.pack(random(seed, *shape), "f32") for seed, shape in enumerate(shapes)]


def some_pool(cpu: NativeCpu) -> Pool:
    return cpu.pool(PoolSpec(2, 2, 16, torch.bfloat16), 3)


OPS = {
    "embed": Op(lambda ops, a: ops.embed(a["table"], a["tokens"]), lambda cpu: {"table": random(0, 9, 5), "tokens": int32([1, 2, 8])}, {}),
    "take": Op(lambda ops, a: ops.take(a["x"], a["rows"]), lambda cpu: {"x": random(0, 9, 5), "rows": int32([1, 2, 8])}, {}),
    "norm": Op(
        lambda ops, a: ops.norm(a["x"], a["weight"], 1e-5),
        lambda cpu: {"x": random(0, 3, 7), "weight": random(1, 7)},
        {"x": (1,), "weight": (0,)},
    ),
    "add": Op(
        lambda ops, a: ops.add(a["x"], a["residual"]),
        lambda cpu: {"x": random(0, 3, 7), "residual": random(1, 3, 7)},
        {"x": (0, 1), "residual": (0, 1)},
    ),
    "add_norm": Op(
        lambda ops, a: ops.add_norm(a["x"], a["residual"], a["weight"], 1e-5),
        lambda cpu: {"x": random(0, 3, 7), "residual": random(1, 3, 7), "weight": random(2, 7)},
        {"x": (0, 1), "residual": (0, 1), "weight": (0,)},
    ),
    "concat": Op(
        lambda ops, a: ops.concat([a["x"], a["y"]] * 8),
        lambda cpu: {"x": random(0, 3, 7), "y": random(1, 3, 2)},
        {"x": (0,), "y": (0,)},
    ),
    "matmul": Op(
        lambda ops, a: ops.matmul(a["x"], a["weight"], a["bias"]),
        lambda cpu: {"x": random(0, 3, 7), "weight": weights(cpu, (40, 7))[0], "bias": random(1, 40)},
        {"x": (1,), "bias": (0,)},
    ),
    "mlp": Op(
        lambda ops, a: ops.mlp(a["x"], a["gate_up"], a["down"], "silu", a["wide"], a["bias"]),
        lambda cpu: {
            **{
                "x": random(0, 3, 7),
                "gate_up": cpu.pack(random(1, 40, 7), "bf16", halves=True),
                "down": cpu.pack(random(2, 9, 20), "bf16"),
            },
            **{"wide": random(3, 40), "bias": random(4, 9)},
        },
        {"x": (1,), "wide": (0,), "bias": (0,)},
    ),
    "logits": Op(
        lambda ops, a: ops.logits(a["x"], a["weight"]),
        lambda cpu: {"x": random(0, 3, 7), "weight": weights(cpu, (40, 7))[0]},
        {"x": (1,)},
    ),
    "moe": Op(
        lambda ops, a: ops.moe(a["x"], a["w"][0], a["w"][1:3], a["w"][3:], 2, "silu", True),
        lambda cpu: {"x": random(0, 3, 7), "w": weights(cpu, (2, 7), (12, 7), (12, 7), (7, 6), (7, 6))},
        {"x": (1,)},
    ),
    "rope": Op(
        lambda ops, a: ops.rope(a["qkv"], a["positions"], a["cos"], a["sin"], SPEC, a["q_norm"], a["k_norm"], 1e-5),
        lambda cpu: {
            **{"qkv": random(0, 3, 128), "positions": int32([1, 2, 3]), "cos": random(1, 5, 8), "sin": random(2, 5, 8)},
            **{"q_norm": random(3, 16), "k_norm": random(4, 32)},
        },
        {"qkv": (0, 1), "positions": (0,), "cos": (0, 1), "sin": (0, 1), "q_norm": (0,), "k_norm": (0,)},
    ),
    "write_kv": Op(
        lambda ops, a: ops.write_kv(a["qkv"], a["pool"], 1, a["slots"], SPEC),
        lambda cpu: {"qkv": random(0, 3, 128), "pool": some_pool(cpu), "slots": int32([1, 2, 3])},
        {"qkv": (0, 1), "slots": (0,)},
    ),
    "attention": Op(
        lambda ops, a: ops.attention(a["qkv"], a["pool"], 1, batch_of(a), dataclasses.replace(SPEC, sinks=a["sinks"])),
        attention_case,
        {"qkv": (0, 1), "sinks": (0,)} | dict.fromkeys(FIELDS, (0,)),
    ),
    "keep_kv": Op(
        lambda ops, a: ops.keep_kv(a["pool"], a["source"], a["target"]),
        lambda cpu: {"pool": some_pool(cpu), "source": int32([1, 2, 3]), "target": int32([4, 5, 6])},
        {"source": (0,), "target": (0,)},
    ),
    "noise_at": Op(
        lambda ops, a: ops.noise_at(a["seeds"], a["indices"], a["tokens"]),
        lambda cpu: {name: torch.arange(4) for name in ("seeds", "indices", "tokens")},
        dict.fromkeys(("seeds", "indices", "tokens"), (0,)),
    ),
    "pick": Op(
        lambda ops, a: ops.pick(a["scores"], a["noise"]),
        lambda cpu: {"scores": random(0, 3, 40), "noise": random(1, 3, 40)},
        {"scores": (0, 1), "noise": (0, 1)},
    ),
    "choose": Op(
        lambda ops, a: ops.choose(a["x"], a["weight"], Draws(*(a[name] for name in DRAWS))),
        lambda cpu: (
            {"x": random(0, 4, 7), "weight": weights(cpu, (40, 7))[0], "temperatures": torch.ones(4)}
            | {name: torch.ones(4, dtype=torch.int64) for name in DRAWS[1:]}
        ),
        {"x": (0, 1), "temperatures": (0,), "sampled": (0,), "seeds": (0,), "indices": (0,)},
    ),
}
DRAWS = ("temperatures", "sampled", "seeds", "indices")
NORMS = {"q_norm": (16, 64), "k_norm": (16, 32)}
"""What may have one of two sizes."""


def resized(x: Tensor, dim: int, size: int) -> Tensor:
    """The same numbers as far as there is room, and zeros."""
    shape = [size if at == dim else extent for at, extent in enumerate(x.shape)]
    out = torch.zeros(shape, dtype=x.dtype)
    part = tuple(slice(0, min(a, b)) for a, b in zip(shape, x.shape))
    out[part] = x[part]
    return out


@pytest.mark.parametrize("name", OPS)
def test_what_fits_is_taken(cpu: NativeCpu, name: str) -> None:
    OPS[name].run(cpu.ops, OPS[name].made(cpu))


def parts_of(result: Any) -> list[Tensor]:
    """All tensors that an op returned."""
    if torch.is_tensor(result):
        return [result]
    if dataclasses.is_dataclass(result):
        result = [getattr(result, field.name) for field in dataclasses.fields(result)]
    return [part for each in result or () for part in parts_of(each)]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN, or the largest number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_fresh_memory_is_poisoned_here(poisoned: None) -> None:
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("name", OPS)
def test_results_are_written_whole(cpu: NativeCpu, name: str, request: pytest.FixtureRequest) -> None:
    """Nothing is left, or taken, of what lay where a result comes to rest."""
    expected = parts_of(OPS[name].run(cpu.ops, OPS[name].made(cpu)))
    request.getfixturevalue("poisoned")
    actual = parts_of(OPS[name].run(cpu.ops, OPS[name].made(cpu)))
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected):
        assert not one.isnan().any()
        same(one, other)


@few
@given(name=st.sampled_from([name for name, op in OPS.items() if op.bound]), data=st.data())
def test_an_operand_of_another_size_is_refused(cpu: NativeCpu, name: str, data: st.DataObject) -> None:
    """Shorter or longer, in any dimension that others rely on: an error that says what it has and must have."""
    op = OPS[name]
    operands = op.made(cpu)
    which = data.draw(st.sampled_from(sorted(op.bound)))
    dim = data.draw(st.sampled_from(op.bound[which]))
    size = data.draw(st.integers(0, 2 * operands[which].shape[dim] + 1))
    assume(size != operands[which].shape[dim] and size not in NORMS.get(which, ()))
    operands[which] = resized(operands[which], dim, size)
    with pytest.raises(ValueError, match=r"has the shape \[.*\] and must have"):
        op.run(cpu.ops, operands)


@pytest.mark.parametrize("name", OPS)
def test_an_operand_of_more_or_fewer_dimensions_is_refused(cpu: NativeCpu, name: str) -> None:
    for which, operand in OPS[name].made(cpu).items():
        if torch.is_tensor(operand):
            for spoilt in (operand.unsqueeze(0), operand.unsqueeze(-1), operand.flatten()[0]):
                operands = OPS[name].made(cpu)
                operands[which] = spoilt
                with pytest.raises(ValueError, match="must have"):
                    OPS[name].run(cpu.ops, operands)


def test_of_gate_and_up_none_is_longer(cpu: NativeCpu) -> None:
    for width in (1, 7, 33):
        with pytest.raises(ValueError, match=rf"\[2, {width}\] and must have \[any, {width - 1}\]"):
            cpu.ops.gate(random(0, 2, width), "silu")


def test_more_is_turned_than_a_head_has(cpu: NativeCpu) -> None:
    with pytest.raises(ValueError, match="9 columns"):
        cpu.ops.rope(random(0, 1, 128), int32([0]), random(1, 5, 9), random(2, 5, 9), SPEC)
    with pytest.raises(ValueError, match="cannot share"):
        cpu.ops.rope(random(0, 1, 128), int32([0]), random(1, 5, 8), random(2, 5, 8), AttentionSpec(3, 2, 16, 1.0))


@pytest.mark.parametrize("format", ["f32", "bf16", *quant.FORMATS])
def test_a_weight_is_as_large_as_it_says(cpu: NativeCpu, format: str) -> None:
    weight, x = cpu.pack(random(0, 70, 45), format), random(1, 2, 45)
    for shape in ((70, 200), (129, 45), (20, 45)):
        with pytest.raises(ValueError, match="pack it with this backend"):
            cpu.ops.matmul(random(1, 2, shape[1]), dataclasses.replace(weight, shape=shape))
    for other in (open_torch(1.0).pack(random(0, 70, 45), format), dataclasses.replace(weight, data=weight.data.flatten()[:-1])):
        for run in (cpu.ops.matmul, cpu.ops.logits, lambda x, w: cpu.ops.choose(x, w, Draws.greedy(2))):
            with pytest.raises(ValueError, match="pack it with this backend"):
                run(x, other)
    with pytest.raises(ValueError, match=r"int3.*bf16"):
        cpu.ops.matmul(x, dataclasses.replace(weight, format="int3"))


@pytest.mark.parametrize("format", ["f32", "bf16", *quant.FORMATS])
def test_halves_are_for_an_mlp(cpu: NativeCpu, format: str) -> None:
    """A weight of gate and up in one order is nowhere taken for one in the other, and as long as its padding makes it."""
    x, down = random(0, 3, 33), cpu.pack(random(1, 5, 21), format)
    halves, plain = (cpu.pack(random(2, 42, 33), format, halves) for halves in (True, False))
    cpu.ops.mlp(x, halves, down, "silu")
    with pytest.raises(ValueError, match="mlp alone"):
        cpu.ops.matmul(x, halves)
    with pytest.raises(ValueError, match="mlp alone"):
        cpu.ops.mlp(x, plain, cpu.pack(random(1, 6, 21), format, halves=True), "silu")
    with pytest.raises(ValueError, match="bytes"):
        cpu.ops.mlp(x, dataclasses.replace(plain, halves=True, data=plain.data[:-1]), down, "silu")
    with pytest.raises(ValueError, match="do not go with"):
        cpu.ops.mlp(x, halves, cpu.pack(random(1, 5, 20), format), "silu")


@pytest.mark.parametrize("format", ["f32", "bf16", *quant.FORMATS])
def test_a_weight_begins_with_a_cache_line(cpu: NativeCpu, format: str) -> None:
    """Kernels load whole lines of it, which elsewhere ends the process."""
    weight, x = cpu.pack(random(0, 70, 45), format), random(1, 2, 45)
    for off in (0, 4, 32):
        room = torch.zeros(weight.data.nbytes + 128, dtype=torch.uint8)
        first = -room.data_ptr() % 64 + off
        moved = dataclasses.replace(weight, data=room[first : first + weight.data.nbytes].copy_(weight.data.flatten().view(torch.uint8)))
        if off:
            with pytest.raises(ValueError, match="inside a cache line"):
                cpu.ops.matmul(x, moved)
        else:
            same(cpu.ops.matmul(x, moved), cpu.ops.matmul(x, weight))


def test_every_weight_of_a_mixture_is_looked_at(cpu: NativeCpu) -> None:
    """Shapes that are right, but another weight's, are wrong."""
    x = random(0, 3, 8)
    up, down, router = weights(cpu, (16, 8), (16, 8)), weights(cpu, (8, 8), (8, 8)), weights(cpu, (2, 8))[0]
    cpu.ops.moe(x, router, up, down, 1, "silu", True)
    for ups, downs, root in (
        ([up[0], down[0]], down, router),
        (up, [down[0], up[0]], router),
        (up, down[:1], router),
        ([], [], router),
        (up, down, up[0]),
    ):
        with pytest.raises(ValueError, match=r"mixture|must have"):
            cpu.ops.moe(x, root, ups, downs, 1, "silu", True)
    for top_k in (0, 3):
        with pytest.raises(ValueError, match=f"use {top_k}"):
            cpu.ops.moe(x, router, up, down, top_k, "silu", True)
    with pytest.raises(ValueError, match="formats"):
        cpu.ops.moe(x, router, [up[0], cpu.pack(random(1, 16, 8), "bf16")], down, 1, "silu", True)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
def test_a_pool_lies_as_the_kernels_read_it(cpu: NativeCpu, kind: torch.dtype) -> None:
    pool = cpu.pool(PoolSpec(2, 2, 16, kind), 3)
    cpu.ops.keep_kv(pool, int32([1]), int32([2]))
    wrong = [
        dataclasses.replace(pool, keys=pool.keys.contiguous().clone(memory_format=torch.contiguous_format)),
        dataclasses.replace(pool, values=pool.values[:, :2]),
        dataclasses.replace(pool, keys=pool.keys[:, :, :, :8], values=pool.values[:, :, :, :8]),
        dataclasses.replace(pool, keys=pool.keys[..., :8], values=pool.values[..., :8]),
        dataclasses.replace(pool, values=pool.values.view(torch.uint8).view(torch.int8).float()),
    ]
    wrong += [dataclasses.replace(pool, key_scales=None, value_scales=None)] if kind == torch.int8 else []
    wrong += [dataclasses.replace(pool, keys=pool.keys.double(), values=pool.values.double())]
    for spoilt in wrong:
        for run in (
            lambda p: cpu.ops.keep_kv(p, int32([1]), int32([2])),
            lambda p: cpu.ops.write_kv(random(0, 1, 128), p, 0, int32([1]), SPEC),
        ):
            with pytest.raises(ValueError, match=r"this backend|must have|cache of|heads and sizes"):
                run(spoilt)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match="no layer"):
            cpu.ops.write_kv(random(0, 1, 128), pool, layer, int32([1]), SPEC)
    with pytest.raises(ValueError, match="heads and sizes"):
        cpu.ops.write_kv(random(0, 1, 256), pool, 0, int32([1]), AttentionSpec(4, 2, 32, 1.0))


def test_fields_of_a_batch_are_whole_numbers_of_32_bits(cpu: NativeCpu) -> None:
    for name in FIELDS:
        operands = attention_case(cpu)
        for spoilt in (operands[name].long(), operands[name].repeat_interleave(2, 0)[::2]):
            with pytest.raises(ValueError, match="contiguous int32"):
                OPS["attention"].run(cpu.ops, operands | {name: spoilt})


def test_nothing_to_pick(cpu: NativeCpu) -> None:
    with pytest.raises(ValueError, match="nothing to pick"):
        cpu.ops.pick(torch.zeros(2, 0), None)
    with pytest.raises(ValueError, match="at least one part"):
        cpu.ops.concat([])


def test_rows_that_do_not_exist_are_not_taken(cpu: NativeCpu) -> None:
    for row in (-1, 9, 2**31 - 1):
        with pytest.raises(KernelError, match="out of range"):
            cpu.ops.take(random(0, 9, 5), int32([1, row]))


@few
@given(
    name=st.sampled_from(FIELDS),
    at=st.integers(0, 99),
    value=st.one_of(
        st.integers(-3, 40),
        st.sampled_from([-(2**31), -(2**20), -17, 48, 1 << 20, 2**31 - 1, 2**31 - 16]),
        st.integers(-(2**31), 2**31 - 1),
    ),
)
def test_any_number_in_a_batch_is_an_error_or_a_result(cpu: NativeCpu, name: str, at: int, value: int) -> None:
    """Where it says that rows, pages and positions lie somewhere else, they do or it is refused: nothing else is read."""
    operands = attention_case(cpu)
    operands[name] = operands[name].clone()
    before = int(operands[name].view(-1)[at % operands[name].numel()])
    operands[name].view(-1)[at % operands[name].numel()] = value
    try:
        OPS["attention"].run(cpu.ops, operands)
    except KernelError as error:
        assert "out of range" in str(error) and value != before
    else:
        assert name not in ("starts", "known", "context") or 0 <= value <= 40


class TestRecording:
    """A program has as many rows as its batch; what keeps its size may not stand beside them."""

    def same_at_every_size(self, cpu: NativeCpu, function: Callable[[Batch], Tensor], recorded: bool) -> None:
        captured = cpu.capture(function, None)
        for n in (5, 3, 300):
            batch = make_case(cpu, [Segment(0, n)], SPEC, torch.float32, n).batch
            batch.logit_rows = int32([0, n - 1])
            try:
                expected = function(batch)
            except (ValueError, KernelError) as error:
                with pytest.raises(type(error)):
                    captured(batch)
            else:
                same(captured(batch), expected)
        assert bool(captured._programs) == recorded  # type: ignore[attr-defined]

    def test_a_constant_beside_rows(self, cpu: NativeCpu) -> None:
        table, constant = random(0, 50, 5), random(1, 5, 5)
        self.same_at_every_size(cpu, lambda batch: cpu.ops.add(cpu.ops.embed(table, batch.tokens), constant), False)
        self.same_at_every_size(cpu, lambda batch: cpu.ops.concat([cpu.ops.embed(table, batch.tokens), constant]), False)

    def test_positions_that_are_not_the_batchs(self, cpu: NativeCpu) -> None:
        table, turn, places = random(0, 50, 128), random(1, 400, 8), int32([0, 1, 2, 3, 4])
        self.same_at_every_size(cpu, lambda batch: cpu.ops.rope(cpu.ops.embed(table, batch.tokens), places, turn, turn, SPEC), False)
        self.same_at_every_size(
            cpu, lambda batch: cpu.ops.rope(cpu.ops.embed(table, batch.tokens), batch.positions, turn, turn, SPEC), True
        )

    def test_segments_that_are_not_the_batchs(self, cpu: NativeCpu) -> None:
        table, pool = random(0, 50, 128), cpu.pool(PoolSpec(1, 2, 16, torch.float32), 30)
        known = int32([5])

        def attend(batch: Batch) -> Tensor:
            qkv = cpu.ops.embed(table, batch.tokens)
            cpu.ops.write_kv(qkv, pool, 0, batch.slots, SPEC)
            return cpu.ops.attention(qkv, pool, 0, dataclasses.replace(batch, known=known), SPEC)

        self.same_at_every_size(cpu, attend, False)

    def test_rows_are_taken_of_the_batchs_and_of_a_constant(self, cpu: NativeCpu) -> None:
        table = random(0, 50, 5)
        self.same_at_every_size(cpu, lambda batch: cpu.ops.take(cpu.ops.embed(table, batch.tokens), batch.logit_rows), True)
        self.same_at_every_size(cpu, lambda batch: cpu.ops.take(table, batch.tokens), True)
        captured = cpu.capture(lambda batch: cpu.ops.take(cpu.ops.embed(table, batch.tokens), batch.logit_rows), None)
        batch = make_case(cpu, [Segment(0, 5)], SPEC, torch.float32, 0).batch
        captured(batch)
        for row in (5, -1, 49):
            with pytest.raises(KernelError, match="out of range"):
                captured(dataclasses.replace(batch, logit_rows=int32([row])))
