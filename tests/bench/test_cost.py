"""Prices of tokens and requests."""

from __future__ import annotations

import math

import pytest

from forerun.bench.cost import Cost


def test_an_hour_at_a_thousand_tokens_a_second() -> None:
    cost = Cost.of(3.6, tokens_per_second=1000, requests_per_second=10)
    assert cost.million_tokens == pytest.approx(1.0)
    assert cost.request == pytest.approx(1e-4)
    assert str(cost) == "1 a million tokens, 0.0001 a request"


def test_nothing_served_has_no_finite_price() -> None:
    cost = Cost.of(1.0, 0, 0)
    assert math.isinf(cost.million_tokens) and math.isinf(cost.request)
