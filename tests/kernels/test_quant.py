"""Codes of 8 and 4 bits: how near they come, and that they find their way back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.kernels import quant

STEPS = {"int8": 127, "int8-groups": 127, "int4": 7.5, "int4-symmetric": 8}
shapes = st.tuples(st.integers(1, 40), st.one_of(st.integers(1, 100), st.just(576)))
wide = st.tuples(st.integers(20, 40), st.one_of(st.integers(20, 100), st.sampled_from([512, 576, 1100])))


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), shape=shapes, format=st.sampled_from(quant.FORMATS), size=st.sampled_from([1e-8, 1e-3, 1.0, 1e6]))
def test_the_nearest_code(seed: int, shape: tuple[int, int], format: str, size: float) -> None:
    """Never further away than one step of the row (of the group: half a step, plus the rounding of scales to float16)."""
    w = random(seed, *shape) * size
    codes = quant.quantize(w, format)
    assert codes.format == format and codes.shape == shape and codes.codes.dtype == torch.int8
    away = (quant.expand(codes) - w).abs().amax(1)
    part = 1.02 if format == "int4-symmetric" else 0.52  # the end opposite to −8 is 7, up to a whole step away
    assert (away <= part * w.abs().amax(1) / STEPS[format] + 2e-3 * w.abs().amax(1)).all()


@pytest.mark.parametrize("format", quant.FORMATS)
def test_codes_are_found_again(format: str) -> None:
    """Numbers that codes stand for, rounded to bf16 on the way as a checkpoint may be, get the same codes when quantised anew."""
    first = quant.quantize(random(1, 64, 256), format)
    again = quant.quantize(quant.expand(first).bfloat16(), format)
    same = (again.codes == first.codes).float().mean()
    assert same > (0.7 if format.startswith("int8") else 0.999)  # bf16 has no more digits than int8
    assert (quant.expand(again) - quant.expand(first)).abs().max() < 0.02


@pytest.mark.parametrize("format", quant.FORMATS)
def test_zeros_and_constants(format: str) -> None:
    w = torch.zeros(3, 70)
    w[1], w[2, 40] = 0.5, -3.0
    back = quant.expand(quant.quantize(w, format))
    torch.testing.assert_close(back, w, rtol=1e-3, atol=1e-3)


def test_parts_are_joined_and_ordered() -> None:
    for format in quant.FORMATS:
        parts = [quant.quantize(random(i, 10 + i, 64), format) for i in range(3)]
        whole = quant.join(parts)
        torch.testing.assert_close(quant.expand(whole), torch.cat([quant.expand(part) for part in parts]))
        order = torch.randperm(33)
        torch.testing.assert_close(quant.expand(whole.rows(order)), quant.expand(whole)[order])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), shape=wide, spread=st.floats(0.0, 4.0))
def test_activations_are_rounded_finer_than_bf16(seed: int, shape: tuple[int, int], spread: float) -> None:
    """No value is further away than half a step of its span, and all of them together less than by bf16, whether they are alike or a few
    are thousands of times larger than others."""
    x = random(seed, *shape) * 10 ** (spread * random(seed + 1, *shape))
    away = (quant.round_rows(x) - x).abs()
    for start in range(0, shape[1], quant.SPAN):
        span = slice(start, start + quant.SPAN)
        assert (away[:, span] <= x[:, span].abs().amax(1, keepdim=True) * 1.6e-5).all()
    size = x.norm(dim=1)
    assert (away.norm(dim=1) / size).norm() <= ((x.bfloat16().float() - x).norm(dim=1) / size).norm()


def test_activations_that_are_no_numbers() -> None:
    x = random(0, 3, 1030)
    x[0, 540], x[1, 1029] = torch.nan, -torch.inf
    rounded = quant.round_rows(x)
    assert rounded[0].isnan().nonzero().flatten().tolist() == list(range(512, 1024))
    assert rounded[1].isnan().nonzero().flatten().tolist() == list(range(1024, 1030))
    assert rounded[2].isfinite().all()
