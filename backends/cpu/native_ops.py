"""The ops of the CPU in native kernels. An op checks its operands, makes its result, and runs, or is recorded (`program.py`)."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forerun.backends.base import AttentionSpec, Draws, Picks, Pool, Rows, Weight
from forerun.backends.cpu import operands
from forerun.backends.cpu.library import OP, PLACES, Library
from forerun.backends.cpu.operands import KINDS, floats, ints, longs, maybe, shaped
from forerun.backends.cpu.program import N, Program, Recorder, Unrecordable, encode

log = logging.getLogger(__name__)

(
    EMBED,
    TAKE,
    NORM,
    ADD,
    ADD_NORM,
    MATMUL,
    ROPE,
    WRITE_KV,
    ATTENTION,
    KEEP_KV,
    GATE,
    MOE,
    LOGITS,
    PICK,
    NOISE,
    NOISE_AT,
    CONCAT,
    CHOOSE,
    MLP,
) = range(19)
"""Codes of kernels/cpu/forerun_cpu.h."""

MOST_PARTS = 9
"""Tensors that one CONCAT joins."""


class NativeOps:
    """`Ops` over a `Library`. One step at a time: not for two threads."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._recorder: Recorder | None = None
        self._op = ctypes.create_string_buffer(OP.size)
        self._table = (ctypes.c_uint64 * PLACES)()
        self._sizes = (ctypes.c_int32 * 4)()
        self._at = ctypes.addressof(self._op), ctypes.addressof(self._table), ctypes.addressof(self._sizes)

    # -- rows ------------------------------------------------------------------------------------------------------------------

    def embed(self, table: Tensor, tokens: Tensor, scale: float = 1.0) -> Tensor:
        kind, tokens = operands.table_kind(table), ints(tokens)
        shaped(tokens, (None,), "tokens")
        out = self._result(tokens, table.shape[1])
        self._do(EMBED, tokens, (_stored(table), tokens, out), (table.shape[1], kind, table.shape[0]), (scale,))
        return out

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        x, rows = floats(x), ints(rows)
        shaped(x, (None, None), "what rows are taken of")
        shaped(rows, (None,), "the rows that are taken")
        out = self._result(rows, x.shape[1])
        recorded = None if self._recorder is None else (x.shape[1], self._recorder.rows_of(x))
        self._do(TAKE, rows, (x, rows, out), (x.shape[1], x.shape[0]), recorded=recorded)
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = floats(x)
        shaped(x, (None, None), "what a norm is of")
        shaped(weight, (x.shape[1],), "a norm's weight")
        out = self._result(x, x.shape[1])
        self._do(NORM, x, (x, floats(weight), out), (x.shape[1],), (eps,))
        return out

    def add(self, x: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
        x, residual = floats(x), floats(residual)
        shaped(x, (None, None), "what is added")
        shaped(residual, x.shape, "what x is added to")
        out = self._result(x, x.shape[1])
        self._do(ADD, x, (x, residual, out), (x.shape[1],), (scale,), beside=(residual,))
        return out

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        x, residual = floats(x), floats(residual)
        shaped(x, (None, None), "what is added")
        shaped(residual, x.shape, "what x is added to")
        shaped(weight, (x.shape[1],), "a norm's weight")
        out, total = self._result(x, x.shape[1]), self._result(x, x.shape[1])
        self._do(ADD_NORM, x, (x, residual, floats(weight), out, total), (x.shape[1],), (eps, scale), beside=(residual,))
        return out, total

    def gate(self, x: Tensor, activation: str) -> Tensor:
        x = floats(x)
        shaped(x, (None, None), "gate and up, side by side,")
        shaped(x, (None, x.shape[1] // 2 * 2), "gate and up, side by side,")
        out = self._result(x, x.shape[1] // 2)
        self._do(GATE, x, (x, out), (x.shape[1] // 2, operands.activation(activation)))
        return out

    def concat(self, parts: list[Tensor]) -> Tensor:
        if not parts:
            raise ValueError("concat needs at least one part")
        parts = [floats(part) for part in parts]
        shaped(parts[0], (None, None), "a part")
        for part in parts:
            shaped(part, (parts[0].shape[0], None), "a part, beside the first,")
        if len(parts) > MOST_PARTS:
            return self.concat([self.concat(parts[:MOST_PARTS]), *parts[MOST_PARTS:]])
        out = self._result(parts[0], sum(part.shape[1] for part in parts))
        self._do(CONCAT, parts[0], (out, *parts), (len(parts), *(part.shape[1] for part in parts)), beside=parts)
        return out

    # -- products --------------------------------------------------------------------------------------------------------------

    def matmul(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        x = floats(x)
        shape = operands.product(x, weight)
        if bias is not None:
            shaped(bias, (weight.shape[0],), "a bias")
        out = self._result(x, weight.shape[0])
        self._do(MATMUL, x, (x, weight.data, maybe(bias), out), shape)
        return out

    def mlp(
        self,
        x: Tensor,
        gate_up: Weight,
        down: Weight,
        activation: str,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        if not gate_up.halves:
            return self.matmul(self.gate(self.matmul(x, gate_up, gate_up_bias), activation), down, down_bias)
        x = floats(x)
        inputs, inner, format, outputs, last = operands.two_products(x, gate_up, down)
        for bias, size in ((gate_up_bias, 2 * inner), (down_bias, outputs)):
            if bias is not None:
                shaped(bias, (size,), "a bias")
        out = self._result(x, outputs)
        tensors = (x, gate_up.data, maybe(gate_up_bias), down.data, maybe(down_bias), out)
        self._do(MLP, x, tensors, (inputs, inner, format, operands.activation(activation), outputs, last))
        return out

    def logits(self, x: Tensor, head: Weight, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        x = floats(x)
        shape = operands.product(x, head)
        out = self._result(x, head.shape[0])
        self._do(LOGITS, x, (x, head.data, out), shape, (scale, softcap))
        return out

    def moe(
        self, x: Tensor, router: Weight, gate_up: list[Weight], down: list[Weight], top_k: int, activation: str, normalize: bool
    ) -> Tensor:
        x = floats(x)
        hidden, inner, *formats = operands.mixture(x, router, gate_up, down, top_k)
        out = self._result(x, hidden)
        with self._aside():
            experts = torch.tensor([w.data.data_ptr() for w in (*gate_up, *down)], dtype=torch.int64)
        if self._recorder is not None:
            self._recorder.tape.keep += [w.data for w in (*gate_up, *down)]
        shape = (hidden, len(gate_up), top_k, inner, operands.activation(activation), int(normalize), *formats)
        self._do(MOE, x, (x, router.data, experts, out), shape)
        return out

    # -- attention -------------------------------------------------------------------------------------------------------------

    def rope(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        spec: AttentionSpec,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        operands.rotation(qkv, positions, cos, sin, spec)
        sizes = operands.head_norm(q_norm, spec.heads, spec), operands.head_norm(k_norm, spec.kv_heads, spec)
        shape = (spec.heads, spec.kv_heads, spec.head_dim, cos.shape[1], *sizes, cos.shape[0])
        positions = ints(positions)
        tensors = (qkv, positions, floats(cos), floats(sin), maybe(q_norm), maybe(k_norm))
        self._do(ROPE, qkv, tensors, shape, (eps,), beside=(positions,))
        return qkv

    def write_kv(self, qkv: Tensor, pool: Pool, layer: int, slots: Tensor, spec: AttentionSpec) -> None:
        qkv, slots = floats(qkv), ints(slots)
        operands.fused(qkv, spec)
        shaped(slots, (qkv.shape[0],), "the slots of qkv's rows")
        keys, values = operands.layer_of(pool, layer, spec)
        shape = (spec.heads, spec.kv_heads, spec.head_dim, KINDS[pool.keys.dtype], pool.keys.shape[1])
        self._do(WRITE_KV, qkv, (qkv, keys, values, slots), shape, beside=(slots,))

    def attention(self, qkv: Tensor, pool: Pool, layer: int, rows: Rows, spec: AttentionSpec) -> Tensor:
        qkv = floats(qkv)
        operands.fused(qkv, spec)
        keys, values = operands.layer_of(pool, layer, spec)
        where = operands.segments(rows, qkv.shape[0])
        if spec.sinks is not None:
            shaped(spec.sinks, (spec.heads,), "sinks")
        out = self._result(qkv, spec.heads * spec.head_dim)
        shape = (spec.heads, spec.kv_heads, spec.head_dim, spec.window, KINDS[pool.keys.dtype], pool.keys.shape[1])
        tensors = (qkv, keys, values, out, *where, maybe(spec.sinks))
        sizes = (rows.known.shape[0], rows.pages.shape[1])
        self._do(ATTENTION, qkv, tensors, shape, (spec.scale, spec.softcap), sizes, beside=where[:3], given=where[3:])
        return out

    def keep_kv(self, pool: Pool, source: Tensor, target: Tensor) -> None:
        source, target = ints(source), ints(target)
        shaped(source, (None,), "source slots")
        shaped(target, source.shape, "target slots, beside the source's,")
        keys, values = operands.whole(pool)
        layers, pages, heads, _, size = pool.keys.shape
        self._do(KEEP_KV, source, (keys, values, source, target), (layers, pages, heads, size, KINDS[pool.keys.dtype], source.shape[0]))

    # -- choice ----------------------------------------------------------------------------------------------------------------

    def noise(self, seed: int, index: int, vocab: int) -> Tensor:
        out = torch.empty(vocab)
        words = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, index & 0xFFFFFFFF, index >> 32 & 0xFFFFFFFF)
        self._do(NOISE, out, (out,), (*(word - (1 << 32) if word >> 31 else word for word in words), vocab))
        return out

    def noise_at(self, seeds: Tensor, indices: Tensor, tokens: Tensor) -> Tensor:
        seeds, indices, tokens = (longs(each) for each in (seeds, indices, tokens))
        shaped(seeds, (None,), "seeds")
        shaped(indices, seeds.shape, "indices, beside the seeds,")
        shaped(tokens, seeds.shape, "tokens, beside the seeds,")
        out = torch.empty(seeds.shape[0])
        self._do(NOISE_AT, seeds, (seeds, indices, tokens, out), (seeds.shape[0],))
        return out

    def pick(self, scores: Tensor, noise: Tensor | None) -> Picks:
        scores = floats(scores)
        operands.choices(scores)
        if noise is not None:
            noise = floats(noise)
            shaped(noise, scores.shape, "noise, beside the scores,")
        tokens, logprobs = self._result(scores, 0, torch.int64), self._result(scores, 0)
        beside = () if noise is None else (noise,)
        self._do(PICK, scores, (scores, noise, tokens, logprobs), (scores.shape[1],), beside=beside)
        return Picks(tokens, logprobs)

    def choose(self, x: Tensor, head: Weight, draws: Draws, scale: float = 1.0, softcap: float = 0.0) -> Picks:
        x = floats(x)
        shape = operands.product(x, head)
        how = (floats(draws.temperatures), ints(draws.sampled), longs(draws.seeds), longs(draws.indices))
        for name, each in zip(("temperatures", "sampled", "seeds", "indices"), how):
            shaped(each, (x.shape[0],), f"{name} of the rows of x")
        tokens, logprobs = self._result(x, 0, torch.int64), self._result(x, 0)
        self._do(CHOOSE, x, (x, head.data, *how, tokens, logprobs), shape, (scale, softcap), beside=how)
        return Picks(tokens, logprobs)

    # -- running and recording -------------------------------------------------------------------------------------------------

    def _result(self, like: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor with a row for each of `like`'s; `width` 0: one value a row."""
        shape = (like.shape[0], width) if width else (like.shape[0],)
        if self._recorder is None:
            return torch.empty(shape, dtype=dtype)
        with self._aside():
            out = torch.empty(shape, dtype=dtype)
        self._recorder.result(out, self._recorder.kind(like))
        return out

    def _do(
        self,
        code: int,
        like: Tensor,
        tensors: Sequence[Tensor | int | None],
        integers: Sequence[int],
        constants: Sequence[float] = (),
        segments: tuple[int, int] = (0, 0),
        *,
        beside: Sequence[Tensor] = (),
        given: Sequence[Tensor] = (),
        recorded: Sequence[int] | None = None,
    ) -> None:
        """Runs one op on as many rows as `like` has; records it, if a recorder listens. `segments`: their number, and the columns of their
        pages. `beside`: what else has a row for each of `like`'s; `given`: what must be the batch's own; `recorded`: integers that differ
        in a recording."""
        places = []
        for place, tensor in enumerate(tensors):
            if tensor is None:
                places.append(-1)
                continue
            places.append(place)
            self._table[place] = tensor if isinstance(tensor, int) else tensor.data_ptr()
        self._op.raw = encode(code, N, places, integers, constants)
        sizes = self._sizes
        sizes[0], sizes[1], sizes[2], sizes[3] = like.shape[0], 0, *segments
        self._library.run(self._at[0], 1, self._at[1], self._at[2])
        if self._recorder is not None:
            kind = self._recorder.rows(like, beside, given)
            self._recorder.emit(code, kind, tensors, integers if recorded is None else recorded, constants)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Torch operators in here belong to an op, not to the recorded function."""
        recorder = self._recorder
        if recorder is None:
            yield
            return
        recorder.inside = True
        try:
            yield
        finally:
            recorder.inside = False

    def record(self, function: Callable[[Any], Any], batch: Rows) -> tuple[Any, Program]:
        """Runs the function on the batch: its result, and the program that does the same for any batch of the same kind. Unrecordable
        where it does more than ops."""
        recorder = Recorder(batch)
        self._recorder = recorder
        try:
            with recorder:
                result = function(batch)
        finally:
            self._recorder = None
        return result, Program(recorder, result, self._library)


class Captured:
    """A function of a batch that is recorded when it is first called with each kind of batch: with logits of no row, of all rows, of some.
    (A function may leave out work where it has none; between sizes of one kind it may not differ.)"""

    def __init__(self, function: Callable[[Any], Any], ops: NativeOps) -> None:
        self._function = function
        self._ops = ops
        self._programs: dict[tuple[bool, bool], Program] = {}
        self._plain = False

    def __call__(self, batch: Rows) -> Any:
        n, m = batch.tokens.shape[0], batch.logit_rows.shape[0]
        kind = (m == 0, m == n)
        program = self._programs.get(kind)
        if program is not None:
            return program(batch)
        if not self._plain:
            try:
                result, self._programs[kind] = self._ops.record(self._function, batch)
                return result
            except Unrecordable as reason:
                log.info("the forward is not recorded, each op is called from Python: %s", reason)
                self._plain = True
        return self._function(batch)


def _stored(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()
