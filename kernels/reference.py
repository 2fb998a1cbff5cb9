"""Every op of a step in plain torch: the specification that all other kernels are tested against.

Clarity comes before speed, and each row is computed by itself: no result depends on which other rows are in the batch.
Knows nothing of devices, models or packed weights. Shapes as in `backends/base.py`: n rows, m logit rows, H hidden, D head dimension,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels import dice, quant


class Heads(Protocol):
    """What attention must know of a layer (`backends.base.AttentionSpec`)."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def softcap(self) -> float: ...
    @property
    def sinks(self) -> Tensor | None: ...


class Cache(Protocol):
    """Paged keys and values (`backends.base.Pool`): [layers, pages, kv_heads, page_tokens, D], and their scales where they are codes."""

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def key_scales(self) -> Tensor | None: ...
    @property
    def value_scales(self) -> Tensor | None: ...


class Segments(Protocol):
    """The part of a flat batch that attention reads (`engine/batch.py`)."""

    @property
    def positions(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...
    @property
    def parents(self) -> Tensor: ...
    @property
    def starts(self) -> Tensor: ...
    @property
    def known(self) -> Tensor: ...
    @property
    def context(self) -> Tensor: ...
    @property
    def pages(self) -> Tensor: ...


def embed(table: Tensor, tokens: Tensor, scale: float = 1.0) -> Tensor:
    """table [V, H], tokens int32 [n] → float32 [n, H]."""
    return table[tokens.long()].float() * scale


def take(x: Tensor, rows: Tensor) -> Tensor:
    """x [n, H], rows int32 [m] → [m, H]."""
    return x[rows.long()]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: x / sqrt(mean(x²) + eps) · weight. Row by row: torch sums in an order that depends on the shape."""
    rows = x.reshape(-1, x.shape[-1])
    means = torch.empty(rows.shape[0], 1)
    for i in range(rows.shape[0]):
        means[i] = rows[i].square().mean()
    return x * torch.rsqrt(means + eps).view(*x.shape[:-1], 1) * weight


def add(x: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
    """residual + scale · x."""
    return residual + scale * x


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(norm(residual + scale · x), residual + scale · x)."""
    total = add(x, residual, scale)
    return norm(total, weight, eps), total


def concat(parts: list[Tensor]) -> Tensor:
    """[n, a], [n, b], … → [n, a + b + …]."""
    return torch.cat(parts, 1)


def matmul(x: Tensor, weight: Tensor | quant.Codes, bias: Tensor | None = None) -> Tensor:
    """x float32 [n, in], weight [out, in] → float32 [n, out]: x rounded to the weight's type, for codes to 16 bits a span; products
    summed in float32. One matrix-vector product a row, so that a row's sum never depends on how many rows there are."""
    if torch.is_tensor(weight):
        rounded, matrix = x.to(weight.dtype).float(), weight.float()
    else:
        rounded, matrix = quant.round_rows(x), quant.expand(weight)
    out = torch.empty(x.shape[0], matrix.shape[0])
    for i in range(x.shape[0]):
        out[i] = torch.mv(matrix, rounded[i].clone())  # a vector of its own: the sum's order depends on its alignment too
    return out if bias is None else out + bias


def rope(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    spec: Heads,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """In place on qkv [n, (heads + 2·kv_heads)·D] (q, k, v): optional RMSNorm of q and k, over each head where the weight is [D], over all
    heads together where it is longer; then rotation of the first R = 2·cos.shape[1] dimensions, half-split."""
    n, at = qkv.shape[0], positions.long()
    q_width, k_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for part, weight in ((qkv[:, :q_width], q_norm), (qkv[:, q_width : q_width + k_width], k_norm)):
        if weight is not None:
            part.copy_(norm(part.reshape(n, part.shape[1] // weight.shape[0], weight.shape[0]), weight, eps).flatten(1))
        half = cos.shape[1]
        heads = part.view(n, part.shape[1] // spec.head_dim, spec.head_dim)
        c, s = cos[at].unsqueeze(1), sin[at].unsqueeze(1)
        a, b = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        heads[..., :half] = a * c - b * s
        heads[..., half : 2 * half] = b * c + a * s
    return qkv


def write_kv(qkv: Tensor, pool: Cache, layer: int, slots: Tensor, spec: Heads) -> None:
    """Writes each row's keys and values, rounded to the pool's type, into its slot."""
    size = pool.keys.shape[3]
    page, offset = slots.long() // size, slots.long() % size
    heads = qkv[:, spec.heads * spec.head_dim :].view(qkv.shape[0], 2, spec.kv_heads, spec.head_dim)
    for part, (cache, scales) in enumerate(((pool.keys, pool.key_scales), (pool.values, pool.value_scales))):
        entries = heads[:, part]
        if scales is not None:
            entries, scales[layer][page, :, offset] = quant.entries(entries)
        cache[layer][page, :, offset] = entries.to(cache.dtype)


def keep_kv(pool: Cache, source: Tensor, target: Tensor) -> None:
    """In every layer, copy the entries of slots `source` to slots `target`, as if all were read first."""
    size = pool.keys.shape[3]
    src, dst = source.long(), target.long()
    for cache in (pool.keys, pool.values, pool.key_scales, pool.value_scales):
        if cache is None:
            continue
        # Indices around a slice put the indexed dimension first: [k, layers, kv_heads, D], a copy.
        cache[:, dst // size, :, dst % size] = cache[:, src // size, :, src % size]


def visible_slots(rows: Segments, segment: int, row: int, page_tokens: int) -> Tensor:
    """The slots that a row sees, one for each position 0 … its own, in order."""
    start, known, context = int(rows.starts[segment]), int(rows.known[segment]), int(rows.context[segment])
    last = min(int(rows.positions[row]), context + known - 1)
    at = torch.arange(last + 1)
    slots = rows.pages[segment].long()[at // page_tokens] * page_tokens + at % page_tokens
    branch: list[int] = []
    while row >= start + known:
        branch.append(int(rows.slots[row]))
        row = int(rows.parents[row])
        if row < 0:
            break
    return torch.cat([slots, torch.tensor(branch[::-1], dtype=torch.int64)])


def entries_at(cache: Tensor, scales: Tensor | None, layer: int, slots: Tensor) -> Tensor:
    """The numbers in these slots, float32 [t, kv_heads, D]."""
    page, offset = slots // cache.shape[3], slots % cache.shape[3]
    numbers = cache[layer][page, :, offset].float()
    return numbers if scales is None else numbers * scales[layer][page, :, offset].unsqueeze(2)


def attention(qkv: Tensor, pool: Cache, layer: int, rows: Segments, spec: Heads) -> Tensor:
    """Softmax attention of every row over what it sees (`engine/batch.py`) → [n, heads·D]. KV of this step is in the pool already.
    Everything is float32 here; a backend may round queries and shares to the type of the cache. Scores and sums are float32."""
    size = pool.keys.shape[3]
    out = torch.empty(qkv.shape[0], spec.heads * spec.head_dim)
    group = spec.heads // spec.kv_heads
    for segment in range(rows.known.shape[0]):
        for row in range(int(rows.starts[segment]), int(rows.starts[segment + 1])):
            slots = visible_slots(rows, segment, row, size)
            if spec.window:
                slots = slots[-spec.window :]
            k = entries_at(pool.keys, pool.key_scales, layer, slots)  # [t, kv_heads, D]
            v = entries_at(pool.values, pool.value_scales, layer, slots)
            q = qkv[row, : spec.heads * spec.head_dim].view(spec.kv_heads, group, spec.head_dim)
            scores = torch.einsum("hgd,thd->hgt", q, k).mul(spec.scale).flatten(0, 1)
            if spec.softcap:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if spec.sinks is not None:
                scores = torch.cat([scores, spec.sinks.unsqueeze(1)], 1)
            shares = torch.softmax(scores, 1)[:, : slots.shape[0]].view(spec.kv_heads, group, -1)
            out[row] = torch.einsum("hgt,thd->hgd", shares, v).flatten()
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """silu, gelu, gelu_tanh, relu or relu2 (relu squared)."""
    match activation:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case _:
            raise ValueError(f"unknown activation {activation!r}; known: silu, gelu, gelu_tanh, relu, relu2")


def gate(x: Tensor, activation: str) -> Tensor:
    """x [n, 2F] = (gate, up) → act(gate) · up [n, F]. Row by row: torch computes the tail of a tensor with other instructions."""
    left, right = x.chunk(2, -1)
    out = torch.empty(left.shape)
    for i in range(x.shape[0]):
        out[i] = activate(left[i].clone(), activation) * right[i]
    return out


def mlp(
    x: Tensor,
    gate_up: Tensor | quant.Codes,
    down: Tensor | quant.Codes,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """x float32 [n, in], gate_up [2F, in], down [out, F] → [n, out]: two products, and between them gate · up."""
    return matmul(gate(matmul(x, gate_up, gate_up_bias), activation), down, down_bias)


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Router logits [n, E] → (experts int64 [n, top_k] ascending by index, their weights). Ties go to the lower index."""
    shares = torch.stack([torch.softmax(row, -1) for row in logits]) if len(logits) else logits
    experts = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k].sort(-1).values
    weights = shares.gather(1, experts)
    if normalize:
        total = weights[:, :1].clone()
        for j in range(1, top_k):
            total += weights[:, j : j + 1]
        weights = weights / total
    return experts, weights


def moe(
    x: Tensor,
    router: Tensor | quant.Codes,
    gate_up: Sequence[Tensor | quant.Codes],
    down: Sequence[Tensor | quant.Codes],
    top_k: int,
    activation: str,
    normalize: bool,
) -> Tensor:
    """Mixture of experts: for each row the weighted sum of down(gate(gate_up(x))) over its experts, in ascending expert order."""
    experts, weights = route(matmul(x, router), top_k, normalize)
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        row, place = (experts == expert).nonzero(as_tuple=True)
        if len(row):
            value = matmul(gate(matmul(x[row], gate_up[expert]), activation), down[expert])
            out[row] += weights[row, place].unsqueeze(1) * value
    return out


def logits(x: Tensor, head: Tensor | quant.Codes, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
    """float32 [m, V] = cap(scale · x @ head.T), cap(z) = softcap · tanh(z / softcap) where softcap > 0."""
    raw = matmul(x, head) * scale
    return softcap * torch.tanh(raw / softcap) if softcap else raw


def noise(seed: int, index: int, vocab: int) -> Tensor:
    """The dice of (seed, token index): float32 [V] (forerun/dice.md)."""
    return dice.noise(seed, index, vocab)


def noise_at(seeds: Tensor, indices: Tensor, tokens: Tensor) -> Tensor:
    """The dice at k places: int64 [k] each → float32 [k]."""
    return dice.gumbel(seeds, indices, tokens)


def choose(
    x: Tensor,
    head: Tensor | quant.Codes,
    temperatures: Tensor,
    sampled: Tensor,
    seeds: Tensor,
    indices: Tensor,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`pick` of logits divided by temperatures, with the dice of (seed, index) where a row is sampled. The four: [m]."""
    scores = logits(x, head, scale, softcap) / temperatures.unsqueeze(1)
    thrown = torch.zeros_like(scores)
    for row in sampled.nonzero().flatten().tolist():
        thrown[row] = noise(int(seeds[row]) & 0xFFFFFFFFFFFFFFFF, int(indices[row]), scores.shape[1])
    return pick(scores, thrown)


def pick(scores: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """scores float32 [m, V], noise [m, V] or None → (argmax of scores + noise, ties to the lowest id, int64 [m]; log-softmax(scores)
    there, float32 [m]). A row that holds a NaN gets token −1 and a NaN."""
    total = scores if noise is None else scores + noise
    best = total.max(-1, keepdim=True).values
    ids = torch.arange(scores.shape[1]).expand_as(scores)
    tokens = torch.where(total == best, ids, scores.shape[1]).min(-1).values
    spoilt = total.isnan().any(-1)
    chosen = scores.gather(1, tokens.clamp(max=scores.shape[1] - 1).unsqueeze(1)).squeeze(1)
    logprobs = chosen - (torch.stack([torch.logsumexp(row.clone(), 0) for row in scores]) if len(scores) else chosen)
    return tokens.masked_fill(spoilt, -1), logprobs.masked_fill(spoilt, torch.nan)
