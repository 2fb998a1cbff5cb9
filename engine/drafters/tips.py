"""What heads on the target's last hidden state know of every row: its tokens, and the state that the newest of them came out of.

    tokens     t0 t1 … tn−1 │ tn = root            state: the final norm's result at tn−1, where tn was picked; heads look beyond tn

One state is all there is, so there is nothing to catch up with and nothing to roll back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from forerun.engine.drafters.draft import Commit
from forerun.engine.drafters.history import fresh
from forerun.engine.drafters.taps import open_row
from forerun.engine.rows import Row


@dataclasses.dataclass(eq=False, slots=True)
class Tip:
    """`state`: [H], None = the row is inside its prompt."""

    row: Row
    state: Tensor | None = None


class Tips:
    def __init__(self) -> None:
        self._tips: dict[int, Tip] = {}

    def absorb(self, commit: Commit) -> list[tuple[int, list[int]]]:
        """(row, the tokens behind the root it had) of each row; none of a row that begins."""
        told: list[tuple[int, list[int]]] = []
        for i, number in enumerate(commit.rows):
            tip = self._tips.get(number)
            begins = tip is None or not commit.start[i]
            if tip is None or begins:
                tip = self._tips[number] = Tip(open_row(commit, i))
            new = fresh(commit, i, len(tip.row.tokens))
            tip.row.commit(new, 0)
            ends = commit.next[i] is not None and commit.features is not None and len(commit.features[i]) > 0
            tip.state = commit.features[i][-1].clone() if ends and commit.features is not None else None
            told.append((number, [] if begins else new))
        return told

    def ready(self, rows: Sequence[int], budget: Sequence[int]) -> list[tuple[Row, Tensor, int]]:
        """(row, state, most nodes) of those that can be drafted for."""
        found = []
        for number, most in zip(rows, budget):
            tip = self._tips.get(number)
            if tip is not None and tip.state is not None and most > 0:
                found.append((tip.row, tip.state, most))
        return found

    def forget(self, rows: Sequence[int]) -> None:
        for number in rows:
            self._tips.pop(number, None)
