"""Drafts of heads that look several places ahead at once: candidates level by level, then the best tree of them.

    root ─┬─ the ─┬─ cat ─── sat        level 0: the, a          a level is a list of candidates for one place, the likeliest first
          │       └─ dog                level 1: cat, dog
          └─ a ──── cat                 level 2: sat

The first candidate of every level is the *chain*; a later level is computed behind it. Where a level does not depend on what was chosen
before (`free`: Medusa, DFlash) its candidates hang under every node of the level above: the levels are a lattice that describes all
their combinations, of which only the likeliest are ever written down, best first under the budget (Medusa 2401.10774; DDTree 2604.12989).
Where it does (`free` off: MLPSpeculator, DSpark) candidates beside the chain are leaves.

A candidate is a kind of guess (`Calibration`): request with or without dice, level, rank, and what its drafter says of it. What such
guesses came to is its confidence. Knows nothing of weights: a drafter brings the logits of a level and is told whether one more pays.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forerun.backends.base import Ops
from forerun.engine.drafters.calibration import Calibration
from forerun.engine.drafters.draft import FREE, Draft, Terms
from forerun.engine.drafters.imitation import Imitation
from forerun.engine.drafters.pace import Pace
from forerun.engine.drafters.registry import Host
from forerun.engine.processing import Scores
from forerun.engine.rows import Row

RANKS = 10
"""candidates of a level, at most: as many as any published tree shape names"""
LEAST_SURVIVAL = 0.02
"""a candidate beside the chain less likely than this is not looked for"""
_DEPTHS, _CLASSES, BINS = 8, 4, 20
"""kinds of guesses: levels (deeper ones are one kind), ranks (the last stands for all beyond) and what the drafter says"""
_USUAL, _USUAL_STEP = 0.6, 0.02
"""acceptance to expect of a level before it is computed: at first, and how fast it follows what levels turn out to promise"""

Shape = Sequence[Sequence[int]]
"""a fixed tree: each node as the ranks from the root's child down to itself, parents first"""


@dataclasses.dataclass(eq=False, slots=True)
class Lattice:
    """A draft in the making, of at most `most` nodes and `depth` levels. `levels[i]`: (token, cell) of each candidate. `alive`: survival of
    the chain's end."""

    row: Row
    most: int
    depth: int
    levels: list[list[tuple[int, int]]] = dataclasses.field(default_factory=list)
    law: list[NDArray[np.float64]] = dataclasses.field(default_factory=list)
    alive: float = 1.0

    @property
    def chain(self) -> list[int]:
        return [level[0][0] for level in self.levels]


class _Hope(NamedTuple):
    """A node that may come next: its level, its place there by falling rate, its parent, and the parent's survival."""

    depth: int
    order: int
    parent: int
    above: float


class Levels:
    """Chooses the candidates of each level and makes drafts of them. `targets`: the target's id of each id of the heads, None = the same
    ids; `free`, `shape`: see above (no shape = best first); `tree`: siblings may be verified; `draws`: chains whose tokens are drawn, for
    `--acceptance rejection`."""

    def __init__(
        self,
        imitation: Imitation,
        ops: Ops,
        vocab: int,
        tree: bool,
        draws: bool = False,
        free: bool = False,
        shape: Shape = (),
        targets: NDArray[np.int64] | None = None,
    ) -> None:
        self._imitation = imitation
        self._ops = ops
        self._vocab = vocab
        self._ranks = RANKS if tree and not draws else 1
        self._draws = draws
        self._free = free
        self._shape = shape if self._ranks > 1 else ()
        self._targets = targets
        self.calibration = Calibration(_prior())
        self.pace = Pace()
        self._usual = _USUAL

    @classmethod
    def open(cls, host: Host, tree: bool, free: bool = False, shape: Shape = (), targets: NDArray[np.int64] | None = None) -> Levels:
        """For a drafter of this worker."""
        start, ops, vocab = host.start, host.backend.ops, host.model.vocab
        imitation = Imitation(ops, vocab, start.watermark_gamma, start.watermark_delta)
        return cls(imitation, ops, vocab, tree, start.acceptance == "rejection", free, shape, targets)

    # -- one level of several rows -----------------------------------------------------------------------------------------------

    def add(self, growing: Sequence[Lattice], logits: Tensor, terms: Terms = FREE, trust: Sequence[float] | None = None) -> None:
        """The next level of each: logits float32 [rows, the heads' vocabulary] behind its chain. `trust`: what the drafter says of the
        chain's next token, where it knows better than its probability."""
        picks = self._ops.pick(logits, None)
        tokens, logprobs = picks.tokens.tolist(), picks.logprobs.tolist()
        raw = logits.cpu().numpy()
        for i, one in enumerate(growing):
            level = self._candidates(one, raw[i], tokens[i], logprobs[i], terms) if math.isfinite(logprobs[i]) else []
            if level:
                self._append(one, level, None if trust is None else trust[i])
            else:  # something that is no number, or nothing that the request allows: this row's draft ends here
                one.depth = len(one.levels)

    def rehearse(self, logits: Tensor) -> None:
        """What `add` computes of logits, of which nothing comes: before rows are there."""
        self._ops.pick(logits, None)

    def _candidates(self, one: Lattice, raw: Scores, pick: int, logprob: float, terms: Terms) -> list[tuple[int, float]]:
        """(target's token, probability), the likeliest first."""
        row, ranks = one.row, self._ranks if len(one.levels) + 1 < one.most else 1
        if not row.plain:
            scores = self._spread(raw)
            if self._draws and row.params.sample:
                token, law = self._imitation.draw(scores, row, one.chain)
                one.law.append(law)
                return [(token, float(law[token]))]
            return self._imitation.best(scores, row, one.chain, ranks)
        found = [(pick, math.exp(logprob))]
        least = 0.0 if self._shape else max(LEAST_SURVIVAL, terms.price) / max(one.alive, 1e-9)
        if ranks > 1 and 1.0 - found[0][1] > least:
            raw, normalizer = raw.copy(), float(raw[pick]) - logprob
            for _ in range(min(ranks, len(raw)) - 1):
                raw[found[-1][0]] = -np.inf
                place = int(raw.argmax())
                chance = math.exp(float(raw[place]) - normalizer)
                if chance <= least:
                    break
                found.append((place, chance))
        return found if self._targets is None else [(int(self._targets[token]), chance) for token, chance in found]

    def _append(self, one: Lattice, found: list[tuple[int, float]], trust: float | None) -> None:
        sample, depth, rate = one.row.params.sample, len(one.levels), self.calibration.rate
        level = []
        for rank, (token, chance) in enumerate(found):
            level.append((token, _cell(sample, depth, rank, chance if rank or trust is None else trust)))
        one.levels.append(level)
        first = rate[level[0][1]]
        one.alive *= first
        if depth:
            self._usual += _USUAL_STEP * (first - self._usual)

    def _spread(self, raw: Scores) -> Scores:
        """The heads' logits at the target's ids."""
        if self._targets is None and len(raw) == self._vocab:
            return raw
        scores = np.full(self._vocab, -np.inf, np.float32)
        scores[slice(len(raw)) if self._targets is None else self._targets] = raw
        return scores

    # -- how far -----------------------------------------------------------------------------------------------------------------

    def goes_on(self, one: Lattice, terms: Terms = FREE) -> bool:
        """Whether a level more may be of use to this row."""
        return len(one.levels) < one.depth and one.alive * self._usual > terms.price

    def pays(self, growing: Sequence[Lattice], terms: Terms = FREE) -> bool:
        """Whether what a level more may bring to all of them is worth its time."""
        gain = sum(one.alive * self._usual - terms.price for one in growing)
        return bool(growing) and gain > terms.goodput * self.pace.seconds(len(growing))

    # -- drafts ------------------------------------------------------------------------------------------------------------------

    def finish(self, one: Lattice | None) -> Draft:
        """The tree, its likeliest path first: accepted along it, no KV has to be moved."""
        if one is None or not one.levels:
            return Draft.none()
        nodes = self._shaped(one) if self._shape else self._best(one)
        token, parent, cell = lined_up(nodes, self.calibration.rate)
        rate = self.calibration.rate
        self.calibration.propose(one.row.number, token, parent, cell)
        return Draft(token, parent, [rate[each] for each in cell], [False] * len(token), law=one.law)

    def _shaped(self, one: Lattice) -> list[tuple[int, int, int]]:
        """(token, parent, cell) of the nodes that the shape names and the levels have."""
        nodes: list[tuple[int, int, int]] = []
        place: dict[tuple[int, ...], int] = {(): -1}
        for path in map(tuple, self._shape):
            depth = len(path) - 1
            if len(nodes) == one.most:
                break
            if depth < len(one.levels) and path[-1] < len(one.levels[depth]) and path[:-1] in place:
                place[path] = len(nodes)
                nodes.append((one.levels[depth][path[-1]][0], place[path[:-1]], one.levels[depth][path[-1]][1]))
        return nodes

    def _best(self, one: Lattice) -> list[tuple[int, int, int]]:
        """The likeliest nodes by survival, at most `most`; a parent is at least as likely as its child and comes before it."""
        rate = self.calibration.rate
        levels = [sorted(enumerate(level), key=lambda each: -rate[each[1][1]]) for level in one.levels]
        heap: list[tuple[float, int, _Hope]] = []
        counter = itertools.count()

        def hope(depth: int, order: int, parent: int, above: float) -> None:
            if depth < len(levels) and order < len(levels[depth]):
                survival = above * rate[levels[depth][order][1][1]]
                heapq.heappush(heap, (-survival, next(counter), _Hope(depth, order, parent, above)))

        nodes: list[tuple[int, int, int]] = []
        hope(0, 0, -1, 1.0)
        while heap and len(nodes) < one.most:
            minus, _, (depth, order, parent, above) = heapq.heappop(heap)
            rank, (token, cell) = levels[depth][order]
            nodes.append((token, parent, cell))
            hope(depth, order + 1, parent, above)
            if self._free or not rank:
                hope(depth + 1, 0, len(nodes) - 1, -minus)
        return nodes


def lined_up(nodes: list[tuple[int, int, int]], rate: Sequence[float]) -> tuple[list[int], list[int], list[int]]:
    """The same tree with its likeliest path in front: from the root always the best child."""
    best: dict[int, int] = {}
    for i, (_, parent, cell) in enumerate(nodes):
        if parent not in best or rate[cell] > rate[nodes[best[parent]][2]]:
            best[parent] = i
    path = [best[-1]]
    while path[-1] in best:
        path.append(best[path[-1]])
    order = [*path, *(i for i in range(len(nodes)) if i not in set(path))]
    place = {node: i for i, node in enumerate(order)}
    place[-1] = -1
    return [nodes[i][0] for i in order], [place[nodes[i][1]] for i in order], [nodes[i][2] for i in order]


def _cell(sample: bool, depth: int, rank: int, chance: float) -> int:
    kind = (sample * _DEPTHS + min(depth, _DEPTHS - 1)) * _CLASSES + min(rank, _CLASSES - 1)
    return kind * BINS + min(BINS - 1, int(chance * BINS))


def _prior() -> list[float]:
    """Greedy: the heads mean what they say. With dice: two close distributions agree on most throws whatever the token's probability."""
    middle = [(i + 0.5) / BINS for i in range(BINS)]
    sampled = [[0.3 + 0.65 * chance for chance in middle], [0.15] * BINS, [0.08] * BINS, [0.04] * BINS]
    greedy = [middle] * _CLASSES
    return [rate for kind in (greedy, sampled) for _ in range(_DEPTHS) for rank in kind for rate in rank]
