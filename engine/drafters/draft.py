"""A draft, a commit, and the three verbs of a drafter.

A draft is a tree: `token[i]`, `parent[i]` (−1 = the root, which is the newest committed token; otherwise an index smaller than
i), `confidence[i]` (estimated probability that the node is accepted given that its parent was). A `probe` node is computed but can
never be accepted. Depth, positions, mask and paths are derived from `parent` in one place.

A drafter hears only what became true. It may scribble past the committed length in its own pool; the next `absorb` writes over it.
There is no rollback verb and no prefill verb.

A drafter with weights has a life before its three verbs:

    open(value, setting)   loads what it needs; `setting.host` (registry.py) is the worker around it: device, target model (whose embedding
                           and head it may share), what the front asked for, somebody to tell of progress
    needs                  declares what it will take: target layers tapped, one `PoolSpec` for each KV pool, working memory
    needs.attach(place)    the memory is divided: here are the pools, as many pages as the target's, under the same page ids, and the page
                           table. It warms up, so that nothing is allocated later. Several drafters may have several pools each.

`absorb` may only store; what costs time waits for `propose`, which is called only when guesses may pay. What a drafter must catch up
with, it catches up with in bounded parts, and has no guess for a row meanwhile; `needs.behind` says how far it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set
from math import isnan
from operator import lt
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forerun.backends.base import Pool, PoolSpec
from forerun.engine.kv import Table
from forerun.messages import SamplingParams


@dataclasses.dataclass(slots=True)
class Draft:
    """The guesses for one row. Four lists of equal length; `parent` before child. Never changed once made (not `frozen`, which would make
    making one three times as dear: each row has one in each step)."""

    token: list[int]
    parent: list[int]
    confidence: list[float]
    probe: list[bool]
    source: Sequence[int] = ()
    """bits of the drafters that proposed each node, where there are several (bit 0: the first named); empty = the only one"""
    law: Sequence[NDArray[np.float64]] = ()
    """for `--acceptance rejection`, of a chain whose tokens were drawn: the distribution [V] of each. Nothing may then be left out for what
    it is: such a draft is cut by the room there is, not by its confidences. Empty = guesses that would be made again"""
    expected: float = 0.0
    """of a drafter that chooses itself: guesses that are believed to hold"""

    @property
    def count(self) -> int:
        return len(self.token)

    @property
    def guesses(self) -> int:
        """Nodes that may be accepted."""
        return len(self.token) - sum(self.probe)

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
        """No guesses: always the same one."""
        return _NONE

    @staticmethod
    def chain(tokens: list[int], confidence: list[float] | None = None) -> Draft:
        n = len(tokens)
        return Draft(list(tokens), list(range(-1, n - 1)), list(confidence) if confidence else [1.0] * n, [False] * n)


_NONE = Draft([], [], [], [])


class Room(NamedTuple):
    """What a row can take: `nodes` in all, `depth` levels, token ids below `vocab`, nodes whose survival is at least `price`."""

    nodes: int
    depth: int
    vocab: int
    price: float


def prune(draft: Draft, room: Room) -> Draft:
    """The part of a draft that fits. A node that does not fit takes its descendants with it; the others keep their order. Pruning
    never changes the output, whatever it looks at. ValueError for a draft that is no tree (unequal lengths, a parent behind its child), or
    with a confidence that is not a number: whoever learns from confidences would never be rid of it."""
    if isnan(sum(draft.confidence)):
        raise ValueError("a confidence of a draft is not a number")
    if _fits(draft, room):
        return draft
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


def _fits(draft: Draft, room: Room) -> bool:
    """Whether nothing of a well-formed draft has to go: the usual case, looked at without a loop of our own."""
    token, parent = draft.token, draft.parent
    count = len(token)
    if not count == len(parent) == len(draft.confidence) == len(draft.probe):
        return False
    if not count:
        return True
    return (
        count <= room.nodes
        and count <= room.depth
        and room.price <= 0.0
        and max(token) < room.vocab
        and min(token) >= 0
        and min(parent) >= -1
        and all(map(lt, parent, range(count)))
    )


@dataclasses.dataclass(slots=True)
class Commit:
    """What became true in a step, for several rows at once; never changed once made, as a draft. For row r: `tokens[r]` are the ids at
    positions start[r] …, the fed ones (prompt chunk or root, then accepted guesses); `next[r]` is the newest id (as a rule the pick), None
    inside a prefill chunk. Nothing is told twice and nothing is left out; `start[r]` = 0 begins a row anew. `features[r]`: hidden states of
    the layers the drafter declared, [f, taps · hidden], of the last f of these tokens: of all, except where a prefix was found computed;
    None without layers. They may be views of a whole step's, so what is kept for long is copied. `prompt[r]`: how many of the row's tokens
    are the client's, for drafters that tell answers from prompts. `scope[r]`: rows of equal scope may profit from each other's answers.
    `params[r]`: how the row's tokens are chosen, for drafters that throw the same dice; None = greedily. `answers[r]`: what the target
    picked at the probes of the row's last draft, by their paths; None = there were no probes in any row."""

    rows: list[int]
    start: list[int]
    tokens: list[list[int]]
    next: list[int | None]
    features: list[Tensor] | None = None
    prompt: list[int] | None = None
    scope: list[str] | None = None
    params: list[SamplingParams] | None = None
    answers: list[dict[tuple[int, ...], int]] | None = None

    def without(self, rows: Set[int]) -> Commit:
        """What it says of other rows."""
        places = [i for i, row in enumerate(self.rows) if row not in rows]
        if len(places) == len(self.rows):
            return self
        parts: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        some: dict[str, Any] = {name: part and [part[i] for i in places] for name, part in parts.items()}
        return Commit(**some)


class Bids(NamedTuple):
    """For drafters that choose themselves. Of each row that is asked about: `depth`, levels there is room for, and `weight`, what a token
    of it is worth (empty = one). `vocab`: token ids are below it. `entry`: what a guess costs for every token of its row; `discount`: by
    what tolls are multiplied where no guess would be kept otherwise; `most`: guesses of all rows."""

    depth: list[int]
    vocab: int
    most: int
    weight: list[float]
    entry: float
    discount: float


class Terms(NamedTuple):
    """What guesses have to bring in this step, roughly; to build more than that is waste and no error. `price`: survival below which a node
    is not worth verifying. `goodput`: accepted guesses that a second of drafting has to bring; 0 = time is free. toll[n]: tokens that n + 1
    guesses of all rows together have to bring; empty = it is not known. `bids`: the drafts are to be what is left of them."""

    price: float = 0.0
    goodput: float = 0.0
    toll: Sequence[float] = ()
    bids: Bids | None = None


FREE = Terms()


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a drafter with weights works. `pools`: one for each of its `needs.pools`. `table`: the pages of every row, the target's.
    `rows`: their number; `longest`: tokens of a sequence."""

    pools: tuple[Pool, ...]
    table: Table
    rows: int
    longest: int

    def spread(self, most: int) -> list[int]:
        """So many tokens as parts of as few rows as can have them, or all that there can be: how many of row 0, 1, …"""
        left = min(most, self.rows * self.longest)
        return [min(self.longest, left - first) for first in range(0, left, self.longest)]


def _nowhere(place: Place) -> None:
    return None


class Late(NamedTuple):
    """What a drafter had to do without, since it was opened: `positions` of texts that it knows nothing of (a prefix was found computed, or
    too much waited); `answers` of a draft service that were not there when they were asked for; rows `unserved`, one for each step with
    one: a draft service had no room for them."""

    positions: int = 0
    answers: int = 0
    unserved: int = 0


def _punctual() -> Late:
    return Late()


def _nothing() -> float:
    return 0.0


def _all_read(row: int) -> int:
    return 0


def _no_news() -> list[str]:
    return []


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter declares; nobody asks what class it is. `layers`: target layers whose hidden states it taps: −1 = what the first
    layer reads, i = the residual stream behind decoder layer i (from 0), `model.layers` = behind the final norm. `pools`: KV pools of its
    own, which have a slot for each of the target's. `most`: most nodes it can propose for a row. `lazy`: it may skip rows while
    speculation is off and catch up later from `absorb`ed tokens alone. `weight_bytes`: what it has loaded; `work_bytes`: what its forwards
    take beside their pools. `attach`: called once, with as many pools, before anything is absorbed. `news`: what went wrong inside and was
    survived there, one line each, since it was asked last. `late`: see `Late`; asked in every step. `chosen`: seconds of drafting that it
    spent by its own choice since it was asked last: it knows what they bring, and weighs that against `Terms.goodput` itself. `behind`:
    tokens of a row that it has to read before it can guess for it; asked right before and behind `propose`, at no other time. `chooses`:
    where it is told `Terms.bids`, it proposes what `trust.py` and `choose.py` would leave of its drafts, and nobody cuts them again: it
    has to keep to every row's budget, depth and vocabulary itself."""

    layers: tuple[int, ...] = ()
    pools: tuple[PoolSpec, ...] = ()
    most: int = 0
    lazy: bool = True
    weight_bytes: int = 0
    work_bytes: int = 0
    attach: Callable[[Place], None] = dataclasses.field(default=_nowhere, compare=False)
    news: Callable[[], list[str]] = dataclasses.field(default=_no_news, compare=False)
    late: Callable[[], Late] = dataclasses.field(default=_punctual, compare=False)
    chosen: Callable[[], float] = dataclasses.field(default=_nothing, compare=False)
    behind: Callable[[int], int] = dataclasses.field(default=_all_read, compare=False)
    chooses: bool = False

    @property
    def tells(self) -> bool:
        """It reads what it was told part by part, and says how far it is."""
        return self.behind is not _all_read

    @property
    def dear(self) -> bool:
        """It computes more than look-ups."""
        return bool(self.pools or self.layers)


class Drafter(Protocol):
    needs: Needs

    def absorb(self, commit: Commit) -> None: ...
    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        """A draft for each of `rows`, of at most budget[i] nodes; possibly empty."""
        ...

    def forget(self, rows: list[int]) -> None: ...


class Silent:
    """No guesses: `--speculator none`."""

    needs = Needs()

    def absorb(self, commit: Commit) -> None:
        return None

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        return [Draft.none() for _ in rows]

    def forget(self, rows: list[int]) -> None:
        return None
