"""The commands: what they print, what they return, what they import."""

from __future__ import annotations

import signal
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest

from forerun import __version__, cli


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list]:
    """Configurations that `serve` would have run."""
    configs: list = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setitem(sys.modules, "forerun.launch", types.SimpleNamespace(run=lambda config: configs.append(config) or 7))
    monkeypatch.setattr("forerun.launch", sys.modules["forerun.launch"], raising=False)
    monkeypatch.setattr("forerun.log.configure", lambda config: None)
    yield configs
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("serve", "bench", "doctor", "make-test-model"))
    assert cli.main([]) == 2


@pytest.mark.parametrize("argv", [["--version"], ["-V"], ["serve", "--version"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == f"forerun {__version__}\n"


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["server"]) == 2
    assert "there is no command 'server'" in capsys.readouterr().err


def test_serve_runs_the_launcher_and_returns_its_code(served: list) -> None:
    assert cli.main(["serve", "--model-id", "m", "-p", "80"]) == 7
    assert (served[0].model.model_id, served[0].serving.port) == ("m", 80)


@pytest.mark.parametrize("words", [[], ["serve"]])
def test_the_launcher_takes_tgi_command_lines(served: list, words: list[str]) -> None:
    tgi = "--model-id m --num-shard 1 --port 80 --json-output --max-input-length 1023 --max-total-tokens 2048"
    tgi += " --cuda-graphs 0 --usage-stats off"
    assert cli.launcher([*words, *tgi.split()]) == 7
    assert (served[0].limits.max_input_tokens, served[0].logging.json_output) == (1023, True)
    assert len(served[0].notes) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_server_is_still_being_imported_ends_it_in_order(number: signal.Signals) -> None:
    """Importing takes so long that an orchestrator's signal may well come in the middle of it."""
    code = (
        "import os, sys, types; from forerun import cli\n"
        "class Slow:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == 'forerun.launch': os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Slow()); sys.exit(cli.main(['serve', '--model-id', 'm']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_option_is_an_error_on_standard_error(served: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model-idd", "m"]) == 2
    assert capsys.readouterr().err == "error: unexpected argument '--model-idd'; did you mean '--model-id'?\n"
    assert not served


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_help_of_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert f"Usage: forerun {command}" in capsys.readouterr().out


def test_the_command_line_alone_loads_nothing_heavy() -> None:
    code = (
        "import sys, forerun.cli; forerun.cli.main(['serve', '--help']); "
        "heavy = {'torch', 'transformers', 'numpy', 'aiohttp', 'tokenizers', 'structlog'} & set(sys.modules); "
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
