"""The CPU backend keeps the contract in each of its forms: every instruction set that this machine runs, and the reference ops."""

from __future__ import annotations

import functools

import pytest

from forerun.backends.base import Backend
from forerun.backends.cpu.backend import open_cpu

from .contract import Contract

FORMS = ["avx512bf16", "avx512", "avx2", "scalar", "torch"]


@functools.cache
def opened(form: str, threads: int) -> Backend | None:
    try:
        return open_cpu(threads, 1.0, form)
    except ValueError:
        return None


@pytest.fixture(params=FORMS)
def backend(request: pytest.FixtureRequest) -> Backend:
    found = opened(request.param, 2)
    if found is None:
        pytest.skip(f"this machine has no {request.param}")
    return found


class TestCpu(Contract):
    pass
