"""A tiny target that has a tokenizer and a chat template, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.engine.testmodel import write_model
from forerun.messages import Start
from forerun.train.target import Target


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("target")
    write_model("llama", 0, made, num_hidden_layers=2)
    return made


@pytest.fixture
def opened(folder: Path) -> Target:
    return open_tiny(folder)


def open_tiny(folder: Path, rows: int = 5, longest: int = 192) -> Target:
    return Target(Start(model_id=str(folder), device="cpu", threads=1), rows, longest, 8)
