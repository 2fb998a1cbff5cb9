"""Log lines: one an event, for people or as JSON, whoever logs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from forerun import log
from forerun.config import Logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def logged(config: Logging, act) -> list[str]:
    stream = io.StringIO()
    log.configure(config, stream)
    act(structlog.get_logger("forerun.test"))
    return stream.getvalue().splitlines()


def test_json_has_tgi_fields() -> None:
    (line,) = logged(Logging(json_output=True), lambda say: say.info("Success", total_time=0.5, path=object))
    found = json.loads(line)
    assert list(found)[:4] == ["timestamp", "level", "message", "target"]
    assert (found["level"], found["message"], found["target"], found["total_time"]) == ("INFO", "Success", "forerun.test", 0.5)


def test_human_lines() -> None:
    (line,) = logged(Logging(), lambda say: say.warning("slow", seconds=0.123456789, name="a b", empty=""))
    assert line.partition(" ")[2] == " WARN forerun.test: slow seconds=0.123457 name='a b' empty=''"


def test_nothing_logged_can_forge_a_line() -> None:
    (line,) = logged(Logging(), lambda say: say.info("a\nb", value="x\nlevel=ERROR"))
    assert "a\\nb" in line
    assert "value='x\\nlevel=ERROR'" in line
    assert len(logged(Logging(json_output=True), lambda say: say.info("a\nb"))) == 1


def test_exceptions() -> None:
    def act(say) -> None:
        try:
            raise ValueError("boom")
        except ValueError:
            say.exception("failed")

    assert logged(Logging(), act)[-1] == "ValueError: boom"
    (line,) = logged(Logging(json_output=True), act)
    assert "ValueError: boom" in json.loads(line)["exception"]
    assert json.loads(line)["level"] == "ERROR"


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        ("debug", "dew"),
        ("info", "ew"),
        ("warn", "w"),
        ("error", ""),
        ("off", ""),
        ("warn,tower=debug", "w"),
        ("tower=debug", "ew"),
        ("TRACE", "dew"),
    ],
)
def test_levels(wanted: str, seen: str) -> None:
    def act(say) -> None:
        say.debug("d")
        say.info("e")
        say.warning("w")

    assert "".join(line[-1] for line in logged(Logging(log_level=wanted), act)) == seen


def test_libraries_come_out_alike() -> None:
    lines = logged(Logging(json_output=True), lambda _: logging.getLogger("aiohttp.server").warning("odd %s", "request"))
    assert [(json.loads(line)["message"], json.loads(line)["target"]) for line in lines] == [("odd request", "aiohttp.server")]


def test_a_closed_log_stops_nothing() -> None:
    stream = io.StringIO()
    log.configure(Logging(), stream)
    stream.close()
    structlog.get_logger("x").info("lost")


def test_colour_is_for_terminals_and_off_when_colorize_is_set() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for config, coloured in ((Logging(), True), (Logging(log_colorize=True), False), (Logging(json_output=True), False)):
        stream = Terminal()
        log.configure(config, stream)
        structlog.get_logger("x").info("hello")
        assert ("\x1b" in stream.getvalue()) == coloured
