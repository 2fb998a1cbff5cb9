"""Match traces: what a drafter would have guessed at every place of an answer, and which of it would have held.

Which token the target picks does not depend on speculation. So an answer that was written once, with the drafts that a source offers at
each of its places, says exactly what any policy would have earned on it: counterfactuals are facts here. A trace is recorded from a real
drafter (`record`), or drawn from a model of text with a seed (`draw`): each token is predictable with a chance of its own that follows the
regime of its passage, and the source reports that chance, or something else where a test wants it to be wrong."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

LEAST_SURVIVAL = 0.01
"""a source offers nothing that is less likely"""


class Offer(NamedTuple):
    """A draft, the likeliest nodes first: parent (−1 = the root), confidence, and whether it would be accepted. What holds is one path."""

    parent: list[int]
    confidence: list[float]
    held: list[bool]


class Track(Protocol):
    """One answer of `length` tokens behind `prompt` tokens."""

    @property
    def prompt(self) -> int: ...
    @property
    def length(self) -> int: ...
    def offer(self, place: int, most: int) -> Offer:
        """What the source offers when `place` tokens of the answer are known (1 … length − 1), at most `most` nodes. Asked at most once at
        a place, in ascending order."""
        ...

    def close(self) -> None:
        """The answer is written."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Regime:
    """A kind of passage. `chance`: how predictable its tokens are on average. `spread`: from 0, all alike, to 1, each either certain or
    hopeless. `silence`: share of tokens for which the source has no guess. `claim`: None, the source reports the chance itself; else it
    always reports this confidence, whatever the truth."""

    chance: float
    spread: float = 0.6
    silence: float = 0.0
    claim: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """A track whose drafts are chains. `confidence[t]`: what the source says of token t, 0 = it has no guess; `true[t]`: it would be
    right."""

    prompt: int
    length: int
    confidence: list[float]
    true: list[bool]

    def offer(self, place: int, most: int) -> Offer:
        held: list[bool] = []
        alive, holds = 1.0, True
        for t in range(place, min(place + most, self.length)):
            alive *= self.confidence[t]
            if alive < LEAST_SURVIVAL:
                break
            holds = holds and self.true[t]
            held.append(holds)
        return Offer(list(range(-1, len(held) - 1)), self.confidence[place : place + len(held)], held)

    def close(self) -> None:
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A track with the drafts of a real drafter, trees as well."""

    prompt: int
    length: int
    offers: list[Offer]
    """one for each place from 1 on"""

    def offer(self, place: int, most: int) -> Offer:
        parent, confidence, held = self.offers[place - 1]
        return Offer(parent[:most], confidence[:most], held[:most])

    def close(self) -> None:
        return None


def draw(dice: random.Random, prompt: int, passages: Sequence[tuple[Regime, int]]) -> Drawn:
    """`passages`: regimes and how many tokens each lasts."""
    confidence: list[float] = []
    true: list[bool] = []
    for regime, tokens in passages:
        for _ in range(tokens):
            chance = _chance(dice, regime)
            guessed = dice.random() >= regime.silence
            true.append(guessed and dice.random() < chance)
            confidence.append((chance if regime.claim is None else regime.claim) if guessed else 0.0)
    return Drawn(prompt, len(true), confidence, true)


def _chance(dice: random.Random, regime: Regime) -> float:
    """Beta distributed with the regime's mean; the concentration falls from infinity to nothing as the spread grows."""
    mean, spread = regime.chance, regime.spread
    if spread <= 0.0 or not 0.0 < mean < 1.0:
        return mean
    weight = (1 - spread) / spread + 1e-3
    return dice.betavariate(mean * 4 * weight, (1 - mean) * 4 * weight)


def mixed(dice: random.Random, regimes: Sequence[Regime], count: int, tokens: int, prompt: int) -> list[Track]:
    """Answers of one regime each, in turn; lengths from half to one and a half times `tokens`."""
    lengths = [max(2, round(tokens * dice.uniform(0.5, 1.5))) for _ in range(count)]
    return [draw(dice, prompt, [(regimes[i % len(regimes)], length)]) for i, length in enumerate(lengths)]


def switching(dice: random.Random, regimes: Sequence[Regime], count: int, tokens: int, prompt: int, every: int) -> list[Track]:
    """Answers whose passages go round the regimes, each `every` tokens long."""
    rounds = max(1, round(tokens / every))
    return [draw(dice, prompt, [(regimes[(i + n) % len(regimes)], every) for n in range(rounds)]) for i in range(count)]


def tokens_of(tracks: Iterable[Track]) -> int:
    return sum(track.length for track in tracks)
