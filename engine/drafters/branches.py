"""A draft that grows node by node: the tree of one row, and which of its nodes are worth going on from.

    one beam      root ─ the ─ cat ─ sat          each level goes on from the best child of the last; the others are leaves
                      └─ a    └─ dog
    more beams    each level goes on from the likeliest nodes of the whole tree that nobody went on from yet (EAGLE-2, 2406.16858)

Candidates behind a node, their confidences and what a level is worth are `lattice.py`'s business: a node is a lattice of its path. Knows
nothing of networks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forerun.engine.drafters.draft import Draft, Terms
from forerun.engine.drafters.lattice import Lattice, Levels, lined_up
from forerun.engine.rows import Row

ROOT = -1


@dataclasses.dataclass(eq=False, slots=True)
class Tree:
    """A draft in the making, of at most `most` nodes and `depth` levels. `opened`: nodes that were gone on from, in this order, without the
    root; at most `most`, because each needs a slot."""

    row: Row
    most: int
    depth: int
    token: list[int] = dataclasses.field(default_factory=list)
    parent: list[int] = dataclasses.field(default_factory=list)
    cell: list[int] = dataclasses.field(default_factory=list)
    survival: list[float] = dataclasses.field(default_factory=list)
    opened: list[int] = dataclasses.field(default_factory=list)
    closed: set[int] = dataclasses.field(default_factory=set)
    law: list[NDArray[np.float64]] = dataclasses.field(default_factory=list)

    def path(self, node: int) -> Lattice:
        """The way to a node, as a lattice whose next level is what comes behind it."""
        way: list[int] = []
        at = node
        while at >= 0:
            way.append(at)
            at = self.parent[at]
        levels = [[(self.token[at], self.cell[at])] for at in reversed(way)]
        return Lattice(self.row, self.most, self.depth, levels, self.law, self.survival[node] if node >= 0 else 1.0)


class Branches:
    """`levels`: chooses candidates; `beams`: nodes that a level goes on from, of one row."""

    def __init__(self, levels: Levels, beams: int) -> None:
        self._levels = levels
        self._beams = beams

    def add(self, trees: Sequence[Tree], nodes: Sequence[int], logits: Tensor, terms: Terms) -> None:
        """The children of `nodes[i]` of `trees[i]`, from the logits [m, V'] behind it."""
        paths = [tree.path(node) for tree, node in zip(trees, nodes)]
        depths = [len(path.levels) for path in paths]
        self._levels.add(paths, logits, terms)
        rate = self._levels.calibration.rate
        for tree, node, path, depth in zip(trees, nodes, paths, depths):
            above = tree.survival[node] if node >= 0 else 1.0
            for token, cell in path.levels[depth] if len(path.levels) > depth else ():  # nothing behind what is no number
                tree.token.append(token)
                tree.parent.append(node)
                tree.cell.append(cell)
                tree.survival.append(above * rate[cell])

    def wanted(self, tree: Tree, terms: Terms) -> list[int]:
        """The nodes that the next level goes on from; they count as opened. None = this draft is finished."""
        if self._beams == 1:
            last = tree.opened[-1] if tree.opened else ROOT
            nodes = [tree.parent.index(last)] if last in tree.parent else []  # the best child stands first
        else:
            kept = sorted(range(len(tree.token)), key=lambda node: -tree.survival[node])[: tree.most]
            nodes = [node for node in kept if node not in tree.closed][: min(self._beams, tree.most - len(tree.opened))]
        nodes = [node for node in nodes if self._levels.goes_on(tree.path(node), terms)]
        tree.opened += nodes
        tree.closed.update(nodes)
        return nodes

    def pays(self, trees: Sequence[Tree], nodes: Sequence[Sequence[int]], terms: Terms) -> bool:
        """Whether what going on from all of these may bring is worth the time of a forward."""
        return self._levels.pays([tree.path(node) for tree, each in zip(trees, nodes) for node in each], terms)

    def finish(self, tree: Tree | None) -> Draft:
        """The likeliest nodes, the likeliest path first: accepted along it, no KV has to be moved."""
        if tree is None or not tree.token:
            return Draft.none()
        order = sorted(range(len(tree.token)), key=lambda node: (-tree.survival[node], node))[: tree.most]
        place = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
        rate = self._levels.calibration.rate
        token, parent, cell = lined_up([(tree.token[n], place[tree.parent[n]], tree.cell[n]) for n in order], rate)
        self._levels.calibration.propose(tree.row.number, token, parent, cell)
        return Draft(token, parent, [rate[each] for each in cell], [False] * len(token), law=tree.law)
