"""Calls of tools as they arrive: the name as soon as it is certain, then the arguments piece by piece, as OpenAI streams them.

A call has begun when its name and the opening of its arguments stand there; from then on what the model writes up to their end are its
arguments, well-formed or not. Calls in any other form (`dialects.parse` knows more of them) are read once they are complete; what begins
as a call and is none is given back as text.

    head ──name and `{`──▶ arguments ──`}`──▶ the rest of the call's object ──`}`──▶ between ──`{`──▶ head      JSON
    head ──`name(key=`──▶ arguments, one at a time ──`)`──▶ between ──`,`──▶ head                               Python
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Literal, Protocol

from forerun.server.dialects import MISTRAL, PYTHON_TAG, PYTHONIC, Dialect, parse

Kind = Literal["text", "thought", "call", "arguments"]
# Possessive all over: a model that writes thousands of spaces must not make a match take their square.
_START = rf"\s*+(?:{re.escape(PYTHON_TAG)})?\s*+(?:\[\s*+)?+"
_NAME = r'"name"\s*+:\s*+("(?:[^"\\\n]|\\.)++")'
_OPENS = r'(?=\{\s*+["}])'
_OBJECT = re.compile(rf'{_START}\{{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?{_NAME}\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+{_OPENS}')
_NAMED = re.compile(rf"\s*+([\w.-]++)\s*+(?:\[ARGS\])?\s*+{_OPENS}")
_PYTHON = re.compile(rf"{_START}([^\W\d]\w*+(?:\.[^\W\d]\w*+)*+)\s*+\(\s*+(?=\)|[^\W\d]\w*+\s*+=[^=])")
_HEAD_CHARS = 4096
"""in which a call must have begun; longer names are nobody's"""
_BETWEEN = re.compile(r"\s*([,;]?)\s*(\]?)\s*")


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """`call`: the name of one that begins. `arguments`: more of the JSON text of its arguments."""

    kind: Kind
    text: str


class _Arguments(Protocol):
    """Of one call."""

    def read(self, text: str) -> tuple[str, str | None]:
        """More of their JSON text, and what stands behind the call; None = it is not over."""
        ...


class Calls:
    """Reads from behind the mark that opens calls. `rest`: what stands behind them; None = they are not over."""

    def __init__(self, dialect: Dialect) -> None:
        self.rest: str | None = None
        self._dialect = dialect
        self._held = ""
        self._arguments: _Arguments | None = None
        self._head = True
        """a call must come next"""
        self._opens = dialect.opens
        """what was read before `_held`, and is text if there is no call"""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        found: list[Piece] = []
        while self.rest is None and self._held and self._advance(found):
            pass
        return found

    def finish(self) -> list[Piece]:
        """What was held, when nothing more comes. Of an argument in Python that was cut off there is nothing to tell."""
        if self._head:
            return self._whole(self._held)
        held = "" if self._arguments else _BETWEEN.sub("", self._held, 1)
        return [Piece("text", held)] if held else []

    def _advance(self, found: list[Piece]) -> bool:
        """One step; whether another may follow."""
        if self._arguments is not None:
            given, behind = self._arguments.read(self._held)
            if given:
                found.append(Piece("arguments", given))
            self._held = behind or ""
            if behind is not None:
                self._arguments = None
            return behind is not None
        return self._begin(found) if self._head else self._between()

    def _begin(self, found: list[Piece]) -> bool:
        opening = _opening(self._dialect, self._held)
        if opening is not None:
            name, at, self._arguments = opening
            found.append(Piece("call", name))
            self._held, self._head, self._opens = self._held[at:], False, ""
            return True
        closes = self._dialect.closes
        if closes and closes in self._held:
            inside, _, self.rest = self._held.partition(closes)
            found += self._whole(inside, closes)
        return False

    def _between(self) -> bool:
        """Behind a call: the end of all, or another one."""
        between, closes = _BETWEEN.match(self._held), self._dialect.closes
        assert between is not None
        held, comma, bracket = self._held[between.end() :], between[1], between[2]
        if closes and held.startswith(closes):
            self.rest = held[len(closes) :]
        elif bracket and held:
            self.rest = held
        elif held.startswith("{") or (comma and held and self._dialect is PYTHONIC):
            self._held, self._head = held, True
        elif held and not closes.startswith(held):
            self.rest = held
        return self._head

    def _whole(self, inside: str, closes: str = "") -> list[Piece]:
        calls = parse(self._dialect, inside)
        if not calls:
            text = self._opens + inside + closes
            return [Piece("text", text)] if text else []
        return [piece for call in calls for piece in (Piece("call", call.name), Piece("arguments", call.arguments))]


def _opening(dialect: Dialect, text: str) -> tuple[str, int, _Arguments] | None:
    """The call that the text begins with: its name and where its arguments stand."""
    if dialect is PYTHONIC:
        head = _PYTHON.match(text, 0, _HEAD_CHARS)
        return (head[1], head.end(), _PythonArguments()) if head else None
    if (head := _OBJECT.match(text, 0, _HEAD_CHARS)) and (name := _text(head[1])):
        return name, head.end(), _JsonArguments(inner=True)
    if dialect is MISTRAL and (head := _NAMED.match(text, 0, _HEAD_CHARS)):
        return head[1], head.end(), _JsonArguments(inner=False)
    return None


class _JsonArguments:
    """An object, given as it was written. `inner`: it stands inside another one, whose other members say nothing."""

    def __init__(self, inner: bool) -> None:
        self._scan = _Scan('"')
        self._outer = _Scan('"', 1) if inner else None
        self._over = False
        self._more = False
        """the other object has gone on behind them"""

    def read(self, text: str) -> tuple[str, str | None]:
        given = ""
        if not self._over:
            end = self._scan.end(text)
            if end is None:
                return text, None
            given, text, self._over = text[: end + 1], text[end + 1 :], True
        if self._outer is None or (not self._more and text.lstrip()[:1] not in ("", ",", "}")):
            return given, text
        self._more = self._more or bool(text.strip())
        end = self._outer.end(text)
        return given, None if end is None else text[end + 1 :]


class _PythonArguments:
    """Keyword arguments, given as members of a JSON object, each when it is complete."""

    def __init__(self) -> None:
        self._scan = _Scan("\"'", 1, commas=True)
        self._part = ""
        self._before = "{"

    def read(self, text: str) -> tuple[str, str | None]:
        given = ""
        while (end := self._scan.end(text)) is not None:
            given += self._member(self._part + text[:end])
            closed, text, self._part = text[end] != ",", text[end + 1 :], ""
            if closed:
                return f"{given}{self._before.strip(', ')}}}", text
        self._part += text
        return given, None

    def _member(self, written: str) -> str:
        """A value that JSON cannot say is told as the text that was written."""
        name, equals, value = written.strip().partition("=")
        if not name:
            return ""
        before, self._before = self._before, ", "
        if calls := parse(PYTHONIC, f"f({written})"):
            return before + calls[0].arguments[1:-1]
        return before + (f"{json.dumps(name.strip())}: {json.dumps(value.strip(), ensure_ascii=False)}" if equals else written.strip())


class _Scan:
    """Follows quotes and brackets through text that comes in pieces. `depth`: of brackets that are open already."""

    def __init__(self, quotes: str, depth: int = 0, *, commas: bool = False) -> None:
        self._quotes = quotes
        self._depth = depth
        self._commas = commas
        self._quote = ""
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Where in the next piece the last bracket closes, or, with `commas`, a comma stands outside of all others."""
        for at, char in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in self._quotes:
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if not self._depth:
                    return at
            elif char == "," and self._commas and self._depth == 1:
                return at
        return None


def _text(written: str) -> str:
    """Of a JSON string; empty if it is none that can be sent on."""
    try:
        name: str = json.loads(written)
        name.encode()
    except ValueError:
        return ""
    return name
