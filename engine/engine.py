"""One step of a worker: draft, verify, rollback.

    plan → rows.apply → draft → batch → model → choose → walk → commit → result

A plain decode step is a verify step without guesses. Rollback is leaving `computed` at what held; only an accepted path that does not
lie along the first nodes of its draft needs its KV copied into place. Owns nothing but the order of these things: rows, pages, dice
and drafts have their own modules. Never names a device.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from forerun.backends.base import Backend, Pool
from forerun.engine import grammar
from forerun.engine.batch import Batch, build
from forerun.engine.drafters.choose import by_source, census
from forerun.engine.drafters.draft import Commit
from forerun.engine.drafters.speculator import Speculator
from forerun.engine.kv import Moves
from forerun.engine.models.model import Model, Output
from forerun.engine.profile import Profiler
from forerun.engine.rows import Row, RowTable, Share
from forerun.engine.sampler import Ask, Choice, Sampler
from forerun.engine.verify import Accept, follow
from forerun.messages import Emit, Finish, Inject, Profile, Ready, StepPlan, StepResult

PROMPT_ROWS = 256
"""Prompt rows whose logits may be alive at once, beside one a sequence: longer chunks of prompts whose log-probabilities are asked for are
computed in parts."""


class Engine:
    """The stepper of a worker with a model. `ready` is what it told the front about itself."""

    def __init__(
        self,
        ready: Ready,
        backend: Backend,
        model: Model,
        pool: Pool,
        rows: RowTable,
        sampler: Sampler,
        speculator: Speculator,
        accept: Accept = follow,
    ) -> None:
        self.ready = ready
        self._backend = backend
        self._pool = pool
        self._rows = rows
        self._sampler = sampler
        self._speculator = speculator
        self._accept = accept
        taps = speculator.needs.layers
        self._run: Callable[[Batch], Output] = backend.capture(lambda batch: model.forward(batch, pool, taps), None)
        self._fail_at = 0
        self.profiler: Profiler | None = None
        """who measures steps while no row is running"""

    def step(self, plan: StepPlan) -> StepResult:
        """Apply one plan. What concerns one row alone ends that row; an exception means that the worker cannot go on."""
        shares, emits, gone = self._rows.apply(plan)
        if gone:
            self._speculator.forget(gone)
        shares, late = grammar.gate(shares)
        emits += late
        self._long_prompts(shares)
        started = time.perf_counter()
        self._speculator.draft(shares, self._rows.table, plan)
        drafted = time.perf_counter()
        if shares:
            output = self._forward(shares)
            self._report(shares, output, emits)
        self._leave(emits)
        nodes = sum(share.draft.count for share in shares)
        rows = sum(share.known for share in shares) + nodes
        verified = time.perf_counter()
        depths = census(share.draft for share in shares) if nodes else []
        news = self._speculator.news()
        sources = by_source((share.draft, share.accepted) for share in shares) if nodes else []
        lacked, chosen = self._speculator.late(), _micros(0.0, self._speculator.chosen())
        times = _micros(started, drafted), _micros(drafted, verified)
        return StepResult(plan.step, emits, *times, rows, nodes, depths, sources, news, lacked, chosen, self._speculator.caught_up())

    def inject(self, message: Inject) -> None:
        """`fail`: the row that next reaches `value` generated tokens ends with an error."""
        if message.kind == "fail":
            self._fail_at = int(message.value)

    def beside(self, speculator: Speculator) -> Engine:
        """Another engine out of the same parts, rows and recorded forwards included, with other guesses."""
        other = copy.copy(self)
        other._speculator = speculator
        return other

    @property
    def resting(self) -> bool:
        return self.profiler is not None and self.profiler.resting and self._rows.empty

    def rest(self, wanted: Callable[[], bool]) -> Profile | None:
        return self.profiler.rest(wanted) if self.profiler and self._rows.empty else None

    def _forward(self, shares: Sequence[Share]) -> Output:
        return self._run(build(shares, self._rows.table, self._backend.device))

    def _long_prompts(self, shares: Sequence[Share]) -> None:
        """Compute first parts of chunks whose every position is scored, until what is left of all of them together has few logits."""
        room = PROMPT_ROWS
        for share in shares:
            if share.echoed:
                while share.known > max(room, 1):
                    self._part(share, min(PROMPT_ROWS, share.known - max(room, 1)))
                room -= share.known

    def _part(self, share: Share, count: int) -> None:
        """The first `count` known tokens of a share, alone."""
        rest, share.known = share.known - count, count
        output = self._forward([share])
        self._score_prompt(share, output.logits)
        share.row.computed += count
        self._tell([share], output, [()])
        share.known = rest

    def _score_prompt(self, share: Share, logits: Tensor) -> None:
        """logits [known, V] of a share that is scored at every known row: what they say of the prompt tokens that follow."""
        row = share.row
        first = row.computed + 1
        targets = row.tokens[first : min(first + share.known, row.params.prompt_tokens)]
        own, top = self._sampler.prompt_logprobs(logits[: len(targets)], targets, row.params.top_n if row.params.raw_logprobs else 0)
        share.prompt_logprobs += own
        share.prompt_top += top

    def _report(self, shares: Sequence[Share], output: Output, emits: list[Emit]) -> None:
        """Choose, walk, commit; one Emit for each row that has something to say."""
        asks, firsts = self._asks(shares, output)
        choices = self._sampler.decide(output, asks) if asks else []
        told: list[Sequence[int]] = []
        moves = Moves()
        for share, first in zip(shares, firsts):
            row = share.row
            if not share.ends:
                row.computed += share.known
                told.append(())
                if share.prompt_logprobs:
                    emits.append(Emit(row.number, prompt_logprobs=share.prompt_logprobs, prompt_top=share.prompt_top))
                continue
            nodes = slice(first, first + 1 + share.draft.count)
            picked = choices[nodes]
            path = self._accept(share, asks[nodes], picked, output) if share.draft.count else []
            if True in share.draft.probe:
                self._speculator.answered(row.number, share.draft, [choice.token for choice in picked[1:]])
            emit, used = self._commit(share, picked, path)
            share.accepted = used
            moves.add(row.number, row.computed - len(used), used)
            emits.append(emit)
            told.append(used)
        self._move(moves)
        self._tell(shares, output, told)

    def _asks(self, shares: Sequence[Share], output: Output) -> tuple[list[Ask], list[int]]:
        """The nodes where a token is picked, and for each share the place of its root among them. Scores prompts on the way."""
        asks: list[Ask] = []
        firsts: list[int] = []
        at = 0
        for share in shares:
            scored, draft, row = share.scored, share.draft, share.row
            if share.echoed:
                self._score_prompt(share, output.logits[at : at + scored])
            at += scored
            firsts.append(len(asks))
            if share.ends:
                asks.append(Ask(at - 1, row, ()))
                asks += [Ask(at + node, row, path) for node, path in enumerate(draft.paths())]
                at += draft.count
        return asks, firsts

    def _commit(self, share: Share, picked: Sequence[Choice], path: list[int]) -> tuple[Emit, list[int]]:
        """The picks along the path become the row's tokens, one by one: the first that ends the row is the last. Returns the accepted nodes
        that are part of it."""
        row, params = share.row, share.row.params
        new: list[Choice] = []
        finish: Finish = ""
        error = ""
        for place in (0, *(node + 1 for node in path)):
            choice = picked[place]
            error = choice.error
            if error:
                break
            new.append(choice)
            count = row.generated + len(new)
            if self._fail_at and count >= self._fail_at:
                self._fail_at, error = 0, "a fault was injected into this row"
                break
            if count >= params.max_new_tokens:
                finish = "length"
            elif choice.token in params.stop_ids:
                finish = "eos_token"
            if finish:
                break
        used = path[: len(new)]
        tokens = [choice.token for choice in new]
        logprobs = [choice.logprob for choice in new] if params.logprobs else []
        top = [choice.top for choice in new] if params.top_n else []
        counts, prompt = (share.draft.guesses, len(used)), share.prompt_logprobs
        emit = Emit(row.number, tokens, logprobs, top, *counts, finish, error, prompt, share.expected, share.prompt_top)
        row.commit(tokens, row.computed + share.known + len(used))
        return emit, used

    def _move(self, moves: Moves) -> None:
        """The entries of accepted paths into their places. Of the target's pool alone: a drafter makes its own anew."""
        if moves.rows:
            device = self._backend.device
            source, target = (torch.from_numpy(slots).to(device) for slots in moves.slots(self._rows.table))
            self._backend.ops.keep_kv(self._pool, source, target)

    def _tell(self, shares: Sequence[Share], output: Output, used: Sequence[Sequence[int]]) -> None:
        """Tell a drafter that hears all what became true, with the features of the rows that it became true at. `used`: the accepted
        nodes of each share. A row is told from where it was left off: what a prefix hit brought along is told with the first chunk. Of rows
        at which the drafter failed nothing is told: what it knows of them has a hole, and it would only fail again."""
        if not self._speculator.hears_all:
            return
        starts = accumulate((share.known + share.draft.count for share in shares), initial=0)
        told = [each for each in zip(shares, starts, used) if not each[0].row.cold]
        if not told:
            return
        features: list[Tensor] | None = None
        if output.taps is not None:
            features = [_rows(output.taps, at, share.known, path) for share, at, path in told]
        rows: list[Row] = [share.row for share, _, _ in told]
        start = [row.heard for row in rows]
        tokens = [row.tokens[row.heard : row.computed] for row in rows]
        newest = [row.tokens[-1] if row.computed == len(row.tokens) - 1 else None for row in rows]
        prompt, scope = [row.params.prompt_tokens for row in rows], [row.scope for row in rows]
        params = [self._speculator.told(row) for row in rows]
        answers = self._speculator.answers(rows)
        commit = Commit([row.number for row in rows], start, tokens, newest, features, prompt, scope, params, answers)
        self._speculator.absorb(commit, rows)

    def _leave(self, emits: Sequence[Emit]) -> None:
        ended = [emit.row for emit in emits if emit.finish or emit.error]
        if ended:
            gone = [row for number in ended if (row := self._rows.end(number)) is not None]
            self._speculator.forget(gone)


def _rows(taps: Tensor, first: int, known: int, path: Sequence[int]) -> Tensor:
    """Features of a share whose rows begin at `first`: of its known rows and of the accepted nodes behind them; a view where these lie side
    by side."""
    last = first + known
    if not path or path[-1] < len(path):
        return taps[first : last + len(path)]
    return taps[[*range(first, last), *(last + node for node in path)]]


def _micros(start: float, end: float) -> int:
    return int((end - start) * 1e6)
