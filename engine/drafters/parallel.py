"""P-EAGLE (2602.01469): an EAGLE-3 head that guesses several places in one forward: `--speculator eagle=DIR`, where DIR is one.

    known tokens    t0 … tn−1 │ tn = root          features: f0 … fn−1
    one forward     (f0, t1) … (fn−1, tn)  (m, mask)  (m, mask) …     the last real row guesses the token behind the root, each row of
                                                                      the learned feature m and the mask token the one behind that
    what came true  features at n … n+m            are entered over what the masks left

Rows see what stands before them. A place does not know what was chosen for the one before it, so the places are a lattice, as DFlash's are.
Told by the configuration (`speculators_model_type` peagle) or the tensor `mask_hidden`. Where that is as wide as all tapped layers together
it is fused like their features; where it is as wide as the head it stands behind the fusion. How entries are made: `entries.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.engine.batch import Stem
from forerun.engine.drafters.draft import FREE, Commit, Draft, Terms
from forerun.engine.drafters.entries import Entries, Made, stem
from forerun.engine.drafters.lattice import Lattice, Levels
from forerun.engine.drafters.registry import Host
from forerun.engine.drafters.taps import Due


@dataclasses.dataclass(frozen=True, slots=True)
class Mask:
    """What stands where nothing is known yet: a token, and a row of what the net carries, [1, W]."""

    token: int
    carried: Tensor


class Parallel:
    """`most`: nodes of a draft; `places`: guesses of a forward."""

    def __init__(self, made: Made, mask: Mask, levels: Levels, host: Host, most: int, places: int) -> None:
        self._entries = Entries(made, levels, host, most, places + 1)
        self._levels, self._mask, self._places = levels, mask, places
        self.needs, self.listener = self._entries.needs, self._entries.listener

    def absorb(self, commit: Commit) -> None:
        self.listener.absorb(commit)

    def forget(self, rows: list[int]) -> None:
        self.listener.forget(rows)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self.listener.asked()
        began = time.perf_counter()
        asked = self._entries.due(rows, budget)
        lattices = self._speak(asked, terms) if asked else {}
        self._levels.pace.observe(len(lattices), time.perf_counter() - began)
        return [self._levels.finish(lattices.get(number)) for number in rows]

    def _speak(self, asked: Sequence[Due], terms: Terms) -> dict[int, Lattice]:
        """Enters what waits, with masks behind the rows that are then up to date, and reads their places one by one."""
        guesses = [min(one.depth, self._places) if one.ends else 0 for one in asked]
        stems = []
        for one, count in zip(asked, guesses):
            behind = range(one.count - 1, one.count - 1 + count)
            stems.append(stem(one.traced, one.count + max(0, count - 1), behind))
        parts = self._entries.take(asked)
        for one, count in zip(asked, guesses):
            self.listener.trail.scribbles(one.traced, one.traced.row.computed, one.traced.row.computed + max(0, count - 1))
        logits = self._forward_masked(stems, parts, guesses)
        self._entries.entered(asked)
        lattices = {}
        firsts = [sum(guesses[:i]) for i in range(len(guesses))]
        going = [(Lattice(one.traced.row, one.most, count), first) for one, count, first in zip(asked, guesses, firsts) if count]
        for lattice, _ in going:
            lattices[lattice.row.number] = lattice
        for place in range(self._places):
            going = [(lattice, first) for lattice, first in going if not place or self._levels.goes_on(lattice, terms)]
            if not going:
                break
            self._levels.add([lattice for lattice, _ in going], logits[[first + place for _, first in going]], terms)
        return lattices

    def _forward_masked(self, stems: list[Stem], parts: Sequence[tuple[list[int], Tensor]], guesses: Sequence[int]) -> Tensor:
        """Logits [guesses of all rows, V']."""
        fused = torch.split(self._entries.fused(parts), [len(tokens) for tokens, _ in parts])
        tokens: list[int] = []
        carried: list[Tensor] = []
        for (known, _), real, count in zip(parts, fused, guesses):
            masks = max(0, count - 1)
            tokens += [*known, *[self._mask.token] * masks]
            carried += [real, self._mask.carried.expand(masks, -1)]
        return self._entries.run(stems, tokens, torch.cat(carried)).logits
