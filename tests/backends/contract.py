"""What every backend must keep: each op against `kernels.reference` on ragged shapes, and the promise of batch invariance, bit by bit.

A test module for a device subclasses `Contract` and provides the fixture `backend`.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.backends.base import AttentionSpec, Backend, Draws, Pool, PoolSpec
from forerun.engine.batch import Batch
from forerun.kernels import quant, reference

from .cases import PARTS, Segment, contexts, copy_pool, fill, int32, make_case, one_segment, segments

FORMATS = {"f32": torch.float32, "bf16": torch.bfloat16}
KV_TYPES = (torch.float32, torch.bfloat16, torch.int8)
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**31)
sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 100, 576]))
formats = st.sampled_from(["f32", "bf16"])
caches = st.sampled_from(KV_TYPES)
codes = st.sampled_from(quant.FORMATS)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def same(actual: Tensor, expected: Tensor) -> None:
    """Equal bit by bit."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert torch.equal(actual.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    size = draw(st.sampled_from([8, 16, 20, 32, 64, 80, 96, 128, 256]))
    sinks = random(heads, heads) if draw(st.booleans()) else None
    return AttentionSpec(
        heads,
        kv_heads,
        size,
        size**-0.5,
        draw(st.sampled_from([0, 0, 1, 5, 16, 33, 250])),
        draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        sinks,
    )


class Contract:
    """Tests of one backend."""

    # -- rows --

    @few
    @given(seed=seeds, n=st.integers(0, 30), width=sizes, vocab=st.integers(1, 40), format=formats, scale=st.sampled_from([1.0, 24.0]))
    def test_embed(self, backend: Backend, seed: int, n: int, width: int, vocab: int, format: str, scale: float) -> None:
        table = random(seed, vocab, width).to(FORMATS[format])
        tokens = torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        same(backend.ops.embed(table, tokens, scale), reference.embed(table, tokens, scale))

    @few
    @given(seed=seeds, n=st.integers(1, 30), width=sizes, rows=st.lists(st.integers(0, 29)))
    def test_take_and_concat(self, backend: Backend, seed: int, n: int, width: int, rows: list[int]) -> None:
        x, chosen = random(seed, n, width), int32([row % n for row in rows])
        same(backend.ops.take(x, chosen), reference.take(x, chosen))
        same(backend.ops.concat([x, x[:, : width // 2 + 1], x]), reference.concat([x, x[:, : width // 2 + 1], x]))
        same(backend.ops.concat([x[:, :1]] * 20), reference.concat([x[:, :1]] * 20))

    @few
    @given(seed=seeds, n=st.integers(0, 40), width=sizes, scale=st.sampled_from([1.0, 0.3]))
    def test_norms(self, backend: Backend, seed: int, n: int, width: int, scale: float) -> None:
        x, residual, weight = random(seed, n, width), random(seed + 1, n, width), random(seed + 2, width)
        close(backend.ops.norm(x, weight, 1e-5), reference.norm(x, weight, 1e-5))
        close(backend.ops.add(x, residual, scale), reference.add(x, residual, scale))
        for actual, expected in zip(
            backend.ops.add_norm(x, residual, weight, 1e-5, scale), reference.add_norm(x, residual, weight, 1e-5, scale)
        ):
            close(actual, expected)
        for row in range(0, n, 7):
            one = slice(row, row + 1)
            same(backend.ops.norm(x[one], weight, 1e-5), backend.ops.norm(x, weight, 1e-5)[one])

    @few
    @given(seed=seeds, n=st.integers(0, 30), width=sizes, activation=st.sampled_from(["silu", "gelu", "gelu_tanh", "relu", "relu2"]))
    def test_gate(self, backend: Backend, seed: int, n: int, width: int, activation: str) -> None:
        x = random(seed, n, 2 * width) * 5
        actual = backend.ops.gate(x, activation)
        close(actual, reference.gate(x, activation))
        for row in range(0, n, 7):
            same(backend.ops.gate(x[row : row + 1], activation), actual[row : row + 1])

    def test_gate_at_the_ends_of_the_range(self, backend: Backend) -> None:
        left = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 60.0, -60.0, 88.0, -88.0, 1e4, -1e4, 1e30])
        for activation in ("silu", "gelu", "gelu_tanh", "relu"):
            x = torch.cat([left, torch.ones_like(left)]).unsqueeze(0)
            close(backend.ops.gate(x, activation), reference.gate(x, activation), 1e-6)
            x[0, 3] = torch.nan
            assert backend.ops.gate(x, activation)[0].isnan().tolist() == [i == 3 for i in range(len(left))]

    @few
    @given(
        seed=seeds,
        n=st.integers(1, 20),
        width=st.integers(1, 40),
        steps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        at=st.integers(0, 3),
    )
    def test_operands_may_lie_in_any_strides(
        self, backend: Backend, seed: int, n: int, width: int, steps: tuple[int, int], at: int
    ) -> None:
        """Every second row, every third column, transposed, from any place on: the numbers count, not where they lie."""
        down, along = steps
        x = random(seed, n * down + at, width * 2 * along + at)[at::down, at::along]
        y = random(seed + 1, width * 2, n).T
        weight = random(seed + 2, 2 * width * along)[::along]
        rows = torch.arange(2 * n).int()[::2] // 2
        assert x.shape == y.shape == (n, 2 * width)
        ops, packed, plain = (
            backend.ops,
            backend.pack(random(seed + 3, 33, 2 * width), "f32"),
            [each.contiguous() for each in (x, y, weight, rows)],
        )

        def work(x: Tensor, y: Tensor, weight: Tensor, rows: Tensor) -> list[Tensor]:
            results = [ops.norm(x, weight, 1e-5), ops.add(x, y), *ops.add_norm(x, y, weight, 1e-5), ops.gate(y, "silu"), ops.take(x, rows)]
            results += [ops.matmul(x, packed), ops.logits(y, packed), ops.concat([x, y]), ops.pick(x, y).logprobs]
            return [*results, ops.matmul(x, packed, random(seed + 4, 66)[::2]), ops.embed(y, rows)]

        for mine, expected in zip(work(x, y, weight, rows), work(*plain)):
            close(mine, expected, 1e-5)

    def test_an_unknown_activation_is_named(self, backend: Backend) -> None:
        with pytest.raises(ValueError, match=r"swish.*silu"):
            backend.ops.gate(torch.ones(1, 4), "swish")

    # -- products --

    @few
    @given(seed=seeds, n=st.integers(0, 50), rows=sizes, columns=sizes, format=formats, bias=st.booleans())
    def test_matmul(self, backend: Backend, seed: int, n: int, rows: int, columns: int, format: str, bias: bool) -> None:
        x, w = random(seed, n, columns), random(seed + 1, rows, columns) / math.sqrt(columns)
        b = random(seed + 2, rows) if bias else None
        weight = backend.pack(w, format)
        assert weight.shape == (rows, columns) and weight.format == format and weight.bytes >= w.numel()
        close(backend.ops.matmul(x, weight, b), reference.matmul(x, w.to(FORMATS[format]), b), 1e-4)

    @few
    @given(
        seed=seeds,
        n=st.integers(0, 50),
        rows=sizes,
        columns=st.one_of(sizes, st.sampled_from([quant.SPAN, quant.SPAN + 1, 1100])),
        format=codes,
        bias=st.booleans(),
        scale=st.sampled_from([1.0, 3e-5]),
    )
    def test_matmul_with_codes(
        self, backend: Backend, seed: int, n: int, rows: int, columns: int, format: str, bias: bool, scale: float
    ) -> None:
        """Against float64: what is lost beside the weights' own rounding is activations rounded to 16 bits and float sums."""
        x, w = random(seed, n, columns) * random(seed + 3, n, 1), random(seed + 1, rows, columns) * scale
        b = random(seed + 2, rows) if bias else None
        weight = backend.pack(w, format)
        assert weight.shape == (rows, columns) and weight.format == format
        actual = backend.ops.matmul(x, weight, b)
        matrix = quant.expand(quant.quantize(w, format)).double()
        exact = x.double() @ matrix.T + (0 if b is None else b.double())
        room = x.double().abs().amax(1, keepdim=True) @ matrix.abs().sum(1, keepdim=True).T * 2e-5 + 1e-6 * exact.abs()
        assert ((actual - exact).abs() <= room).all()
        close(actual, reference.matmul(x, quant.quantize(w, format), b), max(1e-4 * scale * columns**0.5, 1e-6))

    def test_codes_that_are_packed_as_they_are(self, backend: Backend) -> None:
        """A row of ones picks out sums; a row with one 1 picks out a column: the very numbers that the codes stand for."""
        for format in quant.FORMATS:
            codes = quant.quantize(random(4, 45, 70), format)
            close(backend.ops.matmul(torch.eye(70), backend.pack_codes(codes)), quant.expand(codes).T, 1e-6)

    @pytest.mark.parametrize("format", quant.FORMATS)
    def test_codes_and_what_is_not_a_number(self, backend: Backend, format: str) -> None:
        """A row that holds a NaN or an infinity is not finite; one of zeros, or of next to nothing, is zero; others know nothing of it."""
        x, weight = random(5, 6, 600), backend.pack(random(6, 40, 600), format)
        clean = backend.ops.matmul(x, weight)
        x[1, 599], x[2, 3], x[3], x[4] = torch.nan, torch.inf, 0.0, 1e-38
        y = backend.ops.matmul(x, weight)
        assert not y[1].isfinite().any() and not y[2].isfinite().any()
        assert y[3:5].abs().max() < 1e-30
        same(y[[0, 5]], clean[[0, 5]])

    @pytest.mark.parametrize("format", [*FORMATS, *quant.FORMATS])
    def test_a_row_of_a_product_is_the_same_in_any_company(self, backend: Backend, format: str) -> None:
        """The promise itself, for every number of rows up to 70 and the largest blocks, and K beyond one block."""
        for columns, rows in ((576, 100), (1537, 33), (5000, 64)):
            x, weight = random(1, 230, columns), backend.pack(random(2, rows, columns), format)
            whole = backend.ops.matmul(x, weight)
            for n in (*range(1, 20), 32, 49, 64, 70, 193):
                first = (7 * n) % (230 - n)
                same(backend.ops.matmul(x[first : first + n], weight), whole[first : first + n])

    @few
    @given(
        seed=seeds,
        n=st.sampled_from([0, 1, 2, 7, 15, 33, 57, 500]),
        shape=st.tuples(sizes, sizes, sizes),
        formats=st.tuples(st.sampled_from([*FORMATS, *quant.FORMATS]), st.sampled_from([*FORMATS, *quant.FORMATS])),
        alike=st.booleans(),
        activation=st.sampled_from(["silu", "gelu", "gelu_tanh", "relu", "relu2"]),
        bias=st.booleans(),
    )
    def test_mlp(
        self,
        backend: Backend,
        seed: int,
        n: int,
        shape: tuple[int, int, int],
        formats: tuple[str, str],
        alike: bool,
        activation: str,
        bias: bool,
    ) -> None:
        """Its three parts bit by bit, however gate and up are packed, and a row the same alone."""
        ops, (inputs, inner, outputs), (first, second) = backend.ops, shape, formats
        n = min(n, 20) if backend.caps.dtypes[0] == torch.float32 else n  # the slow forms
        x = random(seed, n, inputs)
        w = random(seed + 1, 2 * inner, inputs) / math.sqrt(inputs)
        down = backend.pack(random(seed + 2, outputs, inner), first if alike else second)
        biases = (random(seed + 3, 2 * inner), random(seed + 4, outputs)) if bias else (None, None)
        plain, halves = backend.pack(w, first), backend.pack(w, first, halves=True)
        assert halves.shape == plain.shape and halves.halves and not plain.halves
        apart = ops.matmul(ops.gate(ops.matmul(x, plain, biases[0]), activation), down, biases[1])
        same(ops.mlp(x, plain, down, activation, *biases), apart)
        same(ops.mlp(x, halves, down, activation, *biases), apart)
        for row in range(0, n, 97):
            same(ops.mlp(x[row : row + 1], halves, down, activation, *biases), apart[row : row + 1])

    def test_formats(self, backend: Backend) -> None:
        with pytest.raises(ValueError, match="bf16"):
            backend.pack(torch.ones(4, 4), "int3")
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            w = random(0, 9, 7).to(dtype)
            close(backend.ops.matmul(random(1, 2, 7), backend.pack(w, "f32")), reference.matmul(random(1, 2, 7), w.float()))

    @few
    @given(seed=seeds, n=st.integers(0, 20), rows=sizes, scale=st.sampled_from([1.0, 0.125]), softcap=st.sampled_from([0.0, 30.0]))
    def test_logits(self, backend: Backend, seed: int, n: int, rows: int, scale: float, softcap: float) -> None:
        x, w = random(seed, n, 40) * 4, random(seed + 1, rows, 40)
        close(backend.ops.logits(x, backend.pack(w, "f32"), scale, softcap), reference.logits(x, w, scale, softcap), 1e-4)

    @few
    @given(
        seed=seeds,
        n=st.integers(0, 24),
        experts=st.integers(1, 9),
        top_k=st.integers(1, 9),
        hidden=st.integers(1, 40),
        inner=st.integers(1, 40),
        normalize=st.booleans(),
        format=st.sampled_from(["f32", "bf16", "int8", "int4"]),
    )
    def test_moe(
        self, backend: Backend, seed: int, n: int, experts: int, top_k: int, hidden: int, inner: int, normalize: bool, format: str
    ) -> None:
        top_k = min(top_k, experts)
        dtype = FORMATS.get(format, torch.float32)
        x, router = random(seed, n, hidden), random(seed + 1, experts, hidden).to(dtype)
        up = [random(seed + 2 + e, 2 * inner, hidden).to(dtype) / math.sqrt(hidden) for e in range(experts)]
        down = [random(seed + 50 + e, hidden, inner).to(dtype) / math.sqrt(inner) for e in range(experts)]
        packed = [backend.pack(w, format) for w in up], [backend.pack(w, format) for w in down]
        actual = backend.ops.moe(x, backend.pack(router, format), *packed, top_k, "silu", normalize)
        plain = [w if format in FORMATS else quant.quantize(w, format) for w in (router, *up, *down)]
        expected = reference.moe(x, plain[0], plain[1 : experts + 1], plain[experts + 1 :], top_k, "silu", normalize)
        close(actual, expected, {"f32": 1e-4, "bf16": 2e-2}.get(format, 1e-3))
        for row in range(0, n, 5):
            same(backend.ops.moe(x[row : row + 1], backend.pack(router, format), *packed, top_k, "silu", normalize), actual[row : row + 1])

    def test_moe_ties_go_to_the_lower_expert(self, backend: Backend) -> None:
        x, up, down = random(0, 3, 8), [random(e, 8, 8) for e in range(4)], [random(9 + e, 8, 4) for e in range(4)]
        router = torch.zeros(4, 8)
        packed = [backend.pack(w, "f32") for w in up], [backend.pack(w, "f32") for w in down]
        actual = backend.ops.moe(x, backend.pack(router, "f32"), *packed, 2, "silu", True)
        close(actual, reference.moe(x, router, up, down, 2, "silu", True))

    # -- attention --

    @few
    @given(
        seed=seeds,
        n=st.integers(0, 20),
        spec=specs(),
        part=st.sampled_from([0.0, 0.5, 1.0]),
        norms=st.sampled_from(["none", "head", "all"]),
    )
    def test_rope(self, backend: Backend, seed: int, n: int, spec: AttentionSpec, part: float, norms: str) -> None:
        half = int(spec.head_dim * part) // 2
        qkv = random(seed, n, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
        angle = random(seed + 1, 50, half)
        positions = torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        q_norm = k_norm = None
        if norms != "none":
            q_norm = random(seed + 2, spec.head_dim * (spec.heads if norms == "all" else 1))
            k_norm = random(seed + 3, spec.head_dim * (spec.kv_heads if norms == "all" else 1))
        expected = reference.rope(qkv.clone(), positions, angle.cos(), angle.sin(), spec, q_norm, k_norm, 1e-6)
        mine = qkv.clone()
        result = backend.ops.rope(mine, positions, angle.cos(), angle.sin(), spec, q_norm, k_norm, 1e-6)
        close(result, expected)
        same(mine, result)
        for row in range(0, n, 7):
            one = slice(row, row + 1)
            alone = backend.ops.rope(qkv[one].clone(), positions[one], angle.cos(), angle.sin(), spec, q_norm, k_norm, 1e-6)
            same(alone, result[one])

    @few
    @given(seed=seeds, parts=st.lists(segments(), min_size=1, max_size=3), spec=specs(), kind=caches)
    def test_attention(self, backend: Backend, seed: int, parts: list[Segment], spec: AttentionSpec, kind: torch.dtype) -> None:
        """Against the reference, with NaN in every slot that no row sees."""
        case = make_case(backend, parts, spec, kind, seed)
        actual = backend.ops.attention(case.qkv, case.pool, 1, case.batch, spec)
        # Where there are bf16 dot products, a cache in bf16 meets queries and shares in bf16.
        close(actual, reference.attention(case.qkv, case.pool, 1, case.batch, spec), 2e-2 if kind == torch.bfloat16 else 5e-5)

    @few
    @given(seed=seeds, parts=st.lists(segments(), min_size=2, max_size=4), spec=specs(), kind=caches)
    def test_attention_does_not_depend_on_the_batch(
        self, backend: Backend, seed: int, parts: list[Segment], spec: AttentionSpec, kind: torch.dtype
    ) -> None:
        case = make_case(backend, parts, spec, kind, seed)
        whole = backend.ops.attention(case.qkv, case.pool, 1, case.batch, spec)
        for index in range(len(parts)):
            alone, qkv = one_segment(case, index)
            first, end = int(case.batch.starts[index]), int(case.batch.starts[index + 1])
            same(backend.ops.attention(qkv, case.pool, 1, alone, spec), whole[first:end])

    @few
    @given(seed=seeds, context=contexts(60), known=st.integers(1, 90), spec=specs(), kind=caches, data=st.data())
    def test_attention_does_not_depend_on_chunks(
        self, backend: Backend, seed: int, context: int, known: int, spec: AttentionSpec, kind: torch.dtype, data: st.DataObject
    ) -> None:
        """A prompt in one chunk, and in any chunks, down to token by token."""
        case = make_case(backend, [Segment(context, known)], spec, kind, seed)
        whole = backend.ops.attention(case.qkv, case.pool, 1, case.batch, spec)
        at = 0
        while at < known:
            count = data.draw(st.integers(1, known - at))
            part = dataclasses.replace(
                case.batch,
                tokens=case.batch.tokens[at : at + count].clone(),
                positions=case.batch.positions[at : at + count].clone(),
                slots=case.batch.slots[at : at + count].clone(),
                parents=case.batch.parents[at : at + count].clone(),
                starts=int32([0, count]),
                known=int32([count]),
                context=int32([context + at]),
            )
            same(backend.ops.attention(case.qkv[at : at + count].clone(), case.pool, 1, part, spec), whole[at : at + count])
            at += count

    @few
    @given(seed=seeds, tree=segments(most_nodes=20), spec=specs(), kind=caches)
    def test_a_node_attends_as_if_its_path_had_been_generated(
        self, backend: Backend, seed: int, tree: Segment, spec: AttentionSpec, kind: torch.dtype
    ) -> None:
        """Each node's path laid out as known tokens gives the same bits at its end, though the tree keeps the nodes elsewhere."""
        case = make_case(backend, [tree], spec, kind, seed)
        whole = backend.ops.attention(case.qkv, case.pool, 1, case.batch, spec)
        for node in range(0, len(tree.parents), 3):
            path = [node]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            rows = [*range(tree.known), *(tree.known + i for i in path)]
            qkv = case.qkv[rows].clone()
            places = case.batch.slots[: len(rows)].clone()
            pool = backend.pool(case.pool.spec, case.pool.keys.shape[1])
            for name in PARTS:
                if (part := getattr(pool, name)) is not None:
                    part.copy_(getattr(case.pool, name))
            backend.ops.write_kv(qkv, pool, 1, places, spec)
            batch = Batch(
                case.batch.tokens[rows].clone(),
                int32([tree.context + i for i in range(len(rows))]),
                places,
                int32([-1] * len(rows)),
                int32([0, len(rows)]),
                int32([len(rows)]),
                case.batch.context.clone(),
                case.batch.pages.clone(),
                int32([len(rows) - 1]),
            )
            same(backend.ops.attention(qkv, pool, 1, batch, spec)[-1], whole[tree.known + node])

    @few
    @given(
        seed=seeds,
        parts=st.lists(segments(), min_size=1, max_size=3),
        spec=specs(),
        kind=caches,
        size=st.sampled_from([1.0, 3e4, 1e-20, 1e-36]),
    )
    def test_write_kv(self, backend: Backend, seed: int, parts: list[Segment], spec: AttentionSpec, kind: torch.dtype, size: float) -> None:
        """Numbers of any size; some entries hold no number, or nothing but zeros."""
        case = make_case(backend, parts, spec, kind, seed, written=False)
        qkv = case.qkv * size
        qkv[::5, -1], qkv[1::5, -3], qkv[2::5] = torch.nan, -torch.inf, 0.0
        expected = copy_pool(case.pool)
        reference.write_kv(qkv, expected, 1, case.batch.slots, spec)
        backend.ops.write_kv(qkv, case.pool, 1, case.batch.slots, spec)
        same_pools(case.pool, expected)

    @few
    @given(seed=seeds, count=st.integers(0, 30), heads=st.integers(1, 3), size=st.sampled_from([8, 20, 64]), kind=caches)
    def test_keep_kv_reads_before_it_writes(
        self, backend: Backend, seed: int, count: int, heads: int, size: int, kind: torch.dtype
    ) -> None:
        pool = backend.pool(PoolSpec(3, heads, size, kind), 4)
        pages, offsets = torch.arange(4).repeat_interleave(pool.page_tokens), torch.arange(pool.page_tokens).repeat(4)
        for layer in range(3):
            entries = (random(seed + 2 * layer + part, len(pages), heads, size) for part in range(2))
            fill(pool, layer, pages, offsets, *entries)
        generator = torch.Generator().manual_seed(seed)
        slots = 4 * pool.page_tokens
        source = torch.randint(0, slots, (count,), generator=generator, dtype=torch.int32)
        target = torch.randperm(slots, generator=generator)[:count].int()
        expected = copy_pool(pool)
        reference.keep_kv(expected, source, target)
        backend.ops.keep_kv(pool, source, target)
        same_pools(pool, expected)

    def test_a_pool_takes_what_its_spec_says(self, backend: Backend) -> None:
        """Pages of 8 bits and their scales are little more than half as large as those of 16."""
        for kind in KV_TYPES:
            pool = backend.pool(PoolSpec(3, 2, 64, kind), 5)
            taken = sum(part.numel() * part.element_size() for name in PARTS if (part := getattr(pool, name)) is not None)
            assert taken == pool.spec.position_bytes * 5 * pool.page_tokens
        assert PoolSpec(3, 2, 64, torch.int8).position_bytes / PoolSpec(3, 2, 64, torch.bfloat16).position_bytes == 68 / 128

    # -- choice --

    @pytest.mark.parametrize(("seed", "index", "vocab"), [(0, 0, 1), (42, 7, 49152), (2**64 - 1, 2**40 + 3, 70001), (2**63, 2**63 - 1, 67)])
    def test_noise(self, backend: Backend, seed: int, index: int, vocab: int) -> None:
        same(backend.ops.noise(seed, index, vocab), reference.noise(seed, index, vocab))

    @few
    @given(places=st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)), max_size=40))
    def test_noise_at(self, backend: Backend, places: list[tuple[int, int, int]]) -> None:
        columns = torch.tensor(places, dtype=torch.int64).view(-1, 3).T
        same(backend.ops.noise_at(*columns), reference.noise_at(*columns))

    @few
    @given(seed=seeds, m=st.integers(0, 10), vocab=st.one_of(st.integers(1, 70), st.just(5003)), noisy=st.booleans(), coarse=st.booleans())
    def test_pick(self, backend: Backend, seed: int, m: int, vocab: int, noisy: bool, coarse: bool) -> None:
        """`coarse` scores tie all the time; some are impossible."""
        scores = random(seed, m, vocab) * 4
        if coarse:
            scores = scores.round()
        scores[random(seed + 1, m, vocab) > 1.5] = -torch.inf
        noise = random(seed + 2, m, vocab).round() if noisy else None
        picks = backend.ops.pick(scores, noise)
        tokens, logprobs = reference.pick(scores, noise)
        same(picks.tokens, tokens)
        close(picks.logprobs, logprobs)
        for row in range(m):
            alone = backend.ops.pick(scores[row : row + 1], None if noise is None else noise[row : row + 1])
            same(alone.logprobs, picks.logprobs[row : row + 1])

    @few
    @given(
        seed=seeds,
        m=st.integers(0, 70),
        vocab=st.integers(1, 700),
        format=st.sampled_from(["f32", "bf16", "int8", "int4"]),
        scale=st.sampled_from([1.0, 0.25]),
        softcap=st.sampled_from([0.0, 3.0]),
    )
    def test_choose_is_logits_and_pick(
        self, backend: Backend, seed: int, m: int, vocab: int, format: str, scale: float, softcap: float
    ) -> None:
        """Bit for bit, for greedy and sampled rows of all temperatures side by side."""
        columns = 33
        x, head = 3 * random(seed, m, columns), backend.pack(random(seed + 1, vocab, columns), format)
        generator = torch.Generator().manual_seed(seed)
        sampled = torch.randint(0, 2, (m,), generator=generator).int()
        temperatures = torch.where(sampled == 1, 0.1 + 2 * torch.rand(m, generator=generator), 1.0)
        draws = Draws(temperatures, sampled, torch.randint(-(1 << 62), 1 << 62, (m,), generator=generator), torch.arange(m) * 7)
        picks = backend.ops.choose(x, head, draws, scale, softcap)
        scores = backend.ops.logits(x, head, scale, softcap) / temperatures.unsqueeze(1)
        noise = torch.zeros(m, vocab)
        for row in sampled.nonzero().flatten().tolist():
            noise[row] = backend.ops.noise(int(draws.seeds[row]) & 0xFFFFFFFFFFFFFFFF, 7 * row, vocab)
        expected = backend.ops.pick(scores, noise)
        same(picks.tokens, expected.tokens)
        same(picks.logprobs, expected.logprobs)

    def test_choose_and_what_is_not_a_number(self, backend: Backend) -> None:
        """It spoils its own row."""
        x = random(1, 3, 8)
        x[1] = torch.nan
        picks = backend.ops.choose(x, backend.pack(random(2, 300, 8), "f32"), Draws.greedy(3))
        assert [int(token) < 0 for token in picks.tokens] == [False, True, False]
        assert picks.logprobs.isnan().tolist() == [False, True, False]

    def test_pick_without_a_choice(self, backend: Backend) -> None:
        scores = random(0, 3, 40)
        scores[0, 17] = torch.nan
        scores[1] = -torch.inf
        picks = backend.ops.pick(scores, None)
        assert picks.tokens.tolist()[:2] == [-1, 0]
        assert picks.logprobs.isnan().tolist() == [True, True, False]


def same_pools(actual: Pool, expected: Pool) -> None:
    """Equal bit by bit, but for what a NaN's bits are."""
    for name in PARTS:
        one, other = getattr(actual, name), getattr(expected, name)
        if one is not None:
            assert torch.equal(one.isnan(), other.isnan())
            same(*(part.masked_fill(part.isnan(), 1) for part in (one, other)))
