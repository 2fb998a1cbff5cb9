"""A draft, a commit, and the three verbs of a drafter.

A draft is a tree: `token[i]`, `parent[i]` (−1 = the root, which is the newest committed token; otherwise an index smaller than
i), `confidence[i]` (estimated probability that the node is accepted given that its parent was). A `probe` node is computed but can
never be accepted. Depth, positions, mask and paths are derived from `parent` in one place.

A drafter hears only what became true. It may scribble past the committed length in its own pool; the next `absorb` writes over it.
There is no rollback verb and no prefill verb.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """The guesses for one row. Four lists of equal length; `parent` before child."""

    token: list[int]
    parent: list[int]
    confidence: list[float]
    probe: list[bool]

    @property
    def count(self) -> int:
        return len(self.token)

    @staticmethod
    def none() -> Draft:
        return Draft([], [], [], [])

    @staticmethod
    def chain(tokens: list[int], confidence: list[float] | None = None) -> Draft:
        n = len(tokens)
        return Draft(list(tokens), list(range(-1, n - 1)), list(confidence) if confidence else [1.0] * n, [False] * n)


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """What became true in a step, for several rows at once. For row r: `tokens[r]` are the ids at positions start[r] …, the
    fed ones (prompt chunk or root, then accepted guesses); `next[r]` is the newest id (the pick), or None inside a prefill chunk.
    `features[r]`: hidden states the drafter declared, [len(tokens[r]), taps · hidden], or None."""

    rows: list[int]
    start: list[int]
    tokens: list[list[int]]
    next: list[int | None]
    features: list[Tensor] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter declares; nobody asks what class it is. `layers`: target layers whose hidden states it taps. `pools`: its own KV
    layers as (layers, kv_heads, head_dim), or None. `most`: most nodes it can propose for a row. `lazy`: it may skip rows while
    speculation is off and catch up later from `absorb`ed tokens alone."""

    layers: tuple[int, ...] = ()
    pools: tuple[int, int, int] | None = None
    most: int = 0
    lazy: bool = True


class Drafter(Protocol):
    needs: Needs

    def absorb(self, commit: Commit) -> None: ...
    def propose(self, rows: list[int], budget: list[int]) -> list[Draft]:
        """A draft for each of `rows`, of at most budget[i] nodes; possibly empty."""
        ...

    def forget(self, rows: list[int]) -> None: ...


class Silent:
    """No guesses: `--speculator none`."""

    needs = Needs()

    def absorb(self, commit: Commit) -> None:
        return None

    def propose(self, rows: list[int], budget: list[int]) -> list[Draft]:
        return [Draft.none() for _ in rows]

    def forget(self, rows: list[int]) -> None:
        return None
