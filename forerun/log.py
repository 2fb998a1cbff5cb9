"""The log: one line an event on standard output, for people or (with --json-output) as one JSON object, both in TGI's fields.

    2026-01-08T09:00:00.000000Z  INFO forerun.server: Success total_time=0.31
    {"timestamp":"2026-01-08T09:00:00.000000Z","level":"INFO","message":"Success","target":"forerun.server","total_time":0.31}

Owns the format and the level. Whoever logs says `structlog.get_logger("forerun.part")`. Loggers of libraries come out alike.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import sys
from typing import Any, TextIO

import msgspec
import structlog

from forerun.config import Logging

LEVELS = {"trace": 10, "debug": 10, "info": 20, "warn": 30, "warning": 30, "error": 40, "off": 50}
_COLOURS = {"DEBUG": "\x1b[34m", "INFO": "\x1b[32m", "WARN": "\x1b[33m", "ERROR": "\x1b[31m"}


def configure(config: Logging, stream: TextIO = sys.stdout) -> None:
    """Set up structlog and the standard library's logging for this process. Call it once, first."""
    level = level_of(config.log_level)
    if config.json_output:
        render = _json_line
    else:
        render = _colour_line if stream.isatty() and not config.log_colorize else _line
    structlog.configure(
        processors=[structlog.processors.format_exc_info, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *names: Lines(stream, names[0] if names else "forerun"),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [_Bridge(level)]
    root.setLevel(max(level, logging.WARNING))


def level_of(wanted: str) -> int:
    """TGI's LOG_LEVEL may be a filter (`info,tower=warn`): its bare word counts; without one, info."""
    words = [word.strip().lower() for word in wanted.split(",")]
    return next((LEVELS[word] for word in words if word in LEVELS), LEVELS["info"])


class Lines:
    """Writes finished lines. A log that cannot be written (a closed pipe, a full disk) must not stop the server."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self.name = name
        self._stream = stream

    def msg(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()

    debug = info = warning = warn = error = critical = fatal = exception = log = msg


class _Bridge(logging.Handler):
    """What libraries log through the standard library."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger(record.name).log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def _level(method: str) -> str:
    return {"warning": "WARN", "exception": "ERROR", "critical": "ERROR", "fatal": "ERROR"}.get(method, method.upper())


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _json_line(lines: Lines, method: str, event: Any) -> str:
    first = {"timestamp": _now(), "level": _level(method), "message": event.pop("event", ""), "target": lines.name}
    return msgspec.json.encode(first | event, enc_hook=str).decode()


def _line(lines: Lines, method: str, event: Any) -> str:
    return _assembled(_now(), f"{_level(method):>5}", lines.name, event)


def _colour_line(lines: Lines, method: str, event: Any) -> str:
    level = _level(method)
    return _assembled(f"\x1b[2m{_now()}\x1b[0m", f"{_COLOURS.get(level, '')}{level:>5}\x1b[0m", f"\x1b[2m{lines.name}\x1b[0m", event)


def _assembled(time: str, level: str, name: str, event: dict[str, Any]) -> str:
    message, trace = str(event.pop("event", "")), event.pop("exception", None)
    fields = "".join(f" {key}={_shown(value)}" for key, value in event.items())
    message = message.replace("\n", "\\n")
    return f"{time} {level} {name}: {message}{fields}" + (f"\n{trace}" if trace else "")


def _shown(value: object) -> str:
    """Bare where it is one plain word, else quoted: a value can never begin a new line or look like another field."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(' ="') else repr(text)
