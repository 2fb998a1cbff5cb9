"""Guesses from a small model of the same language: `--speculator model=DIR` (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

The model runs in the target's worker. Its KV pool has a slot for each of the target's, under the same page ids, so a row's entries are
where its page table says, in either pool.

    known tokens    t0 … tn−1 │ tn = root          row.computed: how many have KV in our pool
    a draft         feed what is missing up to tn ─▶ g1 ─▶ feed g1 ─▶ g2 ─▶ … gk       (gk itself is never fed)
    what came true  g1 … gm, bonus       ⇒ computed = up to gm, or up to gk−1 if all held: then two tokens are missing next time

All rows that are asked about take each step together, in one forward. Next to the chain of the best token at each step hang its
runners-up, which cost nothing to draft. A draft ends where its next guess is not worth its verification, or what all rows together may
still gain is not worth the time of a step. A row that is far behind (a prompt; rounds without guesses) catches up a bounded part a call.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from forerun.backends.base import Picks
from forerun.engine.batch import Batch, feed
from forerun.engine.drafters.calibration import Calibration
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Place, Terms
from forerun.engine.drafters.held import Held
from forerun.engine.drafters.history import fresh
from forerun.engine.drafters.imitation import Imitation, largest
from forerun.engine.drafters.pace import Pace
from forerun.engine.drafters.registry import Host, Setting
from forerun.engine.drafters.vocabulary import Vocabulary, match
from forerun.engine.errors import StartError
from forerun.engine.models.load import find, load_model
from forerun.engine.models.model import Model
from forerun.engine.processing import Scores
from forerun.engine.rows import Row
from forerun.messages import SamplingParams

log = logging.getLogger(__name__)

MOST = 8
"""guesses for a row, unless told otherwise"""
CATCH_UP = 128
"""tokens that are made up for in one call, beside two for each row"""
RANKS = 3
"""candidates of a step: the best goes on, the others are leaves"""
LEAST_SURVIVAL = 0.02
"""a runner-up less likely than this is not mentioned"""
COPIES = 3
"""A recorded forward keeps its memory, with half as much room again: one for steps with logits and one for steps without."""
_BINS = 10
_USUAL, _USUAL_STEP = 0.6, 0.02
"""acceptance to expect of a deeper guess before it is drafted: at first, and how fast it follows what they turn out to promise"""


@dataclasses.dataclass(eq=False, slots=True)
class _Known:
    """What was heard of a row. `row.computed`: how many of its tokens have KV in our pool, −1 = not looked up yet. `fed`: guesses that
    stand behind the known tokens in our pool."""

    row: Row
    fed: list[int]


@dataclasses.dataclass(eq=False, slots=True)
class _Growing:
    """A draft in the making, of at most `most` nodes and `depth` levels. `chain`: the best tokens so far; `side`: the others, as (survival,
    depth, token, cell)."""

    known: _Known
    most: int
    depth: int
    chain: list[int] = dataclasses.field(default_factory=list)
    cells: list[int] = dataclasses.field(default_factory=list)
    survival: list[float] = dataclasses.field(default_factory=list)
    side: list[tuple[float, int, int, int]] = dataclasses.field(default_factory=list)
    law: list[NDArray[np.float64]] = dataclasses.field(default_factory=list)

    @property
    def alive(self) -> float:
        """Survival of the chain's end."""
        return self.survival[-1] if self.survival else 1.0


class Companion:
    """A draft model beside the target. `most`: nodes of a draft."""

    def __init__(self, model: Model, vocabulary: Vocabulary, host: Host, most: int, tree: bool) -> None:
        self._model = model
        self._ops = host.backend.ops
        self._backend = host.backend
        self._progress = host.progress
        self._tree = tree
        self._draws = host.start.acceptance == "rejection"
        self._read: list[int] = vocabulary.to_draft.tolist()
        self._spoken: list[int] = vocabulary.to_target.tolist()
        self._ids = np.flatnonzero(vocabulary.to_target >= 0)
        self._targets = vocabulary.to_target[self._ids]
        self._vocab = host.model.vocab
        self._imitation = Imitation(self._ops, self._vocab, host.start.watermark_gamma, host.start.watermark_delta)
        self.calibration = Calibration(_prior())
        self._pace = Pace()
        self._usual = _USUAL
        self._rows: dict[int, _Known] = {}
        rows = host.start.max_rows
        work = (CATCH_UP + 2 * rows) * model.width * COPIES + rows * (2 * model.vocab + self._vocab)
        self.needs = Needs(
            pools=(model.pool,),
            most=most,
            weight_bytes=model.weight_bytes,
            work_bytes=4 * work,
            attach=self._attach,
            behind=self._behind,
        )

    @classmethod
    def open(cls, value: str, setting: Setting) -> Companion:
        """`value`: the draft model's folder or hub id."""
        if not value:
            raise StartError("--speculator model does not say which model", "use --speculator model=DIR")
        host = setting.worker
        start = msgspec.structs.replace(
            host.start, model_id=value, revision=None, quantize=None, rope_scaling=None, rope_factor=None, max_total_tokens=0
        )
        model = load_model(start, host.backend, host.progress)
        vocabulary = match(find(host.start), find(start), host.model.vocab, model.vocab)
        log.info("the draft model %s shares %d of its %d tokens with the target", value, vocabulary.shared, model.vocab)
        return cls(model, vocabulary, host, setting.nodes or MOST, setting.tree)

    def absorb(self, commit: Commit) -> None:
        for i, number in enumerate(commit.rows):
            known = self._rows.get(number)
            if known is None or not commit.start[i]:
                known = self._rows[number] = self._open(commit, i)
                self.calibration.forget(number)
            row, new = known.row, fresh(commit, i, len(known.row.tokens))
            self.calibration.settle(number, new)
            computed = row.computed
            if computed == len(row.tokens):
                for token, guess in zip(new, known.fed):
                    if token != guess:
                        break
                    computed += 1
            known.fed = []
            row.commit(new, computed)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        drafts: dict[int, _Growing] = {}
        growing, feeds = self._due(rows, budget)
        while feeds:
            began = time.perf_counter()
            logits, picks = self._run(self._batch(feeds, growing))
            self._fed(feeds)
            tokens, logprobs = picks.tokens.tolist(), picks.logprobs.tolist()
            for i, one in enumerate(growing):
                self._choose(one, logits[i].cpu().numpy(), tokens[i], logprobs[i], terms)
                drafts[one.known.row.number] = one
            self._pace.observe(sum(len(ids) for _, _, ids in feeds), time.perf_counter() - began)
            growing = [one for one in growing if self._goes_on(one, terms)]
            if not self._pays(growing, terms):
                break
            feeds = [self._next(one) for one in growing]
        return [self._finish(drafts.get(number)) for number in rows]

    def forget(self, rows: list[int]) -> None:
        for number in rows:
            self.calibration.forget(number)
            if self._rows.pop(number, None) is not None:
                self._held.forget(number)

    # -- rows ------------------------------------------------------------------------------------------------------------------

    def _attach(self, place: Place) -> None:
        pool = place.pools[0]
        self._table = place.table
        self._held = Held(place.table, pool.keys.shape[1])
        model, ops = self._model, self._ops

        def forward(batch: Batch) -> tuple[object, Picks]:
            logits = model.forward(batch, pool).logits
            return logits, ops.pick(logits, None)

        self._run = self._backend.capture(forward, None)
        longest = min(CATCH_UP, place.longest)
        every = range(place.rows)
        for rows, tokens, ends in (([0], longest, [False]), (every, 1, [True] * place.rows), ([0], longest, [True]), ([0], 1, [True])):
            self._progress("warming", 0, 1)
            for _ in range(2):
                self._run(feed(rows, [0] * len(rows), [[0] * tokens] * len(rows), ends, place.table, self._backend.device))

    def _open(self, commit: Commit, i: int) -> _Known:
        prompt = commit.prompt[i] if commit.prompt else len(commit.tokens[i])
        params = commit.params[i] if commit.params else SamplingParams(seed=0, prompt_tokens=prompt, max_new_tokens=1 << 30)
        return _Known(Row.open(commit.rows[i], params, [], -1), [])

    def _due(self, rows: Sequence[int], budget: Sequence[int]) -> tuple[list[_Growing], list[tuple[int, int, list[int]]]]:
        """What is fed first: as (row, position, ids) everything that is missing, of rows that are far behind a part. The drafts of
        the rows that are then up to date."""
        growing: list[_Growing] = []
        feeds: list[tuple[int, int, list[int]]] = []
        left = CATCH_UP
        for known, most in sorted(self._able(rows, budget), key=lambda able: len(able[0].row.tokens) - able[0].row.computed):
            row = known.row
            missing = len(row.tokens) - row.computed
            count = missing if missing <= 2 else min(missing, left)
            ids = [self._read[token] for token in row.tokens[row.computed : row.computed + count]]
            if not ids or min(ids) < 0:
                continue
            left -= count if count > 2 else 0
            feeds.append((row.number, row.computed, ids))
            self._held.writes(row.number, row.computed, row.computed + count)
            row.computed += count
            if count == missing:
                room = min(self._model.max_tokens, self._table.reach(row.number)) - len(row.tokens) + 1
                growing.append(_Growing(known, most, min(most, room)))
        return growing, feeds

    def _fed(self, feeds: Sequence[tuple[int, int, list[int]]]) -> None:
        """These went through the model: what of them is known to be true other rows may find."""
        for number, _, _ in feeds:
            row = self._rows[number].row
            self._held.wrote(number, row.tokens, row.computed)

    def _able(self, rows: Sequence[int], budget: Sequence[int]) -> list[tuple[_Known, int]]:
        """Rows that can be guessed for: heard of, not longer than the model's reach, and with pages for all of their tokens."""
        able: list[tuple[_Known, int]] = []
        for number, most in zip(rows, budget):
            known = self._reached(number) if most > 0 else None
            if known is not None:
                known.row.computed = min(known.row.computed, len(known.row.tokens) - 1)
                able.append((known, most))
        return able

    def _reached(self, number: int) -> _Known | None:
        """A row that can be guessed for, once it is read; what of it is there already has been looked up then."""
        known = self._rows.get(number)
        if known is None or len(known.row.tokens) > min(self._model.max_tokens, self._table.reach(number)):
            return None
        if known.row.computed < 0:
            known.row.computed = self._held.open(number, known.row.tokens)
        return known

    def _behind(self, number: int) -> int:
        """Tokens of a row that it has to read."""
        known = self._reached(number)
        return len(known.row.tokens) - known.row.computed if known is not None else 0

    def _batch(self, feeds: Sequence[tuple[int, int, list[int]]], growing: Sequence[_Growing]) -> Batch:
        ends = {one.known.row.number for one in growing}
        rows, context, ids = zip(*feeds)
        return feed(rows, context, ids, [row in ends for row in rows], self._table, self._backend.device)

    def _next(self, one: _Growing) -> tuple[int, int, list[int]]:
        """The newest guess of a draft goes in."""
        row = one.known.row
        position = len(row.tokens) - 1 + len(one.chain)
        one.known.fed.append(one.chain[-1])
        self._held.writes(row.number, position, position + 1)
        return row.number, position, [self._read[one.chain[-1]]]

    # -- choice ----------------------------------------------------------------------------------------------------------------

    def _choose(self, one: _Growing, raw: Scores, pick: int, logprob: float, terms: Terms) -> None:
        """Adds a level: raw [draft's V] are the logits behind the chain, `pick` the best of them."""
        row = one.known.row
        least = max(LEAST_SURVIVAL, terms.price)
        ranks = RANKS if self._tree and len(one.chain) + 1 < one.most else 1
        if not row.plain:
            if self._draws and row.params.sample:
                token, law = self._imitation.draw(self._spread(raw), row, one.chain)
                found = [(token, float(law[token]))]
                one.law.append(law)
            else:
                found = self._imitation.best(self._spread(raw), row, one.chain, ranks)
        else:
            found = [(self._spoken[pick], math.exp(logprob))]
            if found[0][0] < 0 or (ranks > 1 and one.alive * (1.0 - found[0][1]) > least):
                normalizer = float(raw[pick]) - logprob
                raw = raw[self._ids]
                best = largest(raw, ranks)
                found = [(int(self._targets[place]), math.exp(value - normalizer)) for place, value in best]
        alive, depth = one.alive, len(one.chain)
        for rank, (token, chance) in enumerate(found):
            cell = _cell(row.params.sample, depth > 0, rank, chance)
            survival = alive * self.calibration.rate[cell]
            if not rank:
                one.chain.append(token)
                one.cells.append(cell)
                one.survival.append(survival)
                if depth:
                    self._usual += _USUAL_STEP * (self.calibration.rate[cell] - self._usual)
            elif survival >= least:
                one.side.append((survival, depth, token, cell))

    def _spread(self, raw: Scores) -> Scores:
        """Draft logits at the target's ids."""
        scores = np.full(self._vocab, -np.inf, np.float32)
        scores[self._targets] = raw[self._ids]
        return scores

    def _goes_on(self, one: _Growing, terms: Terms) -> bool:
        """Whether a level more may be of use to this row."""
        if len(one.chain) >= one.depth or self._read[one.chain[-1]] < 0:
            return False
        hoped = one.alive * self._usual
        better = len(one.chain) + sum(side[0] > hoped for side in one.side)
        return hoped > terms.price and better < one.most

    def _pays(self, growing: Sequence[_Growing], terms: Terms) -> bool:
        """Whether what another level may bring is worth its time."""
        gain = sum(one.alive * self._usual - terms.price for one in growing)
        return bool(growing) and gain > terms.goodput * self._pace.seconds(len(growing))

    def _finish(self, one: _Growing | None) -> Draft:
        """The likeliest nodes, the chain first: accepted along it, no KV has to be moved."""
        if one is None or not one.chain:
            return Draft.none()
        worth = sorted([*((survival, -1) for survival in one.survival), *((side[0], i) for i, side in enumerate(one.side))], reverse=True)
        kept = worth[: one.most]
        deep = sum(i < 0 for _, i in kept)
        sides = sorted(i for _, i in kept if i >= 0)
        token = [*one.chain[:deep], *(one.side[i][2] for i in sides)]
        parent = [*range(-1, deep - 1), *(one.side[i][1] - 1 for i in sides)]
        cell = [*one.cells[:deep], *(one.side[i][3] for i in sides)]
        rate = self.calibration.rate
        self.calibration.propose(one.known.row.number, token, parent, cell)
        return Draft(token, parent, [rate[each] for each in cell], [False] * len(token), law=one.law)


def _cell(sample: bool, deep: bool, rank: int, chance: float) -> int:
    """A kind of guess: thrown dice or not, first level or deeper, its rank among the candidates, its probability by the draft."""
    return ((sample * 2 + deep) * RANKS + rank) * _BINS + min(_BINS - 1, int(chance * _BINS))


def _prior() -> list[float]:
    """Greedy: the draft means what it says. With dice: two close distributions agree on most throws whatever the token's probability."""
    middle = [(i + 0.5) / _BINS for i in range(_BINS)]
    greedy = [middle, middle, middle]
    sampled = [[0.3 + 0.65 * chance for chance in middle], [0.15] * _BINS, [0.08] * _BINS]
    return [rate for kind in (greedy, greedy, sampled, sampled) for rank in kind for rate in rank]
