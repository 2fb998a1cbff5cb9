"""By how much steps with guesses take longer than their rows say, for crowds of 1, 2, 3–4, 5–8, … sequences.

Whatever it is that guesses cost and the profile does not know, it must not make plain steps look dear, for it is plain steps that guesses
have to beat. So it is learned from steps of both kinds that followed soon on each other, which had the machine in the same mood: where its
speed moves by half within seconds, nothing else tells the two apart. Each size of a crowd has its own: a sixth of a short step of one
sequence says nothing of thirty-two, where it would be more than guesses can bring. Logarithms throughout.

What is learned is believed as far as steps are alike: each comparison counts by the noise that steps have just now. And only steps of the
rarer kind are compared, each with the median of the others before it, so that no step that stands among many of the other kind is counted
as often as there are of these.
"""

from __future__ import annotations

import math

_CROWDS = 16
_NEAR, _HELD = 4, 8
"""Steps are compared with at most so many of the other kind, the newest of which is at most so many steps old."""
_FEW, _SPREAD, _SPREAD_MANY = 4, 0.1, 0.06
"""Standard deviations of what guesses cost before anything was seen: for the first sizes of crowds, whose steps are short, and for the
others, of whose long steps it can only be a smaller share."""
_DRIFT = 0.008
"""standard deviation of what is added with every comparison"""
_CLIP = 2.0
"""standard deviations that one comparison may count for"""
_LEAST = 0.01
"""the least noise of a step, and the least doubt that remains"""
_MEDIAN = math.pi / 2
"""variance of a median over that of a mean"""
_LATELY = 1 / 8
"""share of the last step in what steps were lately"""


class Beside:
    """Mutated by `compare` alone."""

    def __init__(self) -> None:
        self._jump = [0.0] * _CROWDS
        self._variance = [_SPREAD**2] * _FEW + [_SPREAD_MANY**2] * (_CROWDS - _FEW)
        self._recent: list[tuple[list[float], list[float]]] = [([], []) for _ in range(_CROWDS)]
        """for each crowd, what plain steps and steps with guesses took lately over the profile, oldest first"""
        self._last = [[0, 0] for _ in range(_CROWDS)]
        """which step was the newest of either"""
        self._steps = 0
        self._share = 0.0
        """of steps with guesses among those of late"""

    def jump(self, sequences: int) -> float:
        return self._jump[crowd_of(sequences)]

    def doubt(self, sequences: int) -> float:
        """Variance of the jump."""
        return max(_LEAST**2, self._variance[crowd_of(sequences)])

    def compare(self, sequences: int, guessing: bool, excess: float, noise: float) -> float:
        """A step that took so much more than its profile says; `noise`: standard deviation of steps. Returns how much of what it changes
        was taken for the machine's: where most steps had guesses, the machine was known by these."""
        crowd = crowd_of(sequences)
        self._steps += 1
        for kind, known in enumerate(self._recent[crowd]):
            if self._steps - self._last[crowd][kind] > _NEAR:
                known.clear()
        own, other = self._recent[crowd][guessing], self._recent[crowd][not guessing]
        own.append(excess)
        del own[:-_HELD]
        self._last[crowd][guessing] = self._steps
        share = self._share
        self._share += (guessing - share) * _LATELY
        if not other or guessing == (share > 0.5):
            return 0.0
        between = (sorted(other)[len(other) // 2] - excess) * (-1.0 if guessing else 1.0) - self._jump[crowd]
        return self._update(crowd, between, max(noise, _LEAST) ** 2 * (1 + _MEDIAN / len(other))) * share

    def _update(self, crowd: int, between: float, noise: float) -> float:
        """Returns the change."""
        variance = self._variance[crowd] + _DRIFT**2
        gain = variance / (variance + noise)
        bound = _CLIP * math.sqrt(variance + noise)
        change = gain * max(-bound, min(bound, between))
        self._jump[crowd] += change
        self._variance[crowd] = variance * (1 - gain)
        return change


def crowd_of(sequences: int) -> int:
    return min((sequences - 1).bit_length(), _CROWDS - 1)
