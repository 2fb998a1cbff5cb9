"""By how much steps with guesses take longer than their rows say, for crowds of 1, 2, 3–4, 5–8, … sequences.

Whatever it is that guesses cost and the profile does not know, it must not make plain steps look dear, for it is plain steps that guesses
have to beat. So it is learned from steps of both kinds that followed soon on each other, which had the machine in the same mood: where its
speed moves by half within seconds, nothing else tells the two apart. Each size of a crowd has its own: a sixth of a short step of one
sequence says nothing of thirty-two, where it would be more than guesses can bring. Logarithms throughout.
"""

from __future__ import annotations

_CROWDS = 16
_NEAR, _HELD = 4, 8
"""Steps are compared with at most so many of the other kind, the newest of which is at most so many steps old."""
_PRIOR, _MEMORY = 2, 12
"""comparisons that the assumption counts for that guesses cost their rows, and how many are remembered"""
_CLIP = 0.2
_SPREAD, _NOISE, _LEAST = 0.1, 0.05, 0.01
"""standard deviations: of what guesses cost before anything was seen, of a comparison, and what remains at the least"""
_LATELY = 1 / 8
"""share of the last step in what steps were lately"""


class Beside:
    """Mutated by `compare` alone."""

    def __init__(self) -> None:
        self._jump = [0.0] * _CROWDS
        self._seen = [0] * _CROWDS
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
        return max(_LEAST**2, 1 / (_SPREAD**-2 + self._seen[crowd_of(sequences)] * _NOISE**-2))

    def compare(self, sequences: int, guessing: bool, excess: float) -> float:
        """A step that took so much more than its profile says. Returns how much of what it changes was taken for the machine's: where most
        steps had guesses, the machine was known by these."""
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
        if not other:
            return 0.0
        between = (sorted(other)[len(other) // 2] - excess) * (-1.0 if guessing else 1.0) - self._jump[crowd]
        self._seen[crowd] += 1
        change = max(-_CLIP, min(_CLIP, between)) / min(_PRIOR + self._seen[crowd], _MEMORY)
        self._jump[crowd] += change
        return change * share


def crowd_of(sequences: int) -> int:
    return min((sequences - 1).bit_length(), _CROWDS - 1)
