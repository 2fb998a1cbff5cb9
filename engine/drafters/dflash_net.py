"""The network of block drafters (DFlash 2602.06036, DSpark 2607.05147): a whole block of guesses in one forward.

    context   H = norm(W [features of several target layers])    one entry for each known token, of these features alone:
              every layer's own keys and values of H, at the token's position, in the drafter's pool
    block     x0 = [root, mask, mask, …] at positions n, n + 1, …
              x ← x + attention(norm(x)) ;  x ← x + mlp(norm(x)) ;  … ;  norm(x)

                        entries 0 … n−1     root  mask  mask
              root      ■ ■ ■ ■ ■ ■ ■ ■      ■     ■     ■        a block sees the context and, as a rule, all of itself;
              mask      ■ ■ ■ ■ ■ ■ ■ ■      ■     ■     ■        layers with a window see its part of the context, and may
              mask      ■ ■ ■ ■ ■ ■ ■ ■      ■     ■     ■        be causal inside the block

Where the row's pages reach as far as the block, its keys and values are written behind the context and `ops.attention` reads them, for
every row up to the block's last position (`Batch.sight`). Where they do not reach, or a window means something else for each row,
attention is plain torch over gathered pages, and the block leaves nothing. Knows neither files nor what is made of the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.backends.base import Ops, Pool
from forerun.engine.batch import Batch, Stem, grow
from forerun.engine.kv import Table
from forerun.engine.models.decoder import Attention, Linear, Mlp

GATHER = 1 << 13
"""entries of all rows together that are copied out of the pool at a time"""


class Sight(NamedTuple):
    """What a layer's block rows see. `window`: 0 = all of the context; else the row at position p sees positions > p − window, or, where
    the window hangs at the root (`rooted`: it was trained so), the whole block sees positions ≥ n − window. `causal`: inside the block."""

    window: int = 0
    causal: bool = False
    rooted: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class BlockLayer:
    """`attention`: of the block's rows; `context`: keys and values of the context [2 · kv_heads · D, H]. Norms are float32 [H]."""

    attention: Attention
    context: Linear
    before_attention: Tensor
    before_mlp: Tensor
    mlp: Mlp
    sight: Sight


class Spot(NamedTuple):
    """A row that is drafted for: its entries are those of positions base … root − 1."""

    row: int
    base: int
    root: int


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What a layer's rows see. `pages`: int64 [B, P], from the position `first` [B, 1] on; context are positions base … root − 1, [B, 1]
    each, of which row j of a block sees those from `lowest` [B, S] on. `within`: bool [S, S], inside the block."""

    pages: Tensor
    first: Tensor
    base: Tensor
    root: Tensor
    lowest: Tensor
    within: Tensor

    def context(self, start: int, places: int) -> tuple[Tensor, Tensor]:
        """Of `places` entries from the `start`-th on: bool [B, T], which are context at all, and bool [B, S, T], who sees them."""
        at = self.first + torch.arange(start, start + places, device=self.first.device)
        known = (at >= self.base) & (at < self.root)
        return known, known.unsqueeze(1) & (at.unsqueeze(1) >= self.lowest.unsqueeze(2))


def standing(spots: Sequence[Spot], tokens: Sequence[int], table: Table, device: torch.device) -> Batch:
    """Blocks of these tokens, one behind the context of each spot, as segments of known rows that see all of their block."""
    size = len(tokens) // len(spots)
    batch = grow([Stem(spot.row, spot.base, spot.root, size, (), ()) for spot in spots], table, device)
    ends = [spot.root - spot.base + size - 1 for spot in spots for _ in range(size)]
    ids, sight = torch.tensor([[*tokens], ends], dtype=torch.int32, device=device)
    return dataclasses.replace(batch, tokens=ids, sight=sight)


def view_of(spots: Sequence[Spot], size: int, sight: Sight, table: Table, device: torch.device) -> View:
    """`size`: rows of a block."""
    page, window = table.page_tokens, sight.window
    row, base, root = (torch.tensor(part).unsqueeze(1) for part in zip(*spots))
    own = torch.arange(size)
    lowest, within = base.expand(-1, size), torch.ones(size, size, dtype=torch.bool)
    if window and sight.rooted:
        lowest = torch.maximum(lowest, root - window)
    elif window:
        lowest = torch.maximum(lowest, root + own - window + 1)
        within = (own.unsqueeze(1) - own).abs() < window
    if sight.causal:
        within = within & (own <= own.unsqueeze(1))
    start = lowest[:, :1] // page
    count = max(1, int((-(-root // page) - start).max()))
    columns = (start + torch.arange(count)).clamp(max=table.pages.shape[1] - 1)
    pages = torch.from_numpy(table.pages)[row, columns].long()
    return View(*(part.to(device) for part in (pages, start * page, base, root, lowest, within)))


@dataclasses.dataclass(frozen=True, slots=True)
class BlockNet:
    """`fuse`: [H, taps · H]; `fuse_norm`, `norm`: float32 [H], of the context and behind the last layer."""

    fuse: Linear
    fuse_norm: Tensor
    layers: list[BlockLayer]
    norm: Tensor
    eps: float

    @property
    def width(self) -> int:
        """Values of a row in the widest layer."""
        return 6 * self.norm.shape[0] + max(layer.attention.width + layer.mlp.width for layer in self.layers)

    def gathered(self, size: int) -> int:
        """Values that attention keeps for the entries that it has copied, and for what `size` rows a block make of them."""
        spec = self.layers[0].attention.spec
        return GATHER * (4 * spec.kv_heads * spec.head_dim + 3 * spec.heads * size)

    def enter(self, ops: Ops, features: Tensor, batch: Batch, pool: Pool) -> None:
        """Writes the entries of known tokens. `batch.tokens`: where in `features` [most, taps · H] theirs are."""
        context = ops.norm(self.fuse(ops, ops.take(features, batch.tokens)), self.fuse_norm, self.eps)
        for index, layer in enumerate(self.layers):
            one = layer.attention
            spec = dataclasses.replace(one.spec, heads=0)
            entries = layer.context(ops, context)
            ops.rope(entries, batch.positions, one.cos, one.sin, spec, None, one.k_norm, one.eps)
            ops.write_kv(entries, pool, index, batch.slots, spec)

    def stand(self, ops: Ops, embedded: Tensor, size: int, batch: Batch, pool: Pool) -> Tensor:
        """embedded [B · S, H] → [B · S, H], behind the last norm, of blocks of `size` rows that the rows' pages hold (`standing`). Ops
        alone, so it can be captured. Where a sight is not causal, all rows of a block see what its last one sees. Only where every sight
        is `bounded`."""
        whole = dataclasses.replace(batch, positions=batch.sight)

        def see(index: int, qkv: Tensor) -> Tensor:
            layer = self.layers[index]
            spec = dataclasses.replace(layer.attention.spec, window=bounded(layer.sight, size) or 0)
            ops.write_kv(qkv, pool, index, batch.slots, spec)
            return ops.attention(qkv, pool, index, batch if layer.sight.causal else whole, spec)

        return self._through(ops, embedded, batch.positions, see)

    def gather(self, ops: Ops, embedded: Tensor, spots: Sequence[Spot], table: Table, pool: Pool) -> Tensor:
        """The same for any sight and for pages that end before the block, which then leaves nothing: embedded [B · S, H]."""
        size, device = len(embedded) // len(spots), embedded.device
        positions = torch.tensor([spot.root - spot.base for spot in spots]).unsqueeze(1) + torch.arange(size)
        views = {sight: view_of(spots, size, sight, table, device) for sight in {layer.sight for layer in self.layers}}

        def see(index: int, qkv: Tensor) -> Tensor:
            layer = self.layers[index]
            return attend(qkv, layer.attention, pool, index, views[layer.sight])

        return self._through(ops, embedded, positions.flatten().int().to(device), see)

    def stands(self, size: int) -> bool:
        """`stand` can be used."""
        return all(bounded(layer.sight, size) is not None for layer in self.layers)

    def _through(self, ops: Ops, residual: Tensor, positions: Tensor, see: Callable[[int, Tensor], Tensor]) -> Tensor:
        """All layers. `see(layer, qkv)`: what its rows see, [n, heads · D]."""
        x = ops.norm(residual, self.layers[0].before_attention, self.eps)
        for index, layer in enumerate(self.layers):
            one = layer.attention
            qkv = one.qkv(ops, x)
            ops.rope(qkv, positions, one.cos, one.sin, one.spec, one.q_norm, one.k_norm, one.eps)
            x = one.out(ops, see(index, qkv))
            x, residual = ops.add_norm(x, residual, layer.before_mlp, self.eps)
            following = self.layers[index + 1].before_attention if index + 1 < len(self.layers) else self.norm
            x, residual = ops.add_norm(layer.mlp(ops, x), residual, following, self.eps)
        return x


def bounded(sight: Sight, size: int) -> int | None:
    """The window that makes `ops.attention` see so much from where `stand` puts the rows, 0 = none; None where there is no such one."""
    if not sight.window or (sight.causal and not sight.rooted):
        return sight.window
    return sight.window + size if sight.rooted and not sight.causal else None


def attend(qkv: Tensor, one: Attention, pool: Pool, layer: int, view: View) -> Tensor:
    """Softmax attention of blocks over what the view shows them: qkv [B · S, (heads + 2 · kv_heads) · D] → [B · S, heads · D]. The block
    first, then the context in parts of `GATHER` entries, with a running maximum (Milakov, Gimelshein 1805.02867)."""
    spec, (count, size) = one.spec, view.lowest.shape
    heads, kv_heads, dim, page = spec.heads, spec.kv_heads, spec.head_dim, pool.page_tokens
    parts = qkv.view(count, size, heads + 2 * kv_heads, dim).transpose(1, 2)
    q = parts[:, :heads].reshape(count, kv_heads, -1, dim) * spec.scale
    out = _Softmax(q, size)
    out.add(parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :], view.within.unsqueeze(0))
    step = max(1, GATHER // (count * page))
    for at in range(0, view.pages.shape[1], step):
        pages = view.pages[:, at : at + step]
        known, mask = view.context(at * page, pages.shape[1] * page)
        keys, values = (entries[layer][pages].float().transpose(1, 2).flatten(2, 3) for entries in (pool.keys, pool.values))
        hidden = ~known[:, None, :, None]  # whatever lies there, perhaps no number
        out.add(keys.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0), mask)
    return out.result().view(count, heads, size, dim).transpose(1, 2).reshape(count * size, heads * dim)


class _Softmax:
    """Attention summed up part by part. q: [B, kv_heads, groups · S, D], scaled."""

    def __init__(self, q: Tensor, size: int) -> None:
        self._q = q
        self._size = size
        self._most = q.new_full((*q.shape[:3], 1), float("-inf"))
        self._total = torch.zeros_like(self._most)
        self._sum = torch.zeros_like(q)

    def add(self, keys: Tensor, values: Tensor, mask: Tensor) -> None:
        """keys, values [B, kv_heads, T, D]; mask bool [B or 1, S, T]. The first part shows every row something."""
        shape = self._q.shape
        scores = (self._q @ keys.transpose(2, 3)).view(shape[0], shape[1], -1, self._size, keys.shape[2])
        scores = scores.masked_fill(~mask[:, None, None], float("-inf")).view(shape[0], shape[1], shape[2], -1)
        most = torch.maximum(self._most, scores.amax(3, keepdim=True))
        fade, shares = torch.exp(self._most - most), torch.exp(scores - most)
        self._total = self._total * fade + shares.sum(3, keepdim=True)
        self._sum = self._sum * fade + shares @ values
        self._most = most

    def result(self) -> Tensor:
        return self._sum / self._total
