"""Guesses from what was written before: in this sequence, and in the answers to others.

The idea of SuffixDecoding (Oliaro et al. 2411.04975) without its trees: a suffix tree over the last occurrences of a context is
what these occurrences and their continuations are, so it is drawn for each draft from the few newest and longest matches alone
(`history.py`). Two sources: the sequence itself, prompt and answer; and the answers (never the prompts) of sequences of the same
scope that have ended. The second is asked only when the first has no long match. Only committed tokens are ever entered.

    context  … the quick brown        matches (length, what followed)
                                      3  fox jumps over           the        fox ─ jumps ─ over     (2 of 3, the longest among them)
                                      2  fox jumps high      ⇒    quick ─┤              └ high
                                      1  bear                     brown      bear                    (shorter, outvoted)

A child is a kind of guess (`Cell`): its source, the length of its longest match (which grows by one with each level, since the
guesses on the way count as matched), and how its siblings' matches vote. `Calibration` says how often such a guess holds.
"""

from __future__ import annotations

import dataclasses
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from forerun.engine.drafters.calibration import Calibration
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Terms
from forerun.engine.drafters.history import GAP, History, Match, fresh
from forerun.engine.drafters.registry import Setting
from forerun.engine.errors import StartError

MOST = 16
"""guesses for a row, unless told otherwise"""
LOCAL_TOKENS = 1 << 15
"""tokens of a sequence that are searched, counted from its end (up to twice as many)"""
SHARED_TOKENS = 1 << 17
"""tokens of others' answers that are searched in each scope"""
MOST_SCOPES = 16
MATCHES = 3
"""occurrences looked at in each source: more cost time and gain nothing (measured on chat, code, maths and copied text)"""
SURE = 3
"""a match in the sequence itself that is this long makes others' answers superfluous"""
LEAST_SURVIVAL = 0.01
"""a node less likely than this pays on no device"""
SLACK = 0.5
"""Nodes down to so many times the price are mentioned: a row's experience may say that they are likelier."""

_SOLE, _ALL, _MOST, _FEW, _SHORTER = range(5)
"""Votes for a guess: of the only match, of all of them, of at least half, of fewer; or of matches that are not the longest ones."""
_PRIOR = (
    ((0.40, 0.80), (0.68, 0.75), (0.38, 0.94), (0.14, 0.93), (0.10, 0.93)),
    ((0.20, 0.86), (0.33, 0.78), (0.12, 0.92), (0.05, 0.97), (0.05, 0.95)),
)
"""For each source and vote: acceptance at length 1, and the factor by which what is missing to 1 shrinks with each bucket of length.
Measured on chat, code, maths and copied text of a small model; a server's own experience replaces it within some hundred guesses."""
_BUCKET = [0, 0, 1, 2, 3, 4, 5, 6, 7, *[8] * 2, *[9] * 3, *[10] * 4, *[11] * 100]
_BUCKETS = 12

_FIRST_CELL = [[[((source * 5 + vote) * 2 + deep) * _BUCKETS for deep in range(2)] for vote in range(5)] for source in range(2)]
_Waiting = tuple[float, int, int, int, int, list[Match], int]
"""(−survival, order, token, parent, cell, the matches that agree so far, depth): a node that may be next"""


def cells() -> list[float]:
    """The prior of each cell: (source, votes, first level or deeper, bucket of length)."""
    kinds = [kind for source in _PRIOR for kind in source]
    return [min(1 - (1 - first) * shrink**bucket, 0.98) for first, shrink in kinds for _ in range(2) for bucket in range(_BUCKETS)]


class Texts(NamedTuple):
    """What is looked up and how: see `Suffix`."""

    most: int = MOST
    tree: bool = True
    shared: bool = True
    shared_tokens: int = SHARED_TOKENS
    own_tokens: int = LOCAL_TOKENS

    @staticmethod
    def read(value: str, setting: Setting) -> Texts:
        """`value`: words joined by commas. `private`: do not learn from others' answers. `chain`: no siblings."""
        words = {word for word in value.split(",") if word}
        if unknown := words - {"private", "chain"}:
            raise StartError(f"speculator suffix does not know {', '.join(sorted(unknown))}", "use suffix, suffix=private or suffix=chain")
        tree, shared = setting.tree and "chain" not in words, "private" not in words
        return Texts(setting.nodes or MOST, tree, shared, SHARED_TOKENS, LOCAL_TOKENS)


@dataclasses.dataclass(eq=False, slots=True)
class _Row:
    history: History
    prompt: int
    scope: str


class Suffix:
    """`most`: nodes of a draft. `tree`: draw siblings, not only the likeliest path. `shared`: learn from the answers of others of the same
    scope (their text can be guessed at, never seen: a wrong guess costs time and changes nothing; but time can be measured).
    `shared_tokens`: that are searched of those in each scope; `own_tokens`: of a sequence."""

    def __init__(
        self,
        most: int = MOST,
        tree: bool = True,
        shared: bool = True,
        shared_tokens: int = SHARED_TOKENS,
        own_tokens: int = LOCAL_TOKENS,
    ) -> None:
        self.needs = Needs(most=most, lazy=True)
        self.calibration = Calibration(cells())
        self._tree = tree
        self._shares = shared
        self._shared_tokens, self._own_tokens = shared_tokens, own_tokens
        self._shared: dict[str, History] = {}
        self._rows: dict[int, _Row] = {}

    @classmethod
    def open(cls, value: str, setting: Setting) -> Suffix:
        """`value`: as `Texts.read` has it."""
        return cls(*Texts.read(value, setting))

    def absorb(self, commit: Commit) -> None:
        for i, number in enumerate(commit.rows):
            row = self._rows.get(number)
            if row is None or not commit.start[i]:
                row = self._rows[number] = self._open(commit, i)
                self.calibration.forget(number)
            new = fresh(commit, i, len(row.history))
            self.calibration.settle(number, new)
            row.history.extend(new)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        least = max(LEAST_SURVIVAL, SLACK * terms.price)
        return [self._propose(number, most, least) for number, most in zip(rows, budget)]

    def forget(self, rows: list[int]) -> None:
        for number in rows:
            self.calibration.forget(number)
            row = self._rows.pop(number, None)
            if row is not None and self._shares:
                self._share(row)

    def _open(self, commit: Commit, i: int) -> _Row:
        prompt = commit.prompt[i] if commit.prompt else len(commit.tokens[i])
        scope = commit.scope[i] if commit.scope else ""
        return _Row(History(self._own_tokens, 2 * len(commit.tokens[i])), prompt, scope)

    def _share(self, row: _Row) -> None:
        """The answer of a row that has ended is remembered for others. The scope that was written to longest ago makes room."""
        answer = row.history.since(row.prompt)
        if len(answer) < 2:
            return
        history = self._shared.pop(row.scope, None)
        if history is None:
            history = History(self._shared_tokens, self._shared_tokens // 2)
        self._shared[row.scope] = history
        if len(self._shared) > MOST_SCOPES:
            del self._shared[next(iter(self._shared))]
        history.extend([GAP, *answer])

    def _propose(self, number: int, most: int, least: float) -> Draft:
        row = self._rows.get(number)
        if row is None or most < 1:
            return Draft.none()
        own = row.history.tokens
        matches = row.history.find(own, MATCHES)
        if not matches or matches[0][0] > -SURE:
            others = self._shared.get(row.scope)
            if others is not None:
                matches += others.find(own, MATCHES, 1)
        if not matches:
            return Draft.none()
        matches.sort()
        token, parent, cell, confidence = self._grow(matches, most, -least)
        self.calibration.propose(number, token, parent, cell)
        return Draft(token, parent, confidence, [False] * len(token))

    def _grow(self, matches: list[Match], most: int, least: float) -> tuple[list[int], list[int], list[int], list[float]]:
        """The likeliest `most` nodes of the tree that the matches (sorted) span, best first (so a parent comes before its child)."""
        token: list[int] = []
        parent: list[int] = []
        cell: list[int] = []
        confidence: list[float] = []
        rate = self.calibration.rate
        waiting: list[_Waiting] = []
        at, depth, count, survival = -1, 0, 0, -1.0
        while True:
            if len(matches) == 1:
                length, source, index, tokens, period = matches[0]
                place = depth - index
                if place >= len(tokens):
                    place = depth % period - index if period else 0
                guess = tokens[place]
                kind = _FIRST_CELL[source][_SOLE][depth > 0] + _BUCKET[depth - length]
                survival *= rate[kind]
                depth += 1
                if guess < 0 or survival > least:
                    if not waiting:
                        break
                    survival, _, guess, at, kind, matches, depth = heappop(waiting)
                elif waiting and waiting[0][0] < survival:
                    count += 1
                    survival, _, guess, at, kind, matches, depth = heapreplace(waiting, (survival, count, guess, at, kind, matches, depth))
            else:
                count = _branch(waiting, matches, rate, survival, at, depth, count, least)
                if not waiting:
                    break
                if not self._tree:
                    del waiting[1:]
                survival, _, guess, at, kind, matches, depth = heappop(waiting)
            token.append(guess)
            parent.append(at)
            cell.append(kind)
            confidence.append(rate[kind])
            at = len(token) - 1
            if at + 1 == most:
                break
        return token, parent, cell, confidence


def _branch(
    waiting: list[_Waiting], matches: list[Match], rate: list[float], survival: float, at: int, depth: int, count: int, least: float
) -> int:
    """Push what the matches (sorted) say follows node `at`, which stands `depth` levels down, those of the longest match first. Returns the
    new count of all that was pushed."""
    votes: dict[int, list[Match]] = {}
    cast = 0
    for match in matches:
        _, _, index, tokens, period = match
        place = depth - index
        if place >= len(tokens):
            if not period:
                continue
            place = depth % period - index
        guess = tokens[place]
        if guess < 0:
            continue
        cast += 1
        if guess in votes:
            votes[guess].append(match)
        else:
            votes[guess] = [match]
    top = 0
    deep = depth > 0
    for guess, voters in votes.items():
        length, source, _, _, _ = voters[0]
        n = len(voters)
        if not top:
            top = length
        if length > top:
            vote = _SHORTER
        elif n < cast:
            vote = _MOST if 2 * n >= cast else _FEW
        else:
            vote = _SOLE if n == 1 else _ALL
        kind = _FIRST_CELL[source][vote][deep] + _BUCKET[depth - length]
        alive = survival * rate[kind]
        if alive <= least:
            count += 1
            heappush(waiting, (alive, count, guess, at, kind, voters, depth + 1))
    return count
