"""What guesses of a crowd brought beside what had been expected of them: the proof of the sum.

Sequences are asked about where most is expected of it, so that on the whole too much is; and what steps with guesses cost beside plain
ones is known to some percent only. With few sequences neither matters, in a crowd a node costs nearly what a token is worth. So what each
step with guesses came to (tokens it brought over those of a plain step, and its time over that of the plain steps around it) is held
against what was hoped of it. The mean difference, a share of a plain step, is charged to the guesses that follow. It fades while nobody
guesses, so that they are tried again.
"""

from __future__ import annotations

import math

_SPREAD = 0.05
"""standard deviation of the difference before anything was seen"""
_DRIFT = 0.004
"""standard deviation of what is added with every step with guesses"""
_CLIP = 2.0
"""standard deviations that one step may count for"""
_FADE = 1 / 512
"""share of the difference that a plain step takes away"""
_LATELY, _HOPES = 1 / 8, 1 / 4
"""share of the last step in what plain steps were beside their estimate and what guesses won, and in what was hoped"""
_SWING = 0.3
"""a plain step counts as no further off its estimate than that"""
_CLEAR = 0.03
"""share of a plain step that steps with guesses brought beyond one, from which on they win clearly"""
_CHANCE = 0.5
"""standard deviation of whether a guess holds"""


class Proof:
    """Of crowds of one size. Shares are of a plain step's tokens, or of its seconds."""

    def __init__(self) -> None:
        self._bias = 0.0
        """what guesses brought beyond what was hoped: below nothing as a rule"""
        self._won = 0.0
        """what they brought beyond plain steps lately"""
        self._variance = _SPREAD**2
        self._hoped = 0.0
        self._known = False
        self._plain = 0.0
        """by how much plain steps took longer than estimated lately"""

    @property
    def charge(self) -> float:
        """What guesses must be expected to bring beyond what they take. Nothing while they win clearly, whatever was hoped."""
        return max(0.0, -self._bias) if self._won < _CLEAR else 0.0

    def hope(self, share: float) -> None:
        """A step with guesses is planned, which should bring so much more than a plain one in its time."""
        self._hoped += (share - self._hoped) * (_HOPES if self._known else 1.0)
        self._known = True

    def plain(self, seconds: float) -> None:
        """A step without guesses took so many times what was estimated."""
        self._plain += (max(-_SWING, min(_SWING, seconds - 1.0)) - self._plain) * _LATELY
        self._bias -= self._bias * _FADE
        self._won -= self._won * _FADE
        self._variance += (_SPREAD**2 - self._variance) * _FADE

    def guessed(self, tokens: float, seconds: float, nodes: float, noise: float) -> None:
        """A step with guesses brought so many times the tokens of a plain one in so many times the seconds estimated for one; `nodes`: over
        the square of the sequences; `noise`: standard deviation of a step's time, as a share."""
        if not self._known:
            return
        relative = seconds / (1.0 + self._plain)
        variance = self._variance + _DRIFT**2
        total = variance + (noise * relative) ** 2 + _CHANCE**2 * nodes
        bound = _CLIP * math.sqrt(total)
        gain = variance / total
        won = tokens - relative
        self._won += (max(-bound, min(bound, won)) - self._won) * _LATELY
        self._bias += gain * max(-bound, min(bound, won - self._hoped - self._bias))
        self._variance = variance * (1 - gain)
