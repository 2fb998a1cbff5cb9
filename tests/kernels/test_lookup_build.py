"""The library of look-ups: old ones go, and what crosses its border is safe there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.kernels.lookup import build as module


def test_older_libraries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the sources' own folder; from the user's cache, which other versions share, they do not."""
    for path in (*module.HERE.glob("*.h"), module.SOURCE):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "SOURCE", tmp_path / "lookup.cpp")
    monkeypatch.setattr(module, "compiler", lambda: "cc")
    monkeypatch.setattr(module, "run", lambda command: Path(command[-1]).touch())
    first = module.build()
    (first.parent / "libforerun_cpu-of-another.so").touch()
    (tmp_path / "lookup.h").write_text("")
    second = module.build()
    assert sorted(path.name for path in first.parent.iterdir()) == ["libforerun_cpu-of-another.so", second.name]
    monkeypatch.setattr(module, "places", lambda: [tmp_path / "cache" / "forerun"])
    for text in ("one", "two"):
        (tmp_path / "lookup.h").write_text(text)
        third = module.build()
    assert len(list(third.parent.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_look_ups_are_clean_under_sanitizers() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no compiler here")
    done = subprocess.run([sys.executable, "-m", "forerun.kernels.lookup.build", "--check"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " kept: 0 failures" in done.stdout
