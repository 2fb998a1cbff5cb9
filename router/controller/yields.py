"""What asking the drafter about a sequence brings: accepted guesses, and the time it took to verify them.

Which nodes are verified, the worker decides by their confidence and the toll. What it cannot know is whether asking is worth the
drafter's time, and whether the confidences are to be believed for this very sequence. Both show in what came of the last asks. A new
sequence starts from what all of them together have shown.

A sequence that is not worth asking about is asked all the same now and then, the more rarely the dearer (`Curiosity`).
"""

from __future__ import annotations

_MEMORY = 12
_PRIOR = 3
"""asks of its own that the experience with others counts for"""
_ALL_MEMORY = 512
_EXPLORE = 0.003
"""share of all tokens that looking again may cost"""
_HONEST, _HONEST_FADE = 6.0, 0.998
"""accepted guesses that the belief in a worker's expectations is worth at the start, and what an ask leaves of the older ones"""
_FIRST_CREDIT = 0.6
"""tokens, at the start and at the most"""


class Mean:
    """Of an ask: accepted guesses, verified nodes, and the seconds by which these made their step longer. The mean of all, forgetting
    exponentially once there were `memory` of them."""

    __slots__ = ("accepted", "memory", "nodes", "seconds", "weight")

    def __init__(self, memory: int = _ALL_MEMORY) -> None:
        self.memory = memory
        self.weight = 0
        self.accepted = self.nodes = self.seconds = 0.0

    def observe(self, nodes: int, accepted: float, seconds: float) -> None:
        self.weight = min(self.weight + 1, self.memory)
        share = 1 / self.weight
        self.accepted += (accepted - self.accepted) * share
        self.nodes += (nodes - self.nodes) * share
        self.seconds += (seconds - self.seconds) * share


class Honesty:
    """How many guesses hold for each that the worker expects to. What it expects of a draft says more about the next one than what came of
    it, as long as it is right on the whole."""

    def __init__(self) -> None:
        self._accepted = self._expected = _HONEST

    @property
    def factor(self) -> float:
        return self._accepted / self._expected

    def observe(self, accepted: int, expected: float) -> None:
        if expected:
            self._accepted = self._accepted * _HONEST_FADE + accepted
            self._expected = self._expected * _HONEST_FADE + expected


class Yield:
    """Of one sequence. `all`: of all sequences so far. `asked`: in the last step. `weight`: what its guesses are worth beside those of the
    others. `mute`: it wants no guesses. `looked`: last round in which it was asked about though it was not worth it; `tried`: guesses that
    were expected to hold then, as long as it is not known how many do. `told`: tokens it had when it was asked about last, `read`: when
    that step was over."""

    __slots__ = ("asked", "looked", "mean", "mute", "read", "told", "tried", "weight")

    def __init__(self, all: Mean, mute: bool = False) -> None:
        self.weight = 1.0
        self.mean = Mean(_MEMORY)
        self.mean.weight = _PRIOR
        self.mean.accepted, self.mean.nodes, self.mean.seconds = all.accepted, all.nodes, all.seconds
        self.asked = False
        self.mute = mute
        self.looked = -1
        self.tried: float | None = None
        self.told = self.read = 0

    def worth(self, goodput: float) -> float:
        """Tokens that an ask earns beyond what could have been had in the time its nodes took, at so many tokens a second."""
        return self.weight * self.mean.accepted - goodput * self.mean.seconds


class Curiosity:
    """Tokens that may be spent on asking about sequences that are not worth it, in case they have become so. A share of what the replica
    makes; whoever spends more than there is, pays it back before the next look. New sequences have no look for free: where answers are
    short and the drafter has to read every prompt, that would be a loss of its own."""

    def __init__(self) -> None:
        self._credit = _FIRST_CREDIT

    def earn(self, tokens: float) -> None:
        self._credit = min(_FIRST_CREDIT, self._credit + _EXPLORE * tokens)

    def affords(self, cost: float) -> bool:
        """Whether there is something left, and if so takes it. `cost`: tokens that an ask costs more than it brings."""
        if self._credit <= 0.0:
            return False
        self._credit -= max(0.0, cost)
        return True

    def settle(self, surprise: float) -> None:
        """An ask that was paid for brought so many tokens more than expected. What makes much of its guesses pays for what becomes of them:
        so looking costs no more than its share whatever a drafter claims."""
        self._credit = min(_FIRST_CREDIT, self._credit + surprise)
