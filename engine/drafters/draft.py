"""A draft, a commit, and the three verbs of a drafter.

A draft is a tree: `token[i]`, `parent[i]` (−1 = the root, which is the newest committed token; otherwise an index smaller than
i), `confidence[i]` (estimated probability that the node is accepted given that its parent was). A `probe` node is computed but can
never be accepted. Depth, positions, mask and paths are derived from `parent` in one place.

A drafter hears only what became true. It may scribble past the committed length in its own pool; the next `absorb` writes over it.
There is no rollback verb and no prefill verb.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """The guesses for one row. Four lists of equal length; `parent` before child."""

    token: list[int]
    parent: list[int]
    confidence: list[float]
    probe: list[bool]
    source: Sequence[int] = ()
    """bits of the drafters that proposed each node, where there are several (bit 0: the first named); empty = the only one"""

    @property
    def count(self) -> int:
        return len(self.token)

    def depths(self) -> list[int]:
        """Steps from the root, 1 for its children."""
        found: list[int] = []
        for parent in self.parent:
            found.append(1 if parent < 0 else found[parent] + 1)
        return found

    def paths(self) -> list[list[int]]:
        """For each node the tokens from the root's child down to the node itself."""
        found: list[list[int]] = []
        for token, parent in zip(self.token, self.parent):
            found.append([*found[parent], token] if parent >= 0 else [token])
        return found

    @staticmethod
    def none() -> Draft:
        return Draft([], [], [], [])

    @staticmethod
    def chain(tokens: list[int], confidence: list[float] | None = None) -> Draft:
        n = len(tokens)
        return Draft(list(tokens), list(range(-1, n - 1)), list(confidence) if confidence else [1.0] * n, [False] * n)


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What a row can take: `nodes` in all, `depth` levels, token ids below `vocab`, nodes whose survival is at least `price`."""

    nodes: int
    depth: int
    vocab: int
    price: float


def prune(draft: Draft, room: Room) -> Draft:
    """The part of a draft that fits. A node that does not fit takes its descendants with it; the others keep their order. Pruning
    never changes the output, whatever it looks at. ValueError for a draft that is no tree (unequal lengths, a parent behind its child)."""
    token: list[int] = []
    parent: list[int] = []
    confidence: list[float] = []
    probe: list[bool] = []
    source: list[int] = []
    place: list[int] = []
    depth: list[int] = []
    survival: list[float] = []
    for i, (t, p, c, b) in enumerate(zip(draft.token, draft.parent, draft.confidence, draft.probe, strict=True)):
        if not -1 <= p < i:
            raise ValueError(f"node {i} of a draft has parent {p}; a parent comes before its child")
        depth.append(1 if p < 0 else depth[p] + 1)
        survival.append(c if p < 0 else c * survival[p])
        rooted = p < 0 or place[p] >= 0
        if not rooted or len(token) >= room.nodes or depth[i] > room.depth or not 0 <= t < room.vocab or survival[i] < room.price:
            place.append(-1)
            continue
        place.append(len(token))
        token.append(t)
        parent.append(-1 if p < 0 else place[p])
        confidence.append(c)
        probe.append(b)
        source += draft.source[i : i + 1]
    return draft if len(token) == draft.count else Draft(token, parent, confidence, probe, source)


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """What became true in a step, for several rows at once. For row r: `tokens[r]` are the ids at positions start[r] …, the
    fed ones (prompt chunk or root, then accepted guesses); `next[r]` is the newest id (the pick), or None inside a prefill chunk.
    `features[r]`: hidden states the drafter declared, [len(tokens[r]), taps · hidden], or None. `prompt[r]`: how many of the row's tokens
    are the client's, for drafters that tell answers from prompts. `scope[r]`: rows of equal scope may profit from each other's answers."""

    rows: list[int]
    start: list[int]
    tokens: list[list[int]]
    next: list[int | None]
    features: list[Tensor] | None = None
    prompt: list[int] | None = None
    scope: list[str] | None = None


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
