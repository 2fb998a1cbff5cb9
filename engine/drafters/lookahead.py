"""Guesses that the target makes for itself where rows are free: lookahead decoding (Fu et al. 2402.02057).

Beside each root the target computes a *window* of tokens that are to come later. They were made up at first and are wrong; but each step
replaces them by what the target picks behind them, so that they converge (Jacobi iteration), and runs of them that stand together in the
target's own words, n-grams, are remembered in a *pool*. A guess is an n-gram of the pool that begins with the root. No weights.

    columns        root ─┬─ a0 ──── b0 ──── c0          column a = [a0, a1]: ngram − 1 tokens of a trajectory. The first tokens of the
    of the window        │  └─ a1   └─ b1   └─ c1        columns are a text, each other token sees its own column and the columns' first
    guesses              └─ g ─ g                       tokens before it: the paper's mask as a tree of probes

    pick at a1 = a2      ⇒ the pool learns a0 → (a1, a2);  the column becomes [a1, a2], one place further on, as the root is
    m guesses held       ⇒ the first m columns are over, m new ones begin at the end, from tokens of the text

A probe is never accepted, so a window brings nothing now; what it brings later is measured, as guesses that held for each probe computed.
That is its confidence, so that price and tolls leave windows out wherever rows are not as good as free: on a device with few rows to
spare, and wherever many streams share a step. A window that is left out is not kept up either: nothing is learned and nothing made up.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from forerun.engine.drafters.calibration import Calibration
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Terms
from forerun.engine.drafters.history import fresh
from forerun.engine.drafters.registry import Setting
from forerun.engine.errors import StartError

WINDOW, NGRAM, GUESSES = 5, 4, 5
"""columns, tokens of an n-gram, n-grams tried at a root: unless told otherwise"""
MOST_KEYS = 4096
"""first tokens that a row's pool remembers"""
RECENT = 256
"""newest tokens of a row that new columns begin with"""
_RANKS = 3
_PRIOR = [0.25, 0.15, 0.1, 0.6, 0.5, 0.4]
"""acceptance of an n-gram's first token by rank in age, and of its further ones"""
_YIELD, _STRENGTH, _FADE = 0.05, 100.0, 0.998
"""guesses that a probe is believed to bring later: at first, how many probes that belief is worth, and what is left of what was seen
after each step"""


@dataclasses.dataclass(eq=False, slots=True)
class _Row:
    """`columns`: of the window, as far as it was needed; `pool`: for each first token the tokens that may follow, newest first; `asked`:
    the paths of the columns that were proposed last, by column; `guesses`: the draft's guesses, as (token, parent)."""

    recent: list[int]
    known: int
    columns: list[list[int]]
    pool: dict[int, list[tuple[int, ...]]]
    dice: random.Random
    asked: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    guesses: list[tuple[int, int]] = dataclasses.field(default_factory=list)


class Lookahead:
    """`most`: nodes of a draft, probes included."""

    def __init__(self, window: int = WINDOW, ngram: int = NGRAM, guesses: int = GUESSES, most: int = 0) -> None:
        self._window, self._ngram, self._tried = window, ngram, guesses
        self.needs = Needs(most=most or (window + guesses) * (ngram - 1), lazy=True)
        self.calibration = Calibration(_PRIOR)
        self._rows: dict[int, _Row] = {}
        self._brought = self._probed = 0.0

    @classmethod
    def open(cls, value: str, setting: Setting) -> Lookahead:
        """`value`: window=W,ngram=N,guesses=G, each of them optional."""
        sizes = {"window": WINDOW, "ngram": NGRAM, "guesses": GUESSES}
        for part in filter(None, value.split(",")):
            name, _, number = part.partition("=")
            if name not in sizes or not number.isdecimal() or int(number) < (2 if name == "ngram" else 1):
                raise StartError(f"speculator lookahead does not know {part!r}", "use lookahead or lookahead=window=5,ngram=4,guesses=5")
            sizes[name] = int(number)
        if not setting.tree:
            raise StartError("lookahead needs a target that verifies trees", "use suffix, or leave --acceptance rejection out")
        return cls(**sizes, most=setting.nodes)

    @property
    def worth(self) -> float:
        """Guesses that a probe is expected to bring later."""
        return (self._brought + _YIELD * _STRENGTH) / (self._probed + _STRENGTH)

    def absorb(self, commit: Commit) -> None:
        for i, number in enumerate(commit.rows):
            row = self._rows.get(number)
            if row is None or not commit.start[i]:
                row = self._rows[number] = _Row([], 0, [], {}, random.Random(0))
                self.calibration.forget(number)
            new = fresh(commit, i, row.known)
            self.calibration.settle(number, new)
            self._brought += _held(row.guesses, new)
            row.known += len(new)
            row.recent += new
            del row.recent[:-RECENT]
            self._advance(row, len(new), commit.answers[i] if commit.answers else {})

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self._brought *= _FADE
        self._probed *= _FADE
        return [self._propose(number, most, terms) for number, most in zip(rows, budget)]

    def forget(self, rows: list[int]) -> None:
        for number in rows:
            self.calibration.forget(number)
            self._rows.pop(number, None)

    def _advance(self, row: _Row, count: int, answers: dict[tuple[int, ...], int]) -> None:
        """So many tokens became true, and the target picked these behind the paths of the window."""
        for place, path in row.asked.items():
            pick = answers.get(path)
            if pick is not None:
                self._probed += len(row.columns[place])
                column = [*row.columns[place], pick]
                if len(column) == self._ngram:
                    _learn(row.pool, column, self._tried)
                    del column[0]
                row.columns[place] = column
        row.asked, row.guesses = {}, []
        del row.columns[: max(0, count - 1)]

    def _propose(self, number: int, most: int, terms: Terms) -> Draft:
        row = self._rows.get(number)
        if row is None or most < 1:
            return Draft.none()
        token, parent, cell = self._guess(row, most)
        self.calibration.propose(number, token, parent, cell)
        row.guesses = list(zip(token, parent))
        guesses = len(token)
        confidence = [self.calibration.rate[kind] for kind in cell]
        token, parent = list(token), list(parent)
        row.asked = {}
        if self.worth >= terms.price:
            self._probe(row, most, token, parent)
        probes = len(token) - guesses
        confidence += [self.worth if parent[node] < 0 else 1.0 for node in range(guesses, len(token))]
        return Draft(token, parent, confidence, [False] * guesses + [True] * probes)

    def _guess(self, row: _Row, most: int) -> tuple[list[int], list[int], list[int]]:
        """The n-grams behind the root as one tree, the newest first: tokens, parents, cells."""
        token: list[int] = []
        parent: list[int] = []
        cell: list[int] = []
        nodes: dict[tuple[int, int], int] = {}
        for rank, gram in enumerate(row.pool.get(row.recent[-1], ()) if row.recent else ()):
            at = -1
            for depth, each in enumerate(gram):
                node = nodes.get((at, each))
                if node is None:
                    if len(token) == most:
                        break
                    node = nodes[at, each] = len(token)
                    token.append(each)
                    parent.append(at)
                    cell.append(min(rank, _RANKS - 1) + _RANKS * (depth > 0))
                at = node
        return token, parent, cell

    def _probe(self, row: _Row, most: int, token: list[int], parent: list[int]) -> None:
        """Adds the window, column by column, as far as whole columns fit; new columns begin with tokens of the text."""
        if row.recent:
            row.columns += [[row.dice.choice(row.recent)] for _ in range(self._window - len(row.columns))]
        first = -1
        line: tuple[int, ...] = ()
        for place, column in enumerate(row.columns):
            if len(token) + len(column) > most:
                return
            at = first
            for each in column:
                token.append(each)
                parent.append(at)
                at = len(token) - 1
            row.asked[place] = (*line, *column)
            first, line = len(token) - len(column), (*line, column[0])


def _learn(pool: dict[int, list[tuple[int, ...]]], gram: Sequence[int], most: int) -> None:
    """The newest n-gram of its first token stands first. The token that was written to longest ago makes room."""
    key, follows = gram[0], tuple(gram[1:])
    known = [other for other in pool.pop(key, ()) if other != follows]
    pool[key] = [follows, *known][:most]
    if len(pool) > MOST_KEYS:
        del pool[next(iter(pool))]


def _held(guesses: Sequence[tuple[int, int]], truth: Sequence[int]) -> int:
    """How many guesses of a draft became true."""
    depth = 0
    reached: list[int] = []
    for token, parent in guesses:
        above = 0 if parent < 0 else reached[parent]
        holds = 0 <= above < len(truth) and token == truth[above]
        reached.append(above + 1 if holds else -1)
        depth = max(depth, reached[-1])
    return depth
