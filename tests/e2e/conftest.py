"""One server of each kind for all tests that do not disturb it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, echo_folder, running, tiny_model

ENDLESS = 2_000_000
"""positions: minutes of text, even for a worker that computes nothing"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hostile", type=int, default=20_000, metavar="N", help="requests of the long fuzz (make fuzz)")


@pytest.fixture(scope="session")
def echo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return echo_folder(tmp_path_factory.mktemp("echo"))


@pytest.fixture(scope="session")
def echo(echo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(echo_model, tmp_path_factory.mktemp("log") / "echo.log", "--echo", "--max-concurrent-requests", "64") as server:
        yield server


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers go on for as long as anybody listens, unless they are told to end: what stops, stopped because the client
    left."""
    folder = echo_folder(tmp_path_factory.mktemp("endless"), positions=ENDLESS)
    flags = ("--echo", "--max-batch-total-tokens", str(4 * ENDLESS), "--max-batch-prefill-tokens", "4096")
    with running(folder, tmp_path_factory.mktemp("log") / "endless.log", *flags) as server:
        yield server


@pytest.fixture(scope="session")
def llama_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def llama(llama_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--device", "cpu", "--threads", "1", "--max-batch-total-tokens", "4096")
    with running(llama_model, tmp_path_factory.mktemp("log") / "llama.log", *flags) as server:
        yield server


@pytest.fixture(scope="session", params=["echo", "llama"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found
