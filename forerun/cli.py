"""The commands. Owns argument errors and exit codes; each command's module is imported when it is called.

Exit codes: 0 done, 1 the server or a check failed, 2 wrong usage.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from forerun import __version__
from forerun.config import Config, all_options
from forerun.options import ConfigError
from forerun.usage import serve_help


def main(argv: Sequence[str] | None = None) -> int:
    """`forerun COMMAND …`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"forerun {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"error: there is no command '{words[0]}'\n\n{_overview()}", file=sys.stderr)
        return 2
    return command[1](words[1:])


def launcher(argv: Sequence[str] | None = None) -> int:
    """`text-generation-launcher …`: serve under TGI's name. SageMaker starts containers with the word `serve`."""
    words = list(sys.argv[1:] if argv is None else argv)
    return _serve(words[1:] if words[:1] == ["serve"] else words)


def _serve(argv: Sequence[str]) -> int:
    if _asks(argv, "-h", "--help"):
        print(serve_help("forerun serve", all_options()))
        return 0
    if _asks(argv, "-V", "--version"):
        print(f"forerun {__version__}")
        return 0
    config = _parsed(argv, needs_model=True)
    if config is None:
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):  # until launch listens: nothing runs yet that would have to end in order
        signal.signal(number, _leave)
    import structlog

    from forerun import doctor, launch, log

    log.configure(config.logging)
    say = structlog.get_logger("forerun")
    for note in config.notes:
        say.warning(note)
    if config.logging.env:
        for finding in doctor.examine(config):
            say.info(finding.line())
    return launch.run(config)


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(0)


def _doctor(argv: Sequence[str]) -> int:
    if _asks(argv, "-h", "--help"):
        print("Usage: forerun doctor [any option of `forerun serve`]\n\nSays what this machine offers, whether the model folder is whole, ")
        print("and what would be chosen. Exit code 1 if the server could not run. With --json-output, one JSON object a line.")
        return 0
    config = _parsed(argv, needs_model=False)
    if config is None:
        return 2
    from forerun import doctor

    return doctor.run(config)


def _bench(argv: Sequence[str]) -> int:
    from forerun.bench.cli import main as bench

    return bench(argv)


def _make_test_model(argv: Sequence[str]) -> int:
    from forerun.engine.testmodel import main as make_test_model

    return make_test_model(list(argv))


def _train_drafter(argv: Sequence[str]) -> int:
    from forerun.train.cli import main as train_drafter

    return train_drafter(argv)


def _draft_server(argv: Sequence[str]) -> int:
    from forerun.engine.draftserver import main as draft_server

    return draft_server(argv)


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "serve": ("serve a model; takes every flag of text-generation-launcher", _serve),
    "bench": ("measure a server, ours or another", _bench),
    "doctor": ("what this machine offers, and what would be chosen", _doctor),
    "train-drafter": ("make a draft for a model, from text that it writes itself", _train_drafter),
    "draft-server": ("guesses for servers elsewhere, over HTTP", _draft_server),
    "make-test-model": ("write a tiny random model for tests", _make_test_model),
}


def _parsed(argv: Sequence[str], needs_model: bool) -> Config | None:
    try:
        return Config.parse(argv, needs_model=needs_model)
    except ConfigError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return None


def _asks(argv: Sequence[str], *flags: str) -> bool:
    return any(word in flags for word in argv)


def _overview() -> str:
    commands = "\n".join(f"  {name:<16} {says}" for name, (says, _) in COMMANDS.items())
    return f"forerun {__version__}: a server for text-generation-inference clients\n\nUsage: forerun COMMAND …\n\n{commands}"


if __name__ == "__main__":
    sys.exit(main())
