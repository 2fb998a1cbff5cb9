"""What asking the drafter about a sequence brings: accepted guesses, and the nodes that had to be verified for them.

Which nodes are verified, the worker decides by their confidence and the toll. What it cannot know is whether asking is worth the
drafter's time, and whether the confidences are to be believed for this very sequence. Both show in what came of the last asks. A new
sequence starts from what all of them together have shown.

A sequence that is not worth asking about is asked all the same now and then, the more rarely the dearer: `pause` says when next.
"""

from __future__ import annotations

import math

_MEMORY = 12
_PRIOR = 3
"""asks of its own that the experience with others counts for"""
_ALL_MEMORY = 512
_EXPLORE = 0.003
"""share of a sequence's tokens that looking again may cost"""
_LONGEST_PAUSE = 512


class Mean:
    """Accepted guesses and verified nodes of an ask: the mean of all, forgetting exponentially once there were `memory` of them."""

    __slots__ = ("accepted", "memory", "nodes", "weight")

    def __init__(self, memory: int = _ALL_MEMORY, accepted: float = 0.0, nodes: float = 0.0, weight: int = 0) -> None:
        self.memory = memory
        self.accepted = accepted
        self.nodes = nodes
        self.weight = weight

    def observe(self, nodes: int, accepted: int) -> None:
        self.weight = min(self.weight + 1, self.memory)
        self.accepted += (accepted - self.accepted) / self.weight
        self.nodes += (nodes - self.nodes) / self.weight


class Yield:
    """Of one sequence. `all`: of all sequences so far. `asked`: in the last step. `due`: round in which it is asked about again even if it
    is not worth it."""

    __slots__ = ("asked", "due", "mean")

    def __init__(self, all: Mean) -> None:
        self.mean = Mean(_MEMORY, all.accepted, all.nodes, _PRIOR)
        self.asked = False
        self.due = 0

    def worth(self, price: float) -> float:
        """Tokens that an ask earns beyond what its nodes cost at this price each."""
        return self.mean.accepted - price * self.mean.nodes

    def pause(self, round: int, loss: float) -> None:
        """`loss`: tokens that an ask costs more than it brings."""
        self.due = round + max(1, min(_LONGEST_PAUSE, math.ceil(loss / _EXPLORE)))
