"""How far a drafter's confidences are to be believed for one sequence.

A drafter that measures its confidences is right on average, one that has none is right about nothing; and either may be wrong about the
text at hand: one sequence is sampled where others are greedy, one quotes where others invent. So for every row there is one number, a
shift of the log-odds, learned from what became true:

    P(node holds | its parent did) = σ(logit(confidence) + shift of the row + shift of its depth)

A Gaussian prior with a Laplace step for each outcome (online logistic regression): the first outcomes move it far, later ones little, and
what was learned fades towards the prior, since text changes. The prior of a row is what rows are like on the whole. As for the drafter's
own calibration, nodes that were offered but not verified count as well, if what became true says whether they would have held. Nothing
here can change the output."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.engine.drafters.draft import Draft

_LEAST_CONFIDENCE, _MOST_CONFIDENCE = 0.01, 0.99
_ROW_VARIANCE, _ROW_FADE = 0.3, 0.98
"""of a row's shift: how much rows differ, and what is left of the difference after each step of the row"""
_ALL_VARIANCE, _ALL_FADE = 2.0, 0.998
"""of the shift of all rows, for each outcome"""
_ALL_FIRST = -1.5
"""that shift at the start: claims are doubted until something held"""
_DEPTH_VARIANCE, _DEPTH_FADE = 0.1, 0.999
_DEPTHS = 8
"""deeper nodes share the last shift"""
_STRAIN, _STRAIN_FADE, _STRAIN_STEP = 5.0, 0.75, 2.5
"""So many standard deviations off in a row, each counting for so many at the most, and it is no chance but another text."""
_LET_GO = 3.0
"""variance of a shift after that"""


class _Shift:
    """A Gaussian estimate of a shift: mean and variance. `strain`: by how much the last outcomes together were off."""

    __slots__ = ("mean", "strain", "variance")

    def __init__(self, mean: float, variance: float) -> None:
        self.mean = mean
        self.strain = 0.0
        self.variance = variance

    def learn(self, chance: float, held: bool) -> None:
        """An outcome that had this chance. Lets go of what was learned before when outcomes keep being off on the same side."""
        off, spread = held - chance, chance * (1.0 - chance)
        strain = off / math.sqrt(spread)
        strain = self.strain * _STRAIN_FADE + (
            _STRAIN_STEP if strain > _STRAIN_STEP else -_STRAIN_STEP if strain < -_STRAIN_STEP else strain
        )
        variance = self.variance
        if strain > _STRAIN or strain < -_STRAIN:
            strain, variance = 0.0, _LET_GO
        self.strain = strain
        self.variance = gain = variance / (1.0 + variance * spread)
        self.mean += gain * off

    def follow(self, chance: float, held: bool, keep: float, prior: float) -> None:
        """An outcome for a shift that fades with each of them: `keep` is left, the rest is a prior of mean nothing and such a variance."""
        variance = prior + (self.variance - prior) * keep * keep
        self.variance = gain = variance / (1.0 + variance * chance * (1.0 - chance))
        self.mean = self.mean * keep + gain * (held - chance)

    def fade(self, keep: float, mean: float, variance: float) -> None:
        """Back towards its prior."""
        self.mean = mean + (self.mean - mean) * keep
        self.variance = variance + (self.variance - variance) * keep * keep


class Trust:
    """Mutated by `settle`; rows are known by number."""

    def __init__(self) -> None:
        self._all = _Shift(_ALL_FIRST, _ALL_VARIANCE)
        self._depths = [_Shift(0.0, _DEPTH_VARIANCE) for _ in range(_DEPTHS)]
        self._rows: dict[int, _Shift] = {}
        self._offered: dict[int, tuple[Draft, list[float], int]] = {}

    def offer(self, row: int, draft: Draft, known: int) -> list[float]:
        """The survival of each node, corrected. Remembers the draft, which goes on from so many known tokens, until `settle`."""
        if not draft.token:
            return []
        shift = self._rows.get(row, self._all).mean
        factors: list[float] = []
        chances: list[float] = []
        survival: list[float] = []
        depths: list[int] = []
        for parent, confidence, probe in zip(draft.parent, draft.confidence, draft.probe):
            depth, above = (depths[parent] + 1, survival[parent]) if parent >= 0 else (0, 1.0)
            depths.append(depth)
            if probe:  # its confidence is what it brings later, of which there is no outcome here
                chances.append(confidence)
                survival.append(confidence * above)
                continue
            while depth >= len(factors):
                factors.append(_factor(shift + self._depths[min(len(factors), _DEPTHS - 1)].mean))
            if not _LEAST_CONFIDENCE < confidence < _MOST_CONFIDENCE:
                confidence = _clamped(confidence)
            odds = confidence / (1.0 - confidence) * factors[depth]
            chance = odds / (1.0 + odds)
            chances.append(chance)
            survival.append(chance * above)
        self._offered[row] = (draft, chances, known)
        return survival

    def settle(self, row: int, tokens: Sequence[int]) -> None:
        """The row's tokens as they are now: what became of its last draft, if it had one."""
        offered = self._offered.pop(row, None)
        if offered is None:
            return
        draft, chances, start = offered
        all = self._all
        shift = self._rows.get(row)
        if shift is None:
            shift = self._rows[row] = _Shift(all.mean, _ROW_VARIANCE)
        shift.fade(_ROW_FADE, all.mean, _ROW_VARIANCE)
        known = len(tokens) - start
        reached: list[int] = []
        for token, parent, confidence, chance, probe in zip(draft.token, draft.parent, draft.confidence, chances, draft.probe):
            depth = 0 if parent < 0 else reached[parent]
            if probe or not 0 <= depth < known:
                reached.append(-1)
                continue
            held = token == tokens[start + depth]
            reached.append(depth + 1 if held else -1)
            deep = self._depths[depth if depth < _DEPTHS else -1]
            shift.learn(chance, held)
            all.follow(_shifted(confidence, all.mean * _ALL_FADE + deep.mean), held, _ALL_FADE, _ALL_VARIANCE)
            deep.follow(chance, held, _DEPTH_FADE, _DEPTH_VARIANCE)

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)
        self._offered.pop(row, None)


def _clamped(confidence: float) -> float:
    return min(max(confidence, _LEAST_CONFIDENCE), _MOST_CONFIDENCE)


def _factor(shift: float) -> float:
    """What a shift of the log-odds multiplies the odds with."""
    return math.exp(max(-12.0, min(12.0, shift)))


def _shifted(confidence: float, shift: float) -> float:
    confidence = _clamped(confidence)
    odds = confidence / (1.0 - confidence) * _factor(shift)
    return odds / (1.0 + odds)
