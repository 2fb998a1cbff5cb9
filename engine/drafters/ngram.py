"""Guesses from the sequence itself: what followed the last time the newest tokens stood there (prompt lookup).

The longest match wins, among equals the newest; the longer it is, the longer the draft. A match of a single token, which is all that
TGI's rule looks at, counts for what experience says it is worth. `suffix` does all that this drafter does and more; this one is cheaper
still and remembers nothing of others.
"""

from __future__ import annotations

from forerun.engine.drafters.calibration import Calibration
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Terms
from forerun.engine.drafters.history import LONGEST, History, fresh
from forerun.engine.drafters.registry import Setting
from forerun.engine.errors import StartError

MOST = 16
"""guesses for a row, unless told otherwise"""
LOCAL_TOKENS = 1 << 15
"""tokens of a sequence that are searched, counted from its end (up to twice as many)"""
STRETCH = 4
"""a match of n tokens is followed for at most so many times n"""
MATCHES = 4
"""occurrences that are compared"""
LEAST_SURVIVAL = 0.01


class Ngram:
    """`most`: nodes of a draft. A cell of the calibration is (first guess or later, matched tokens before the guess)."""

    def __init__(self, most: int = MOST) -> None:
        self.needs = Needs(most=most, lazy=True)
        self.calibration = Calibration([min(1 - 0.7 * 0.8 ** (length - 1), 0.98) for _ in range(2) for length in range(1, LONGEST + 1)])
        self._rows: dict[int, History] = {}

    @classmethod
    def open(cls, value: str, setting: Setting) -> Ngram:
        if value:
            raise StartError(f"speculator ngram has no options, {value!r} was given", "use --speculator ngram and --speculate N")
        return cls(setting.nodes or MOST)

    def absorb(self, commit: Commit) -> None:
        for i, number in enumerate(commit.rows):
            history = self._rows.get(number)
            if history is None or not commit.start[i]:
                history = self._rows[number] = History(LOCAL_TOKENS, 2 * len(commit.tokens[i]))
                self.calibration.forget(number)
            new = fresh(commit, i, len(history))
            self.calibration.settle(number, new)
            history.extend(new)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        return [self._propose(number, most) for number, most in zip(rows, budget)]

    def forget(self, rows: list[int]) -> None:
        for number in rows:
            self.calibration.forget(number)
            self._rows.pop(number, None)

    def _propose(self, number: int, most: int) -> Draft:
        history = self._rows.get(number)
        matches = history.find(history.tokens, MATCHES) if history is not None else []
        if not matches:
            return Draft.none()
        length, _, index, tokens, period = min(matches)
        rate = self.calibration.rate
        token: list[int] = []
        cell: list[int] = []
        confidence: list[float] = []
        survival = 1.0
        for depth in range(min(most, -length * STRETCH)):
            place = depth - index
            guess = tokens[place if place < len(tokens) else depth % period - index]
            kind = min(depth - length, LONGEST) - 1 + (LONGEST if depth else 0)
            survival *= rate[kind]
            if survival < LEAST_SURVIVAL:
                break
            token.append(guess)
            cell.append(kind)
            confidence.append(rate[kind])
        draft = Draft.chain(token, confidence)
        self.calibration.propose(number, token, draft.parent, cell)
        return draft
