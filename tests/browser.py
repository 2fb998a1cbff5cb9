"""The browser of `tools/browser.py` for tests, which are skipped where there is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("browser", Path(__file__).parents[1] / "tools" / "browser.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = _tool()
needs_browser = pytest.mark.skipif(tool.found() is None, reason="no Chromium here: install Debian's package `chromium`")
