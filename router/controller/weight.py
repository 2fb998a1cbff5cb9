"""What a guessed token of a sequence is worth, by the priorities of those that run together.

Everybody gets a token in every step; a priority decides about the surplus. A node is verified if weight · survival ≥ λ, so an urgent
sequence guesses where the others, at the same price, do not. Weights are relative: where all are equally urgent, nobody is.
"""

from __future__ import annotations

from collections.abc import Sequence

STEP = 1.5
"""what a unit of priority multiplies a weight with"""
_FURTHEST = 16
"""units of priority that count"""
LEAST, MOST = 0.25, 4.0


def weights(priorities: Sequence[int]) -> list[float]:
    """One for each sequence, of mean one before they are cut to LEAST … MOST; empty = all alike."""
    if not priorities or min(priorities) == max(priorities):
        return []
    first = max(priorities)
    raw = [STEP ** -min(_FURTHEST, first - priority) for priority in priorities]
    mean = sum(raw) / len(raw)
    return [max(LEAST, min(MOST, value / mean)) for value in raw]
