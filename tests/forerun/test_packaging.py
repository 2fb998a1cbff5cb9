"""What an installed package needs is in it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in (ROOT / "kernels").glob("*/build.py")))
def test_sources_that_are_built_where_they_are_installed(folder: str) -> None:
    """Everything in C++ beside a build.py, whatever it is called."""
    kernels = ROOT / "kernels"
    packed = {path for pattern in DATA["forerun.kernels"] for path in kernels.glob(pattern)}
    needed = {path for path in (kernels / folder).iterdir() if path.suffix in (".cpp", ".h")}
    assert len(needed) > 3 and needed <= packed
