"""forerun/dice.md against kernels/dice.py, and the statistics that make the dice fit to sample with."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forerun
from forerun.kernels import dice

PAGE = (Path(forerun.__file__).parent / "dice.md").read_text()


def table(header: str) -> list[list[str]]:
    """Cells of the rows of the table whose header line starts with `header`."""
    lines = PAGE.split(header, 1)[1].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows
    return rows


def bits(value: torch.Tensor) -> str:
    return format(int(value.view(torch.int32).item()) & dice.WORD, "08x")


def word(value: int) -> torch.Tensor:
    return torch.tensor([value])


def plain_philox(seed: int, index: int, token: int) -> int:
    """Philox with Python's integers: the page's formula, written a second time."""
    key = [seed & dice.WORD, seed >> 32]
    c = [token // 4, index & dice.WORD, index >> 32, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & dice.WORD, (a >> 32) ^ c[3] ^ key[1], a & dice.WORD]
        key = [(key[0] + 0x9E3779B9) & dice.WORD, (key[1] + 0xBB67AE85) & dice.WORD]
    return c[token % 4]


def exact(v: torch.Tensor) -> torch.Tensor:
    """−ln(−ln(1 − u)) in float64."""
    near = -torch.log1p(-(v.double() + 0.5) * 2.0**-32)
    far = -torch.log(((dice.WORD - v).double() + 0.5) * 2.0**-32)
    return -torch.log(torch.where(v < 1 << 31, near, far))


def test_philox_gives_the_known_answers() -> None:
    for key, counter, output in table("| key | counter | output |"):
        k, c = ([int(w, 16) for w in text.split()] for text in (key, counter))
        words = dice.philox((word(k[0]), word(k[1])), (word(c[0]), word(c[1]), word(c[2]), word(c[3])))
        assert " ".join(format(int(w), "08x") for w in words) == output


def test_constants_of_the_page_are_those_of_the_code() -> None:
    values = {name: (float(value), digits) for name, value, digits in table("| constant | value | bits |")}
    code = {f"c{i}": c for i, c in enumerate(dice.LOG_COEFFICIENTS)} | {"HIGH": dice.LN2_HIGH, "LOW": dice.LN2_LOW}
    assert values.keys() == code.keys()
    for name, (value, digits) in values.items():
        assert bits(torch.tensor(code[name], dtype=torch.float32)) == digits == bits(torch.tensor(value, dtype=torch.float32))


def test_words_of_the_page() -> None:
    for v, expected in table("| v | bits of G |"):
        assert bits(dice.gumbel_of_word(word(int(v, 16)))) == expected


def test_noise_of_the_page() -> None:
    for seed, index, token, v, expected in table("| seed | index | token | v | bits of G |"):
        s, i, t = int(seed), int(index), int(token)
        assert plain_philox(s, i, t) == int(v, 16)
        assert bits(dice.gumbel(word(dice.signed(s)), word(i), word(t))) == expected


def test_rows_of_the_page() -> None:
    for seed, index, vocab, digest in table("| seed | index | vocab | sha256 |"):
        row = dice.noise(int(seed), int(index), int(vocab))
        assert row.shape == (int(vocab),)
        assert hashlib.sha256(row.numpy().tobytes()).hexdigest() == digest


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1))
def test_one_place_is_that_place_of_the_words(seed: int, index: int, token: int) -> None:
    expected = dice.gumbel_of_word(word(plain_philox(seed, index, token)))
    assert torch.equal(dice.gumbel(word(dice.signed(seed)), word(index), word(token)), expected)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 70))
def test_a_row_is_its_places(seed: int, index: int, vocab: int) -> None:
    places = dice.gumbel(torch.tensor(dice.signed(seed)), torch.tensor(index), torch.arange(vocab))
    assert torch.equal(dice.noise(seed, index, vocab), places)


def test_error_against_float64() -> None:
    match = re.search(r"≤ (\d)·10⁻⁷·max\(1, \|G\|\)", PAGE)
    assert match
    generator = torch.Generator().manual_seed(1)
    v = torch.cat(
        [
            torch.arange(1 << 16),
            dice.WORD - torch.arange(1 << 16),
            (1 << 30) + torch.arange(-5000, 5000),
            torch.randint(0, 1 << 32, (300_000,), generator=generator),
            (2 ** (32 * torch.rand(100_000, generator=generator, dtype=torch.float64)) - 1).long(),
        ]
    )
    value, truth = dice.gumbel_of_word(v).double(), exact(v)
    assert ((value - truth).abs() / truth.abs().clamp(min=1.0)).max() < float(match[1]) * 1e-7
    assert value.min() >= -3.14 and value.max() <= 22.88


def test_noise_never_rises_with_the_word() -> None:
    """G falls as v grows (up to rounding at equal neighbours): also across the two branches and every exponent."""
    v = torch.cat([(1 << shift) + torch.arange(-300, 300) for shift in range(10, 32)]).unique()
    g = dice.gumbel_of_word(v[(v >= 0) & (v <= dice.WORD)])
    assert (g[1:] - g[:-1]).max() <= 2.0**-20


def ks(sample: torch.Tensor) -> float:
    """√n · Kolmogorov-Smirnov distance to Gumbel(0, 1); above 1.95 with probability 0.001."""
    x = sample.double().sort().values
    n = x.numel()
    cdf = torch.exp(-torch.exp(-x))
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((cdf - steps[:-1]).max(), (steps[1:] - cdf).max())) * math.sqrt(n)


@pytest.mark.parametrize("axis", ["token", "index", "seed"])
def test_gumbel_along_every_axis(axis: str) -> None:
    n = 200_000
    places = {"seed": torch.tensor(7), "index": torch.tensor(3), "token": torch.tensor(11), axis: torch.arange(n)}
    sample = dice.gumbel(places["seed"], places["index"], places["token"])
    assert ks(sample) < 1.95
    assert abs(float(sample.double().mean()) - 0.5772156649) < 4 * math.pi / math.sqrt(6 * n)
    for lag in (1, 2, 3, 4, 5, 8):
        x = sample.double() - sample.double().mean()
        correlation = float((x[lag:] * x[:-lag]).mean() / x.var())
        assert abs(correlation) < 4.5 / math.sqrt(n), f"lag {lag}"


def test_tails() -> None:
    sample = torch.cat([dice.noise(seed, 0, 1 << 18) for seed in range(8)]).double()
    n = sample.numel()
    for level in (4.0, 6.0, 8.0, 10.0):
        p = 1 - math.exp(-math.exp(-level))
        assert abs(int((sample > level).sum()) - n * p) < 4.5 * math.sqrt(n * p) + 1
    for level in (-1.5, -2.0, -2.3):
        p = math.exp(-math.exp(-level))
        assert abs(int((sample < level).sum()) - n * p) < 4.5 * math.sqrt(n * p) + 1


def test_sampled_frequencies_are_softmax() -> None:
    """Total variation between drawn frequencies and a toy distribution, over indices of one seed and over seeds of one index."""
    scores = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, float("-inf"), 0.25])
    p = scores.double().softmax(0)
    n = 100_000
    for seeds, indices in (
        (torch.full((n, 1), 99), torch.arange(n)[:, None]),
        (torch.arange(n)[:, None], torch.zeros(n, 1, dtype=torch.long)),
    ):
        drawn = (scores + dice.gumbel(seeds, indices, torch.arange(8))).argmax(1)
        frequency = torch.bincount(drawn, minlength=8).double() / n
        assert frequency[6] == 0
        assert 0.5 * float((frequency - p).abs().sum()) < 0.006
        chi = float(((frequency - p) ** 2 / p.clamp(min=1e-9))[p > 0].sum() * n)
        assert chi < 24.3, "chi-square with 6 degrees of freedom, probability 0.0005"
