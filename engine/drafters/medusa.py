"""Medusa: heads that look further ahead from the same hidden state (Cai et al. 2401.10774): `--speculator medusa=DIR[,tree=SHAPE]`.

    h = the target's last hidden state, behind the final norm, where the root was picked
    head i:   h ← h + SiLU(W h + b)   (once for each of its blocks),   then logits; it guesses the token i + 1 places behind the root

The heads know nothing of each other, so the candidates of all of them are a lattice (`lattice.py`): the best tree under the budget, or a
shape that its authors published. A head is computed only if what the ones before it promise makes it worth while.

Layouts, by the names of the tensors:

    Medusa-1   {i}.{j}.linear.{weight,bias}  {i}.{L}.weight    in medusa_lm_head.{pt,safetensors}
    Medusa-2   medusa_head.{i}.…                               in the weights of the target, which was trained along
    TGI        {i}.0.linear.{weight,bias}                      the target's own output head reads the result
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backends.base import Ops, Weight
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Place, Terms
from forerun.engine.drafters.heads import Heads, parse_value
from forerun.engine.drafters.lattice import Lattice, Levels
from forerun.engine.drafters.medusa_shapes import SHAPES
from forerun.engine.drafters.registry import Host, Setting
from forerun.engine.drafters.tips import Tips
from forerun.engine.drafters.voice import ROWS, Heard, Marginal, Said, rehearse, speak
from forerun.engine.models.decoder import Linear

log = logging.getLogger(__name__)

MOST = 16
"""nodes of a tree, unless told otherwise"""
PREFIX = "medusa_head."


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """`blocks`: [H, H] each. `out`: [V, H], None = the target's."""

    blocks: tuple[Linear, ...]
    out: Weight | None


class MedusaNet:
    """`target(x)`: logits of the target's own head."""

    def __init__(self, heads: list[Head], ops: Ops, target: Callable[[Tensor], Tensor]) -> None:
        self.heads = heads
        self._ops = ops
        self._target = target

    def says(self, state: Tensor) -> Said:
        """state [n, H] of the target."""
        if self.heads[0].out is None:  # one head for all: its product costs about the same for several places at once
            return Marginal(Heard(torch.stack([self.inner(state, head) for head in self.heads], 1), self._target))
        return _Own(self, state)

    def inner(self, state: Tensor, head: Head) -> Tensor:
        """[n, H] → [n, H]: what the output matrix reads."""
        x, ops = state, self._ops
        for block in head.blocks:
            x = ops.add(F.silu(block(ops, x)), x)
        return x

    def logits(self, state: Tensor, place: int) -> Tensor:
        """[n, H] → [n, V] of this head."""
        x, out = self.inner(state, self.heads[place]), self.heads[place].out
        return self._target(x) if out is None else self._ops.logits(x, out)


class _Own:
    """Heads with output matrices of their own, each computed when its turn comes."""

    def __init__(self, net: MedusaNet, state: Tensor) -> None:
        self._net, self._state = net, state

    def level(self, place: int, newest: Sequence[int]) -> tuple[Tensor, list[float] | None]:
        return self._net.logits(self._state, place), None

    def keep(self, rows: Sequence[int]) -> None:
        self._state = self._state[list(rows)]


class Medusa:
    """`most`: nodes of a draft."""

    def __init__(self, net: MedusaNet, levels: Levels, host: Host, most: int, weight_bytes: int, work_bytes: int) -> None:
        self.net = net
        self.levels = levels
        self._tips = Tips()
        self._hidden, self._device = host.model.hidden, host.backend.device
        self.needs = Needs(
            (host.model.layers,), (), most, lazy=False, weight_bytes=weight_bytes, work_bytes=work_bytes, attach=self._attach
        )

    @classmethod
    def open(cls, value: str, setting: Setting) -> Medusa:
        """`value`: the folder or hub id, empty = the target's own; `tree`: a published shape, `best` (the default) or `chain`."""
        host = setting.worker
        place, options = parse_value("medusa", value, {"tree": ("best", "chain", *SHAPES)}, host.start.model_id)
        heads = Heads.open(place, host)
        found = read_heads(heads, host.model.hidden, host.model.vocab)
        heads.close()
        shared, ops = host.model.shared(), host.backend.ops
        net = MedusaNet(found, ops, lambda x: shared.logits(ops, x))
        tree = setting.tree and options.get("tree") != "chain"
        shape = [node for node in SHAPES.get(options.get("tree", ""), []) if len(node) <= len(found)]
        levels = Levels.open(host, tree, free=True, shape=shape)
        most = setting.nodes or (len(shape) or MOST if tree else len(found))
        log.info(
            "%s has %d Medusa heads (%s)",
            heads.path,
            len(found),
            "the target's output head" if found[0].out is None else "own output heads",
        )
        rows = host.start.max_rows
        work = 4 * (rows * (3 + len(found)) * host.model.hidden + 3 * max(rows, ROWS) * host.model.vocab)
        return cls(net, levels, host, min(most, host.backend.caps.max_nodes), heads.bytes, work)

    def absorb(self, commit: Commit) -> None:
        for number, new in self._tips.absorb(commit):
            self.levels.calibration.settle(number, new)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        ready = self._tips.ready(rows, budget)
        lattices = {row.number: Lattice(row, most, len(self.net.heads)) for row, _, most in ready}
        if ready:
            said = self.net.says(torch.stack([state for _, state, _ in ready]))
            speak(self.levels, said, list(lattices.values()), len(self.net.heads), terms)
        return [self.levels.finish(lattices.get(number)) for number in rows]

    def forget(self, rows: list[int]) -> None:
        self._tips.forget(rows)
        for number in rows:
            self.levels.calibration.forget(number)

    def _attach(self, place: Place) -> None:
        for rows in (place.rows, 1):
            state = torch.zeros(rows, self._hidden, device=self._device)
            rehearse(self.levels, self.net.says(state), rows, len(self.net.heads))


def read_heads(heads: Heads, hidden: int, vocab: int) -> list[Head]:
    """All heads of the file, which count for more than what its configuration says of them. Sets the prefix. StartError for other heads."""
    if any(name.startswith(PREFIX) for name in heads.checkpoint.names()):
        heads.prefix = PREFIX
    blocks: dict[int, int] = {}
    outs: set[int] = set()
    for name in heads.names():
        block, out = re.fullmatch(r"(\d+)\.(\d+)\.linear\.weight", name), re.fullmatch(r"(\d+)\.(\d+)\.weight", name)
        if block:
            blocks[int(block[1])] = max(blocks.get(int(block[1]), 0), int(block[2]) + 1)
        elif out:
            outs.add(int(out[1]))
    heads.demand(
        bool(blocks), "these are no Medusa heads: no {i}.{j}.linear.weight", "see docs/drafters.md for the layouts of each drafter"
    )
    heads.demand(not outs or outs == set(blocks), "only some of its heads have an output matrix", "fetch the heads again")
    found = []
    for i in range(len(blocks)):
        heads.demand(i in blocks, f"there are {len(blocks)} heads, but none is number {i}", "fetch the heads again")
        inner = tuple(heads.linear(f"{i}.{j}.linear", hidden, hidden) for j in range(blocks[i]))
        found.append(Head(inner, heads.weight(f"{i}.{blocks[i]}.weight", vocab, hidden) if outs else None))
    return found
