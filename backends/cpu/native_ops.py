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
from forerun.backends.cpu.library import OP, PLACES, Library
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
) = range(18)
"""Codes of kernels/cpu/forerun_cpu.h."""

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
FORMATS = {"f32": 0, "bf16": 1, "int8": 2, "int8-groups": 3, "int4": 4, "int4-symmetric": 5}
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
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
        tokens = _int32(tokens)
        out = self._result(tokens, table.shape[1])
        self._do(EMBED, tokens, (_stored(table), tokens, out), (table.shape[1], KINDS[table.dtype], table.shape[0]), (scale,))
        return out

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        x, rows = _float(x), _int32(rows)
        out = self._result(rows, x.shape[1])
        self._do(TAKE, rows, (x, rows, out), (x.shape[1],))
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = _float(x)
        _same(weight.shape[0], x.shape[1], "a norm's weight")
        out = self._result(x, x.shape[1])
        self._do(NORM, x, (x, _float(weight), out), (x.shape[1],), (eps,))
        return out

    def add(self, x: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
        x, residual = _float(x), _float(residual)
        _same(x.shape, residual.shape, "the operands of add")
        out = self._result(x, x.shape[1])
        self._do(ADD, x, (x, residual, out), (x.shape[1],), (scale,))
        return out

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        x, residual = _float(x), _float(residual)
        _same(x.shape, residual.shape, "the operands of add_norm")
        _same(weight.shape[0], x.shape[1], "a norm's weight")
        out, total = self._result(x, x.shape[1]), self._result(x, x.shape[1])
        self._do(ADD_NORM, x, (x, residual, _float(weight), out, total), (x.shape[1],), (eps, scale))
        return out, total

    def gate(self, x: Tensor, activation: str) -> Tensor:
        x = _float(x)
        out = self._result(x, x.shape[1] // 2)
        self._do(GATE, x, (x, out), (x.shape[1] // 2, _activation(activation)))
        return out

    def concat(self, parts: list[Tensor]) -> Tensor:
        parts = [_float(part) for part in parts]
        if len(parts) > MOST_PARTS:
            return self.concat([self.concat(parts[:MOST_PARTS]), *parts[MOST_PARTS:]])
        out = self._result(parts[0], sum(part.shape[1] for part in parts))
        self._do(CONCAT, parts[0], (out, *parts), (len(parts), *(part.shape[1] for part in parts)))
        return out

    # -- products --------------------------------------------------------------------------------------------------------------

    def matmul(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        x = _float(x)
        rows, columns = weight.shape
        _same(x.shape[1], columns, "the columns of x and of the weight")
        out = self._result(x, rows)
        self._do(MATMUL, x, (x, weight.data, _maybe(bias), out), (columns, rows, FORMATS[weight.format]))
        return out

    def logits(self, x: Tensor, head: Weight, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        x = _float(x)
        rows, columns = head.shape
        _same(x.shape[1], columns, "the columns of x and of the head")
        out = self._result(x, rows)
        self._do(LOGITS, x, (x, head.data, out), (columns, rows, FORMATS[head.format]), (scale, softcap))
        return out

    def moe(
        self, x: Tensor, router: Weight, gate_up: list[Weight], down: list[Weight], top_k: int, activation: str, normalize: bool
    ) -> Tensor:
        x = _float(x)
        hidden, inner = x.shape[1], down[0].shape[1]
        shapes = {w.shape for w in gate_up} | {router.shape} | {w.shape for w in down}
        _same(shapes, {(2 * inner, hidden), (len(gate_up), hidden), (hidden, inner)}, "the shapes of a mixture's weights")
        if not 0 < top_k <= len(gate_up):
            raise ValueError(f"a mixture of {len(gate_up)} experts cannot use {top_k} of them")
        out = self._result(x, hidden)
        formats = {w.format for w in (*gate_up, *down)}
        _same(len(formats), 1, "the number of formats of a mixture's experts")
        with self._aside():
            experts = torch.tensor([w.data.data_ptr() for w in (*gate_up, *down)], dtype=torch.int64)
        shape = (hidden, len(gate_up), top_k, inner, _activation(activation), int(normalize))
        self._do(MOE, x, (x, router.data, experts, out), (*shape, FORMATS[router.format], FORMATS[formats.pop()]))
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
        _fused(qkv, spec)
        if qkv.dtype != torch.float32 or not qkv.is_contiguous():
            raise ValueError("rope works in place: qkv must be contiguous float32")
        sizes = (0 if q_norm is None else q_norm.shape[0], 0 if k_norm is None else k_norm.shape[0])
        shape = (spec.heads, spec.kv_heads, spec.head_dim, cos.shape[1], *sizes, cos.shape[0])
        self._do(ROPE, qkv, (qkv, _int32(positions), _float(cos), _float(sin), _maybe(q_norm), _maybe(k_norm)), shape, (eps,))
        return qkv

    def write_kv(self, qkv: Tensor, pool: Pool, layer: int, slots: Tensor, spec: AttentionSpec) -> None:
        qkv = _float(qkv)
        _fused(qkv, spec)
        keys, values = _layer(pool, layer)
        shape = (spec.heads, spec.kv_heads, spec.head_dim, KINDS[pool.keys.dtype], pool.keys.shape[1])
        self._do(WRITE_KV, qkv, (qkv, keys, values, _int32(slots)), shape)

    def attention(self, qkv: Tensor, pool: Pool, layer: int, rows: Rows, spec: AttentionSpec) -> Tensor:
        qkv = _float(qkv)
        _fused(qkv, spec)
        keys, values = _layer(pool, layer)
        out = self._result(qkv, spec.heads * spec.head_dim)
        where = (rows.positions, rows.slots, rows.parents, rows.starts, rows.known, rows.context, rows.pages)
        shape = (spec.heads, spec.kv_heads, spec.head_dim, spec.window, KINDS[pool.keys.dtype], pool.keys.shape[1])
        operands = (qkv, keys, values, out, *where, _maybe(spec.sinks))
        self._do(ATTENTION, qkv, operands, shape, (spec.scale, spec.softcap), rows.known.shape[0], rows.pages.shape[1])
        return out

    def keep_kv(self, pool: Pool, source: Tensor, target: Tensor) -> None:
        _same(source.shape, target.shape, "source and target slots")
        keys, values = _layer(pool, 0)
        layers, pages, heads, _, size = pool.keys.shape
        source, target = _int32(source), _int32(target)
        self._do(KEEP_KV, source, (keys, values, source, target), (layers, pages, heads, size, KINDS[pool.keys.dtype], source.shape[0]))

    # -- choice ----------------------------------------------------------------------------------------------------------------

    def noise(self, seed: int, index: int, vocab: int) -> Tensor:
        out = torch.empty(vocab)
        words = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, index & 0xFFFFFFFF, index >> 32 & 0xFFFFFFFF)
        self._do(NOISE, out, (out,), (*(word - (1 << 32) if word >> 31 else word for word in words), vocab))
        return out

    def noise_at(self, seeds: Tensor, indices: Tensor, tokens: Tensor) -> Tensor:
        seeds, indices, tokens = (each.to(torch.int64).contiguous() for each in (seeds, indices, tokens))
        out = torch.empty(seeds.shape[0])
        self._do(NOISE_AT, seeds, (seeds, indices, tokens, out), (seeds.shape[0],))
        return out

    def pick(self, scores: Tensor, noise: Tensor | None) -> Picks:
        scores = _float(scores)
        if noise is not None:
            _same(noise.shape, scores.shape, "scores and noise")
        tokens, logprobs = self._result(scores, 0, torch.int64), self._result(scores, 0)
        self._do(PICK, scores, (scores, _maybe(noise), tokens, logprobs), (scores.shape[1],))
        return Picks(tokens, logprobs)

    def choose(self, x: Tensor, head: Weight, draws: Draws, scale: float = 1.0, softcap: float = 0.0) -> Picks:
        x = _float(x)
        rows, columns = head.shape
        _same(x.shape[1], columns, "the columns of x and of the head")
        how = (_float(draws.temperatures), _int32(draws.sampled), _int64(draws.seeds), _int64(draws.indices))
        _same({len(each) for each in how}, {x.shape[0]}, "rows and draws")
        tokens, logprobs = self._result(x, 0, torch.int64), self._result(x, 0)
        self._do(CHOOSE, x, (x, head.data, *how, tokens, logprobs), (columns, rows, FORMATS[head.format]), (scale, softcap))
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
        operands: Sequence[Tensor | int | None],
        integers: Sequence[int],
        floats: Sequence[float] = (),
        segments: int = 0,
        columns: int = 0,
    ) -> None:
        """Runs one op on as many rows as `like` has; records it, if a recorder listens."""
        places = []
        for place, operand in enumerate(operands):
            if operand is None:
                places.append(-1)
                continue
            places.append(place)
            self._table[place] = operand if isinstance(operand, int) else operand.data_ptr()
        self._op.raw = encode(code, N, places, integers, floats)
        sizes = self._sizes
        sizes[0], sizes[1], sizes[2], sizes[3] = like.shape[0], 0, segments, columns
        self._library.run(self._at[0], 1, self._at[1], self._at[2])
        if self._recorder is not None:
            self._recorder.emit(code, self._recorder.kind(like), operands, integers, floats)

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


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()


def _int32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.int32 and x.is_contiguous() else x.int().contiguous()


def _int64(x: Tensor) -> Tensor:
    return x if x.dtype == torch.int64 and x.is_contiguous() else x.long().contiguous()


def _stored(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _maybe(x: Tensor | None) -> Tensor | None:
    return None if x is None else _float(x)


def _same(a: object, b: object, what: str) -> None:
    if a != b:
        raise ValueError(f"{what} do not match: {a} and {b}")


def _activation(name: str) -> int:
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _fused(qkv: Tensor, spec: AttentionSpec) -> None:
    _same(qkv.shape[1], (spec.heads + 2 * spec.kv_heads) * spec.head_dim, "the width of qkv and the layer's heads")


def _layer(pool: Pool, layer: int) -> tuple[int, int]:
    """Addresses of a layer's keys ([pages, kv_heads, D, 16] in memory) and values."""
    keys, values = pool.keys, pool.values
    offset = layer * keys.stride(0) * keys.element_size()
    return keys.data_ptr() + offset, values.data_ptr() + offset
