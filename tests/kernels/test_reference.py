"""The specification itself against what torch says of the same mathematics."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backends.base import AttentionSpec, Pool, PoolSpec
from forerun.engine.batch import Batch
from forerun.kernels import reference


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_norm() -> None:
    x, w = random(5, 40), random(40, seed=1)
    close(reference.norm(x, w, 1e-5), F.rms_norm(x, (40,), w, 1e-5))
    close(reference.norm(x.view(5, 4, 10), w[:10], 1e-5), F.rms_norm(x.view(5, 4, 10), (10,), w[:10], 1e-5))


def test_matmul_rounds_the_activations_to_the_weights_type() -> None:
    x, w, b = random(3, 20), random(7, 20, seed=1), random(7, seed=2)
    close(reference.matmul(x, w, b), F.linear(x, w, b))
    half = w.bfloat16()
    close(reference.matmul(x, half), F.linear(x.bfloat16().float(), half.float()))


def test_rope_is_a_rotation_of_complex_numbers() -> None:
    spec = AttentionSpec(2, 1, 8, 1.0)
    qkv, angle, positions = random(3, 32), random(10, 3, seed=1), torch.tensor([4, 0, 9], dtype=torch.int32)
    turned = reference.rope(qkv.clone(), positions, angle.cos(), angle.sin(), spec)
    heads = qkv[:, :24].view(3, 3, 8)
    numbers = torch.complex(heads[..., :3], heads[..., 3:6]) * torch.exp(1j * angle[positions.long()]).unsqueeze(1)
    close(turned[:, :24].view(3, 3, 8), torch.cat([numbers.real, numbers.imag, heads[..., 6:]], -1))
    close(turned[:, 24:], qkv[:, 24:])


@pytest.mark.parametrize("window", [0, 5])
def test_attention_is_torchs(window: int) -> None:
    """A prompt of 20 tokens behind 13, in pages that lie in any order."""
    spec = AttentionSpec(4, 2, 8, 1 / math.sqrt(8), window)
    total, context = 33, 13
    pages = torch.tensor([[3, 0, 2]], dtype=torch.int32)
    pool = Pool(PoolSpec(1, 2, 8, torch.float32), torch.zeros(1, 4, 2, 16, 8), torch.zeros(1, 4, 2, 16, 8))
    qkv, at = random(total, 64), torch.arange(total)
    slots = (pages[0][at // 16] * 16 + at % 16).int()
    reference.write_kv(qkv, pool, 0, slots, spec)
    n = total - context
    int32 = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    batch = Batch(
        int32(*[0] * n), at[context:].int(), slots[context:], int32(*[-1] * n), int32(0, n), int32(n), int32(context), pages, int32(n - 1)
    )
    actual = reference.attention(qkv[context:], pool, 0, batch, spec)
    q, k, v = (part.transpose(0, 1) for part in (qkv[:, :32].view(-1, 4, 8), qkv[:, 32:48].view(-1, 2, 8), qkv[:, 48:].view(-1, 2, 8)))
    distance = at.unsqueeze(1) - at.unsqueeze(0)
    mask = (distance >= 0) & (distance < (window or total))
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[:, context:]
    close(actual, expected.transpose(0, 1).reshape(n, 32))


def test_sinks_are_a_score_without_a_value() -> None:
    spec = AttentionSpec(1, 1, 4, 1.0, sinks=torch.tensor([0.5]))
    pool = Pool(PoolSpec(1, 1, 4, torch.float32), torch.zeros(1, 1, 1, 16, 4), torch.zeros(1, 1, 1, 16, 4))
    qkv = random(1, 12)
    int32 = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    reference.write_kv(qkv, pool, 0, int32(0), spec)
    batch = Batch(int32(0), int32(0), int32(0), int32(-1), int32(0, 1), int32(1), int32(0), torch.zeros(1, 1, dtype=torch.int32), int32(0))
    score = (qkv[0, :4] * qkv[0, 4:8]).sum()
    close(reference.attention(qkv, pool, 0, batch, spec)[0], qkv[0, 8:] * torch.sigmoid(score - 0.5))


def test_gate() -> None:
    x = random(3, 10)
    close(reference.gate(x, "silu"), F.silu(x[:, :5]) * x[:, 5:])
    close(reference.gate(x, "relu2"), F.relu(x[:, :5]) ** 2 * x[:, 5:])


def test_moe_of_all_experts_is_the_weighted_sum() -> None:
    x, router = random(4, 6), random(3, 6, seed=1)
    up, down = [random(8, 6, seed=2 + e) for e in range(3)], [random(6, 4, seed=9 + e) for e in range(3)]
    shares = torch.softmax(x @ router.T, -1)
    each = [F.linear(F.silu((x @ u.T)[:, :4]) * (x @ u.T)[:, 4:], d) for u, d in zip(up, down)]
    close(reference.moe(x, router, up, down, 3, "silu", True), sum(shares[:, e : e + 1] * each[e] for e in range(3)))  # type: ignore[arg-type]
    best = shares.argmax(-1)
    close(reference.moe(x, router, up, down, 1, "silu", True), torch.stack([each[e][i] for i, e in enumerate(best)]))


def test_pick() -> None:
    scores, noise = random(4, 30) * 3, random(4, 30, seed=1)
    tokens, logprobs = reference.pick(scores, noise)
    assert tokens.tolist() == (scores + noise).argmax(-1).tolist()
    close(logprobs, torch.log_softmax(scores, -1).gather(1, tokens.unsqueeze(1)).squeeze(1))
    assert reference.pick(torch.zeros(1, 9), None)[0].tolist() == [0]


def test_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"swish.*silu"):
        reference.activate(torch.ones(1), "swish")
