"""What reaches the kernels: they believe every size, so here each operand is brought into the form they read, or refused.

A refusal is a ValueError that names the operand, its shape and the one it must have. Where a program is replayed nothing of this runs:
it was recorded by a call that passed, and a replay changes addresses and the number of rows. What tensors hold (tokens, slots, pages …)
the kernels themselves check, every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.backends.base import AttentionSpec, Pool, Rows, Weight

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
FORMATS = {"f32": 0, "bf16": 1, "int8": 2, "int8-groups": 3, "int4": 4, "int4-symmetric": 5}
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""What a cache may hold; a table of embeddings, the first two."""

PANEL, GROUP, PAGE, LINE = 32, 32, 16, 64
"""Of kernels/cpu/kernels.h; bytes of a cache line, which kernels load at once."""

GROUP_BYTES = {"int8": 32, "int8-groups": 34, "int4": 20, "int4-symmetric": 18}
"""Of a column of a packed weight: codes, scale and minimum of 32 values of K."""


def floats(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()


def ints(x: Tensor) -> Tensor:
    return x if x.dtype == torch.int32 and x.is_contiguous() else x.int().contiguous()


def longs(x: Tensor) -> Tensor:
    return x if x.dtype == torch.int64 and x.is_contiguous() else x.long().contiguous()


def maybe(x: Tensor | None) -> Tensor | None:
    return None if x is None else floats(x)


def shaped(x: Tensor, shape: Sequence[int | None], what: str) -> None:
    """None: any size."""
    if len(x.shape) != len(shape) or any(want is not None and have != want for have, want in zip(x.shape, shape)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{what} has the shape {list(x.shape)} and must have [{wanted}]")


def equal(a: object, b: object, what: str) -> None:
    if a != b:
        raise ValueError(f"{what} do not match: {a} and {b}")


def activation(name: str) -> int:
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def table_kind(table: Tensor) -> int:
    shaped(table, (None, None), "a table of embeddings")
    if table.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"a table of embeddings is float32 or bfloat16, not {table.dtype}; convert it")
    return KINDS[table.dtype]


def choices(scores: Tensor) -> None:
    shaped(scores, (None, None), "scores")
    if not scores.shape[1]:
        raise ValueError(f"scores {list(scores.shape)} leave nothing to pick")


def product(x: Tensor, weight: Weight) -> tuple[int, int, int]:
    """(K, N, format) of x [n, K] times a weight [N, K] that this backend packed."""
    rows, columns = weight.shape
    shaped(x, (None, columns), "what a weight multiplies")
    return columns, rows, packed(weight)


def two_products(x: Tensor, gate_up: Weight, down: Weight) -> tuple[int, int, int, int, int]:
    """(K, F, format, N, format of down) of an MLP: x [n, K], gate_up [2F, K] with its halves side by side, down [N, F]."""
    rows, columns = gate_up.shape
    shaped(x, (None, columns), "what gate and up multiply")
    if rows % 2 or down.shape[1] != rows // 2:
        raise ValueError(f"gate and up of the shape {[rows, columns]} do not go with a down of the shape {list(down.shape)}")
    return columns, rows // 2, packed(gate_up, halves=True), down.shape[0], packed(down)


def packed(weight: Weight, halves: bool = False) -> int:
    """The format of a weight that lies in memory as kernels.h and quant.h say."""
    rows, columns = weight.shape
    format = weight.format
    if weight.halves != halves:
        raise ValueError(f"a weight {list(weight.shape)} {'is' if weight.halves else 'is not'} packed with halves, which mlp alone takes")
    if halves:
        rows = -(-rows // PANEL) * PANEL
    if format not in FORMATS:
        raise ValueError(f"the kernels have no weight format {format!r}; pack it as one of {', '.join(FORMATS)}")
    column = 4 * columns if format == "f32" else -(-columns // 2) * 4
    if format in GROUP_BYTES:
        column = -(-columns // GROUP) * GROUP_BYTES[format] + 4
    held, needed = weight.data.nbytes if torch.is_tensor(weight.data) else 0, -(-rows // PANEL) * PANEL * column
    if held != needed or not weight.data.is_contiguous():
        raise ValueError(f"a weight {list(weight.shape)} in {format} takes {needed} bytes, not {held}; pack it with this backend")
    if weight.data.data_ptr() % LINE:
        raise ValueError(f"a weight {list(weight.shape)} begins inside a cache line; pack it with this backend")
    return FORMATS[format]


def mixture(x: Tensor, router: Weight, gate_up: list[Weight], down: list[Weight], top_k: int) -> tuple[int, int, int, int]:
    """(H, F, format of the router, format of the experts)."""
    shaped(x, (None, None), "what a mixture multiplies")
    if not gate_up or len(gate_up) != len(down):
        raise ValueError(f"a mixture has as many gate_up weights as down weights, at least one, not {len(gate_up)} and {len(down)}")
    if not 0 < top_k <= len(gate_up):
        raise ValueError(f"a mixture of {len(gate_up)} experts cannot use {top_k} of them")
    hidden, inner = x.shape[1], down[0].shape[1]
    for what, weights, shape in (
        ("a router", [router], (len(gate_up), hidden)),
        ("an expert's gate_up", gate_up, (2 * inner, hidden)),
        ("an expert's down", down, (hidden, inner)),
    ):
        for weight in weights:
            if tuple(weight.shape) != shape:
                raise ValueError(f"{what} has the shape {list(weight.shape)} and must have {list(shape)}")
    formats = {packed(weight) for weight in (*gate_up, *down)}
    equal(len(formats), 1, "the number of formats of a mixture's experts")
    return hidden, inner, packed(router), formats.pop()


def fused(qkv: Tensor, spec: AttentionSpec) -> None:
    if spec.kv_heads < 1 or spec.head_dim < 1 or spec.heads % spec.kv_heads:
        raise ValueError(f"{spec.heads} heads cannot share {spec.kv_heads} heads of keys of size {spec.head_dim}")
    shaped(qkv, (None, (spec.heads + 2 * spec.kv_heads) * spec.head_dim), "qkv, made for the layer's heads,")


def rotation(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec) -> None:
    """In place: what was made for the kernels would not be the caller's."""
    fused(qkv, spec)
    if qkv.dtype != torch.float32 or not qkv.is_contiguous():
        raise ValueError("rope works in place: qkv must be contiguous float32")
    shaped(positions, (qkv.shape[0],), "the positions of qkv's rows")
    shaped(cos, (None, None), "cos")
    shaped(sin, cos.shape, "sin, beside cos,")
    if 2 * cos.shape[1] > spec.head_dim:
        raise ValueError(f"cos has {cos.shape[1]} columns and turns twice as many of the {spec.head_dim} dimensions of a head; cut it")


def head_norm(weight: Tensor | None, heads: int, spec: AttentionSpec) -> int:
    """The size of a norm over each head or over all of them together; 0: there is none."""
    if weight is None:
        return 0
    if tuple(weight.shape) not in ((spec.head_dim,), (heads * spec.head_dim,)):
        shapes = f"[{spec.head_dim}], for each head, or [{heads * spec.head_dim}], for all together"
        raise ValueError(f"a norm of heads has the shape {list(weight.shape)} and must have {shapes}")
    return weight.shape[0]


def segments(rows: Rows, n: int) -> tuple[Tensor, ...]:
    """The fields of a batch that attention reads, as they are: a recording knows them by their identity."""
    shaped(rows.known, (None,), "a batch's known")
    count = rows.known.shape[0]
    shaped(rows.pages, (count, None), "a batch's pages")
    for name, size in (("positions", n), ("slots", n), ("parents", n), ("starts", count + 1), ("known", count), ("context", count)):
        shaped(getattr(rows, name), (size,), f"a batch's {name}")
    fields = (rows.positions, rows.slots, rows.parents, rows.starts, rows.known, rows.context, rows.pages)
    if any(field.dtype != torch.int32 or not field.is_contiguous() for field in fields):
        raise ValueError("a batch's fields must be contiguous int32")
    return fields


def layer_of(pool: Pool, layer: int, spec: AttentionSpec) -> tuple[int, int]:
    """Addresses of a layer's keys and values."""
    keys, values = whole(pool)
    layers, _, heads, _, size = pool.keys.shape
    if not 0 <= layer < layers:
        raise ValueError(f"there is no layer {layer} in a pool of {layers}")
    equal((heads, size), (spec.kv_heads, spec.head_dim), "the heads and sizes of a pool and of the layer")
    offset = layer * pool.keys.stride(0) * pool.keys.element_size()
    return keys + offset, values + offset


def whole(pool: Pool) -> tuple[int, int]:
    """Addresses of all keys ([layers, pages, kv_heads, D, 16] in memory) and values, scales behind the entries of each page and head."""
    if pool.keys.dtype not in KINDS:
        raise ValueError(f"a cache of {pool.keys.dtype} is none of {', '.join(map(str, KINDS))}")
    for what, cache, scales, inner in (("keys", pool.keys, pool.key_scales, (1, PAGE)), ("values", pool.values, pool.value_scales, None)):
        shaped(cache, pool.keys.shape, f"a pool's {what}")
        _, pages, heads, positions, size = cache.shape
        coded = cache.dtype == torch.int8
        block = PAGE * size + (4 * PAGE if coded else 0)
        strides = (pages * heads * block, heads * block, block, *(inner or (size, 1)))
        behind = scales.data_ptr() - cache.data_ptr() if scales is not None else 0
        lies = all(extent < 2 or have == want for extent, have, want in zip(cache.shape, cache.stride(), strides))
        if cache.numel() and behind != (PAGE * size if coded else 0):
            lies = False
        if cache.dtype != pool.keys.dtype or positions != PAGE or not lies:
            raise ValueError(f"a pool's {what} do not lie as the kernels read them; make the pool with this backend")
    return pool.keys.data_ptr(), pool.values.data_ptr()
