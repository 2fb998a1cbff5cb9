"""How often guesses of a kind hold: confidences that are honest because they are measured.

A *cell* is a kind of guess, numbered by its drafter (source, length of the match, agreement, depth …). Each has a running acceptance
rate: a prior worth `strength` observations, the mean of all outcomes until it has seen `memory` of them, and from then on a mean that
forgets exponentially. So a new server starts from the prior and a server whose clients change follows them.

A guess is scored when its parent turned out true, whether or not the target was asked about it: what became true is known, so every
guess next to it held or failed, also those that were dropped for their price. Nothing is learned of guesses behind a failed one.
"""

from __future__ import annotations

from collections.abc import Sequence


class Calibration:
    """`prior`: acceptance expected in each cell before anything was seen, in (0, 1). `rate` is read directly: it is the confidence."""

    __slots__ = ("_memory", "_proposed", "_weight", "rate")

    def __init__(self, prior: Sequence[float], strength: int = 16, memory: int = 512) -> None:
        self.rate = list(prior)
        self._weight = [strength] * len(self.rate)
        self._memory = memory
        self._proposed: dict[int, tuple[list[int], list[int], list[int]]] = {}

    def propose(self, row: int, token: list[int], parent: list[int], cell: list[int]) -> None:
        """A draft leaves for this row; `settle` will compare it with what became true behind its root. The lists are kept, not copied."""
        self._proposed[row] = (token, parent, cell)

    def settle(self, row: int, truth: Sequence[int]) -> None:
        """The tokens that followed the root of the row's last draft, if it had one."""
        proposed = self._proposed.pop(row, None)
        if proposed is None or not truth:
            return
        known, rate, weights, memory = len(truth), self.rate, self._weight, self._memory
        reached: list[int] = []
        for token, parent, cell in zip(*proposed):
            depth = 0 if parent < 0 else reached[parent]
            if not 0 <= depth < known:
                reached.append(-1)
                continue
            weight = weights[cell]
            if weight < memory:
                weight += 1
                weights[cell] = weight
            if token == truth[depth]:
                rate[cell] += (1.0 - rate[cell]) / weight
                reached.append(depth + 1)
            else:
                rate[cell] -= rate[cell] / weight
                reached.append(-1)

    def forget(self, row: int) -> None:
        """The row is gone, and what its last draft came to will not be known."""
        self._proposed.pop(row, None)
