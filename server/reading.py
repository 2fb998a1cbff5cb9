"""What an assistant's text is made of: what it says, what it thinks, and the tools it calls.

A `Reader` takes the text as it arrives and gives it back in pieces; what may become a mark is held until it is clear. Text that begins as
a call and is none is given back as text: nothing a model says is lost. Knows no HTTP and no tokens.
"""

from __future__ import annotations

from typing import Literal

from forerun.server.calls import Calls, Kind, Piece
from forerun.server.dialects import PYTHON_TAG, Dialect

THINK, THOUGHT = "<think>", "</think>"


def thinks(template: str) -> bool:
    return THOUGHT in template


class Reader:
    """Reads one answer. `dialect`: None = calls are not looked for. `thinking`: thoughts may come first; `inside`: the prompt has
    opened them already. `single`: calls behind the first are left out."""

    def __init__(self, dialect: Dialect | None, thinking: bool = False, inside: bool = False, single: bool = False) -> None:
        self._dialect = dialect
        self._single = single
        self._begun = 0
        self._state: Literal["start", "thought", "text", "call"] = "thought" if inside else "start"
        self._thinking = thinking
        self._held = ""
        self._skip = inside
        """newlines that come next belong to the mark before them"""
        self._calls: Calls | None = None

    def push(self, text: str) -> list[Piece]:
        """What is clear by now."""
        self._held += text
        found: list[Piece] = []
        while self._advance(found):
            pass
        return self._wanted(found)

    def finish(self) -> list[Piece]:
        """What was held, when nothing more comes."""
        if self._state == "call":
            assert self._calls is not None
            return self._wanted(self._calls.finish())
        held, self._held = self._held, ""
        kind: Kind = "thought" if self._state == "thought" else "text"
        return [Piece(kind, held)] if held else []

    def _wanted(self, found: list[Piece]) -> list[Piece]:
        if not self._single:
            return found
        kept: list[Piece] = []
        for piece in found:
            self._begun += piece.kind == "call"
            if self._begun < 2 or piece.kind not in ("call", "arguments"):
                kept.append(piece)
        return kept

    def _advance(self, found: list[Piece]) -> bool:
        """One step; whether another may follow."""
        if self._skip:
            self._held = self._held.lstrip("\n")
            self._skip = not self._held
        if self._state == "start":
            return self._start()
        if self._state == "thought":
            return self._upto(THOUGHT, "thought", "text", found)
        if self._state == "text":
            dialect = self._dialect
            if dialect is None or not dialect.opens:
                self._emit("text", len(self._held), found)
                return False
            return self._upto(dialect.opens, "text", "call", found)
        return self._call(found)

    def _call(self, found: list[Piece]) -> bool:
        assert self._dialect is not None
        calls = self._calls = self._calls or Calls(self._dialect)
        found += calls.push(self._held)
        self._held = calls.rest or ""
        if calls.rest is None:
            return False
        self._calls, self._state, self._skip = None, "text", True
        return True

    def _start(self) -> bool:
        """The first visible characters tell whether thoughts come, or a call, or text."""
        seen = self._held.lstrip()
        if not seen:
            return False
        if self._thinking and THINK.startswith(seen[: len(THINK)]):
            if len(seen) < len(THINK):
                return False
            self._held, self._state, self._skip = seen[len(THINK) :], "thought", True
            return True
        dialect = self._dialect
        whole = dialect is not None and not dialect.opens and seen[0] in dialect.first
        if whole and seen[0] == "<" and not PYTHON_TAG.startswith(seen[: len(PYTHON_TAG)]):
            whole = False
        self._state = "call" if whole else "text"
        return True

    def _upto(self, mark: str, kind: Kind, then: Literal["text", "call"], found: list[Piece]) -> bool:
        """Give what comes before the mark and the newlines in front of it; behind it another state begins."""
        before, met, behind = self._held.partition(mark)
        clear = before if met else before[: len(before) - _overlap(before, mark)]
        self._emit(kind, len(clear.rstrip("\n")), found)
        if met:
            self._held, self._state, self._skip = behind, then, then == "text"
        return bool(met)

    def _emit(self, kind: Kind, count: int, found: list[Piece]) -> None:
        if count > 0:
            found.append(Piece(kind, self._held[:count]))
            self._held = self._held[count:]


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
