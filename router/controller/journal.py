"""What became of guesses lately, for people: survival curves of each source, and the last rounds. Decides nothing."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

import msgspec

from forerun.router.guesses import Round, Snapshot

_FADE = 0.995
"""what a round with guesses leaves of the older ones"""
_ROUNDS = 64


class Curve(msgspec.Struct):
    """By depth, with older rounds fading: nodes that a source proposed and that were verified, those of them that were accepted, and
    `survival`, accepted guesses for each draft."""

    drafted: list[float] = []
    accepted: list[float] = []
    survival: list[float] = []


class View(msgspec.Struct, frozen=True):
    """What `/debug/speculation` shows of a replica. `survival`: by source. `rounds`: the last ones, oldest first."""

    controller: Snapshot
    survival: dict[str, Curve]
    rounds: list[Round]


class Journal:
    """`sources`: names of the drafters that are joined, in the order in which workers count."""

    def __init__(self, sources: Sequence[str]) -> None:
        self.rounds: deque[Round] = deque(maxlen=_ROUNDS)
        self._sources = list(sources)
        self._drafts = 0.0
        self._counts: list[tuple[list[float], list[float]]] = [([], []) for _ in self._sources]

    def heard(self, round: Round, counts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """`counts`: for each source nodes and accepted nodes, by depth."""
        self.rounds.append(round)
        if not round.nodes:
            return
        self._drafts = self._drafts * _FADE + round.drafts
        for both in self._counts:
            for known in both:
                known[:] = [value * _FADE for value in known]
        for both, new in zip(self._counts, counts):
            for known, more in zip(both, new):
                known += [0.0] * (len(more) - len(known))
                for depth, count in enumerate(more):
                    known[depth] += count

    def curves(self) -> dict[str, Curve]:
        drafts = max(self._drafts, 1e-9)
        return {
            name: Curve([round(n, 1) for n in drafted], [round(n, 1) for n in accepted], [round(n / drafts, 3) for n in accepted])
            for name, (drafted, accepted) in zip(self._sources, self._counts)
        }


def sources_of(drafter: str) -> list[str]:
    """`suffix+model=/models/small` → suffix, model=small. Those that are named alike get a number; "none" is nobody."""
    found: list[str] = []
    for part in re.split(r"\+(?=[a-z]+(?:[=+]|$))", drafter) if drafter != "none" else []:
        name, _, value = part.partition("=")
        label = f"{name}={value.rstrip('/').rpartition('/')[2]}" if value else name
        found.append(label if label not in found else f"{label}#{len(found)}")
    return found
