"""docs/failure-modes.md names tests that exist, and leaves no number out."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/failure-modes.md").read_text()


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE)
    assert len(named) > 60
    files: dict[str, list[str]] = {}
    for path in (ROOT / "tests").glob("**/test_*.py"):
        files.setdefault(path.name, []).append(path.read_text())
    for file, name in named:
        assert any(re.search(rf"(def {name}\b|^{name} = )", text, re.M) for text in files.get(file, [])), f"{file}::{name}"


def test_no_number_is_left_out() -> None:
    numbers = set[int]()
    for first, last in re.findall(r"^(?:\| )?(\d+)(?:–(\d+))?\b", PAGE, re.M):
        numbers |= set(range(int(first), int(last or first) + 1))
    for line in re.findall(r"^\| (\d+(?:, \d+)+) \|", PAGE, re.M):
        numbers |= {int(number) for number in line.split(", ")}
    assert numbers == set(range(1, 59))
