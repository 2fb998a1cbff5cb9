"""Batches and pools for tests of ops: sequences of any shape, trees, scattered pages, and poison wherever nothing may be read."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st
from torch import Tensor

from forerun.backends.base import AttentionSpec, Backend, Pool, PoolSpec
from forerun.engine.batch import Batch
from forerun.kernels import quant


@dataclasses.dataclass(frozen=True)
class Segment:
    """`parents`: of each node, −1 or an index below its own. `chain_in_place`: node i lies in the slot of position context + known + i."""

    context: int
    known: int
    parents: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return self.known + len(self.parents)

    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths


def contexts(most: int) -> st.SearchStrategy[int]:
    """Short ones, and some around where kernels may cut long ones."""
    return st.one_of(st.integers(0, most), st.integers(0, most), st.sampled_from([239, 250, 256, 257, 270, 500, 512, 530]))


@st.composite
def segments(draw: st.DrawFn, most_context: int = 70, most_known: int = 40, most_nodes: int = 12, long: bool = True) -> Segment:
    context = draw(contexts(most_context) if long else st.integers(0, most_context))
    known = draw(st.integers(1, most_known))
    count = draw(st.integers(0, most_nodes))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(count))
    return Segment(context, known, parents)


@dataclasses.dataclass
class Case:
    """A batch, the pool it works in (poisoned outside of what was written), and the fused projections of its rows."""

    batch: Batch
    pool: Pool
    qkv: Tensor
    spec: AttentionSpec


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_batch(parts: list[Segment], page_tokens: int, generator: torch.Generator, spare: int = 3) -> tuple[Batch, int]:
    """A batch over scattered pages, and how many pages the pool must have."""
    needed = [-(-(part.context + part.rows) // page_tokens) for part in parts]
    total = sum(needed) + spare
    order = torch.randperm(total, generator=generator).tolist()
    tokens, positions, slots, parents, starts, pages = [], [], [], [], [0], []
    for part, count in zip(parts, needed):
        own = [order.pop() for _ in range(count)]
        base = part.context + part.known
        at = [*range(part.context, base), *(base - 1 + depth for depth in part.depths())]
        first = starts[-1]
        for row in range(part.rows):
            place = part.context + row
            slots.append(own[place // page_tokens] * page_tokens + place % page_tokens)
        positions += at
        parents += [-1] * part.known + [-1 if p < 0 else first + part.known + p for p in part.parents]
        starts.append(first + part.rows)
        pages.append(own)
    width = max(needed)
    tokens = torch.randint(0, 50, (starts[-1],), generator=generator, dtype=torch.int32)
    table = int32([page for own in pages for page in own + [0] * (width - len(own))]).view(len(parts), width)
    ends = int32([start - 1 for start in starts[1:]])
    known, context = int32([part.known for part in parts]), int32([part.context for part in parts])
    return Batch(tokens, int32(positions), int32(slots), int32(parents), int32(starts), known, context, table, ends), total


def poison(pool: Pool) -> None:
    """Nothing may be read that was not written: NaN everywhere; where entries are codes, in their scales."""
    for cache, scales in ((pool.keys, pool.key_scales), (pool.values, pool.value_scales)):
        if scales is None:
            cache.fill_(torch.nan)
        else:
            cache.fill_(77)
            scales.fill_(torch.nan)


def fill(pool: Pool, layer: int, pages: object, offset: object, keys: Tensor, values: Tensor) -> None:
    """Numbers, as the pool's type holds them, into [layer][pages, :, offset]."""
    for cache, scales, numbers in ((pool.keys, pool.key_scales, keys), (pool.values, pool.value_scales, values)):
        if scales is not None:
            numbers, scales[layer][pages, :, offset] = quant.entries(numbers)
        cache[layer][pages, :, offset] = numbers.to(cache.dtype)


def copy_pool(pool: Pool) -> Pool:
    """Another pool with the same contents. The memory of `backend.pool` may hold them in any order: an index into it does not care."""
    parts = (pool.keys, pool.values, pool.key_scales, pool.value_scales)
    return dataclasses.replace(pool, **dict(zip(PARTS, (None if part is None else part.clone() for part in parts))))


PARTS = ("keys", "values", "key_scales", "value_scales")


def make_case(
    backend: Backend, parts: list[Segment], spec: AttentionSpec, dtype: torch.dtype, seed: int, written: bool = True, layers: int = 2
) -> Case:
    """Every position of the segments' contexts holds random KV; the rest is poisoned. `written`: the batch's own rows are written too,
    in layer 1."""
    generator = torch.Generator().manual_seed(seed)
    size = backend.caps.page_tokens
    batch, pages = make_batch(parts, size, generator)
    pool = backend.pool(PoolSpec(layers, spec.kv_heads, spec.head_dim, dtype), pages)
    poison(pool)
    for part, own in zip(parts, batch.pages.tolist()):
        at = torch.arange(part.context)
        entries = (torch.randn(part.context, spec.kv_heads, spec.head_dim, generator=generator) for _ in range(2))
        fill(pool, 1, torch.tensor(own)[at // size], at % size, *entries)
    qkv = torch.randn(int(batch.starts[-1]), (spec.heads + 2 * spec.kv_heads) * spec.head_dim, generator=generator)
    if written:
        backend.ops.write_kv(qkv, pool, 1, batch.slots, spec)
    return Case(batch, pool, qkv, spec)


def one_segment(case: Case, index: int) -> tuple[Batch, Tensor]:
    """The batch of one segment alone, and its rows' projections; the pool is shared."""
    batch = case.batch
    first, end = int(batch.starts[index]), int(batch.starts[index + 1])
    parents = torch.where(batch.parents[first:end] < 0, -1, batch.parents[first:end] - first).int()
    alone = Batch(
        batch.tokens[first:end].clone(),
        batch.positions[first:end].clone(),
        batch.slots[first:end].clone(),
        parents,
        int32([0, end - first]),
        batch.known[index : index + 1].clone(),
        batch.context[index : index + 1].clone(),
        batch.pages[index : index + 1].clone(),
        int32([end - first - 1]),
    )
    return alone, case.qkv[first:end].clone()
