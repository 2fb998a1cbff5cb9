"""DFlash: block diffusion drafting (2602.06036): `--speculator dflash=DIR[,tree=best|chain]`.

    known tokens    t0 … tn−1 │ tn = root            entries of 0 … n−1 in the drafter's pool, made of the target's features there
    a draft         one forward of [root, mask, mask, …] at n, n + 1, …     the row at n + j guesses the token there
    what came true  features at n … n+m              become entries when the next draft is asked for, over what the block left there

Every place is guessed by itself, so what the places say is a lattice: the best tree of it under the budget (DDTree, 2604.12989), or with
`tree=chain` the likeliest token of each. `Blocks` is the drafter; what is made of a block's rows is its `Voice`'s business, so that DSpark
(`dspark.py`) is the same drafter with another voice. Which of the two a checkpoint is, it says itself, whatever name it was given under.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.backends.base import PoolSpec
from forerun.engine.batch import Stem, grow
from forerun.engine.drafters.dflash_load import BlockPlan, merged, read_net, read_output, read_plan
from forerun.engine.drafters.dflash_net import BlockNet, Spot, standing
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Place, Terms
from forerun.engine.drafters.dspark import has_heads, read_spark
from forerun.engine.drafters.entries import COPIES
from forerun.engine.drafters.heads import Heads, parse_value
from forerun.engine.drafters.lattice import Lattice, Levels
from forerun.engine.drafters.listener import CATCH_UP, Listener
from forerun.engine.drafters.registry import Host, Setting
from forerun.engine.drafters.taps import STORAGE, Traced, Trail
from forerun.engine.drafters.voice import ROWS, Marginals, Said, Voice, rehearse, speak

log = logging.getLogger(__name__)

MOST = 16
"""nodes of a tree, unless told otherwise"""


class Dflash:
    """Opens the drafter; what runs is `Blocks`. Registered as `dflash` and as `dspark`."""

    @staticmethod
    def open(value: str, setting: Setting) -> Blocks:
        """`value`: the folder or hub id; `tree`: `best` (the default) or `chain`."""
        host = setting.worker
        place, options = parse_value("dflash", value, {"tree": ("best", "chain")})
        heads = Heads.open(place, host)
        config = merged(heads)
        plan = read_plan(heads, config, host)
        net = read_net(heads, config, plan, host)
        output = read_output(heads, plan, host)
        ops, sparks = host.backend.ops, has_heads(heads)
        voice: Voice = Marginals(ops, output)
        if sparks:
            voice = read_spark(heads, config, ops, output, host.model.hidden, host.model.vocab, output.vocab)
        heads.close()
        log.info(
            "%s: %s in %s layout, blocks of %d behind layers %s%s",
            heads.path,
            "DSpark" if sparks else "DFlash",
            plan.layout,
            plan.size,
            ", ".join(map(str, plan.taps)),
            ", the root's row guesses too" if plan.anchor else "",
        )
        tree = setting.tree and options.get("tree") != "chain"
        levels = Levels.open(host, tree, free=voice.free, targets=output.ids)
        most = setting.nodes or (max(MOST, plan.places) if tree else plan.places)
        spec = net.layers[0].attention.spec
        pool = PoolSpec(len(net.layers), spec.kv_heads, spec.head_dim, heads.kept(heads.checkpoint.read(f"{heads.prefix}fc.weight").dtype))
        return Blocks(net, plan, voice, levels, host, min(most, host.backend.caps.max_nodes), pool, heads.bytes, output.vocab)


class Blocks:
    """`most`: nodes of a draft; `pool`: of the net's layers; `vocab`: of the head."""

    def __init__(
        self,
        net: BlockNet,
        plan: BlockPlan,
        voice: Voice,
        levels: Levels,
        host: Host,
        most: int,
        pool: PoolSpec,
        weight_bytes: int,
        vocab: int,
    ) -> None:
        self.net, self.plan, self.levels = net, plan, levels
        self._voice = voice
        self._ops, self._backend, self._progress = host.backend.ops, host.backend, host.progress
        self._table_of_tokens = host.model.shared().table
        self.listener = Listener(levels.calibration, lambda traced, count: self._enter([(traced, count)]))
        rows = host.start.max_rows
        self._room, self._tapped = CATCH_UP + rows * plan.size, len(plan.taps) * host.model.hidden
        work = COPIES * self._room * net.width + net.gathered(plan.size)
        work += (STORAGE + COPIES * self._room) * self._tapped + 2 * max(rows, ROWS) * vocab
        self.needs = Needs(
            plan.taps,
            (pool,),
            most,
            lazy=False,
            weight_bytes=weight_bytes,
            work_bytes=4 * work,
            attach=self._attach,
            late=self.listener.lacks,
            behind=self.listener.behind,
        )

    def absorb(self, commit: Commit) -> None:
        self.listener.absorb(commit)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self.listener.asked()
        lattices = {traced.row.number: (traced, Lattice(traced.row, most, depth)) for traced, most, depth in self._able(rows, budget)}
        if lattices:
            self._speak(list(lattices.values()), terms)
        return [self.levels.finish(lattices[number][1] if number in lattices else None) for number in rows]

    def forget(self, rows: list[int]) -> None:
        self.listener.forget(rows)

    # -- entries -----------------------------------------------------------------------------------------------------------------

    def _attach(self, place: Place) -> None:
        """Entries of as much text as is read at a time and of one token, then blocks of all rows and of one: where nobody looks yet."""
        self._pool, self._table = place.pools[0], place.table
        self.listener.open(Trail(place.table, self._pool.keys.shape[1], successor=False))
        self._features = features = torch.zeros(self._room, self._tapped, device=self._backend.device)
        net, ops, pool = self.net, self._ops, self._pool
        self._entered = self._backend.capture(lambda batch: net.enter(ops, features, batch, pool), None)
        size, embedded = self.plan.size, self._embedded
        self._stand = self._backend.capture(lambda batch: net.stand(ops, embedded(batch.tokens), size, batch, pool), None)
        for parts in (place.spread(self._room), [1]):
            self._progress("warming", 0, 1)
            self._write([Stem(row, 0, 0, count, (), ()) for row, count in enumerate(parts)], features[: sum(parts)])
        for count in (place.rows, 1):
            spots = [Spot(row, 0, 1) for row in range(count)]
            for reached in (True, False):
                self._progress("warming", 0, 1)
                rehearse(self.levels, self._says([0] * count, spots, [reached] * count), count, self.plan.places)

    def _able(self, rows: Sequence[int], budget: Sequence[int]) -> list[tuple[Traced, int, int]]:
        """(row, nodes, levels) of those whose entries are all there; makes those that are missing, of rows far behind a part."""
        asked = self.listener.trail.able(rows, budget)
        left = CATCH_UP
        parts: list[tuple[Traced, int]] = []
        for traced, _ in sorted(asked, key=lambda each: self.listener.trail.due(each[0])):
            due = self.listener.trail.due(traced)
            count = due if due <= self.plan.size else min(due, left)
            left -= count if due > self.plan.size else 0
            parts.append((traced, count))
        self._enter(parts)
        return [(traced, most, min(most, self.plan.places)) for traced, most in asked if traced.ready]

    def _enter(self, asked: Sequence[tuple[Traced, int]]) -> None:
        """Makes the next so many entries of each of these rows, all in one forward."""
        asked = [(traced, count) for traced, count in asked if count > 0]
        if not asked:
            return
        stems = [Stem(traced.row.number, traced.base, traced.row.computed, count, (), ()) for traced, count in asked]
        features = [self.listener.trail.take(traced, count)[1] for traced, count in asked]
        self._write(stems, torch.cat(features) if len(features) > 1 else features[0])
        for traced, _ in asked:
            self.listener.trail.entered(traced, traced.row.computed)

    def _write(self, stems: Sequence[Stem], features: Tensor) -> None:
        """The entries of these rows; features [n, taps · H]."""
        self._features[: len(features)] = features
        self._entered(grow(stems, self._table, self._backend.device))

    def _reaches(self, traced: Traced) -> bool:
        """The row's pages hold a block behind its entries; what is written there is nobody's beginning any more."""
        first = traced.row.computed
        reaches = self._table.reach(traced.row.number) >= first + self.plan.size
        if reaches:
            self.listener.trail.scribbles(traced, first, first + self.plan.size)
        return reaches

    # -- guesses -----------------------------------------------------------------------------------------------------------------

    def _speak(self, growing: list[tuple[Traced, Lattice]], terms: Terms) -> None:
        """One block of all rows, then its places one by one."""
        roots = [traced.row.tokens[-1] for traced, _ in growing]
        spots = [Spot(traced.row.number, traced.base, traced.row.computed) for traced, _ in growing]
        said = self._says(roots, spots, [self._reaches(traced) for traced, _ in growing])
        speak(self.levels, said, [one for _, one in growing], self.plan.places, terms)

    def _says(self, roots: Sequence[int], spots: Sequence[Spot], reaches: Sequence[bool]) -> Said:
        """What the rows say of a block behind each of these roots. `reaches`: the pages hold it."""
        size, device = self.plan.size, self._backend.device
        groups = [[i for i, each in enumerate(reaches) if each == reached] for reached in (True, False)]
        parts = [self._hidden([roots[i] for i in some], [spots[i] for i in some], some is groups[0]) for some in groups if some]
        hidden = parts[0]
        if len(parts) > 1:
            hidden = torch.cat(parts)[torch.tensor(groups[0] + groups[1], device=device).argsort()]
        return self._voice.says(hidden[:, size - self.plan.places :])

    def _hidden(self, roots: Sequence[int], spots: Sequence[Spot], reached: bool) -> Tensor:
        """Blocks behind these roots, [n, size, H]."""
        net, size, device = self.net, self.plan.size, self._backend.device
        tokens = [token for root in roots for token in (root, *[self.plan.mask] * (size - 1))]
        rows: Tensor
        if reached and net.stands(size):
            rows = self._stand(standing(spots, tokens, self._table, device))
        else:
            embedded = self._embedded(torch.tensor(tokens, dtype=torch.int32, device=device))
            rows = net.gather(self._ops, embedded, spots, self._table, self._pool)
        return rows.view(len(roots), size, -1)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self._ops.embed(self._table_of_tokens, tokens, self.plan.input_scale)
