"""Calls the drafter, keeps it in step with what became true, and survives its failures.

Owns the drafter. A lazy drafter is called only when some row may have guesses, and then first hears all it missed; with no guesses it
costs nothing. A drafter that is not lazy hears every commit, with the features it asked for. What a drafter raises never reaches a
request: the rows of that call go cold, and after enough failures it is not called again.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.engine import grammar, rejection
from forerun.engine.drafters.asking import USUAL
from forerun.engine.drafters.choose import choose, keep
from forerun.engine.drafters.draft import Bids, Commit, Draft, Drafter, Late, Needs, Room, Silent, Terms, prune
from forerun.engine.drafters.failures import Failures
from forerun.engine.drafters.trust import Trust
from forerun.engine.kv import Table
from forerun.engine.rows import Row, Share
from forerun.messages import SamplingParams, StepPlan


class Speculator:
    """`vocab`, `longest`: of the target; `nodes`: most guesses a row may have; `step_nodes`: all rows together. `rejects`: drafts are
    chains that are judged by `rejection.py`."""

    def __init__(self, drafter: Drafter, vocab: int, longest: int, nodes: int, step_nodes: int, rejects: bool = False) -> None:
        self._drafter = drafter
        self._vocab = vocab
        self._longest = longest
        self._nodes = nodes
        self._step_nodes = step_nodes
        self._trust = Trust()
        self._fit = rejection.fit if rejects else prune
        self._rejects = rejects
        self.failures = Failures()
        self._answers: dict[int, dict[tuple[int, ...], int]] = {}
        self._late = Late()
        self._caught_up = 0

    @property
    def needs(self) -> Needs:
        return self._drafter.needs

    @property
    def hears_all(self) -> bool:
        """Every commit must be told, with features."""
        return not self._drafter.needs.lazy and not self.failures.enough

    def told(self, row: Row) -> SamplingParams:
        """What the drafter hears of how a row's tokens are chosen."""
        return rejection.blind(row.params) if self._rejects else row.params

    def draft(self, shares: Sequence[Share], table: Table, plan: StepPlan) -> None:
        """Set the draft of every share that may guess. Where the plan has tolls, all drafts compete for its budget; otherwise, and where
        they are drawn and so nothing may be left out for what it is, they take of it in turn."""
        if self.failures.enough:
            return
        needs, tolls = self._drafter.needs, bool(plan.toll)
        compete = tolls and not self._rejects
        asked, nodes, depth = self._questions(shares, table, plan, compete, needs.lazy)
        if not asked:
            return
        rows = [share.row for share in asked]
        try:
            guided = any(row.matching is not None for row in rows)
            bids = self._bids(rows, depth, plan) if compete and needs.chooses and not guided else None
            if needs.lazy:
                self._catch_up(rows)
            terms = Terms(plan.price, plan.goodput, plan.toll if compete else (), bids)
            drafts = self._ask(rows, nodes, terms, needs)
            if bids is None:
                rooms = [Room(*both, self._vocab, 0.0 if tolls else plan.price) for both in zip(nodes, depth)]
                drafts = [self._fit(draft, room) for draft, room in zip(drafts, rooms, strict=True)]
                if guided:
                    drafts = grammar.along(asked, drafts, rooms)
            for share, draft in zip(asked, drafts, strict=True):
                share.draft, share.expected = draft, draft.expected
            if tolls and bids is None:
                self._choose([share for share in asked if not share.draft.law], plan)
        except Exception as error:
            self._fail("propose", rows, error)
            for share in asked:
                share.draft, share.expected = Draft.none(), 0.0

    def _questions(
        self, shares: Sequence[Share], table: Table, plan: StepPlan, compete: bool, lazy: bool
    ) -> tuple[list[Share], list[int], list[int]]:
        """Who is asked, for how many nodes, and how many levels of them. In one piece, like all that each step does here: between two
        forwards that read all weights every function that is called has to come back from memory."""
        asked: list[Share] = []
        nodes: list[int] = []
        depth: list[int] = []
        left, size = self._nodes if compete else min(plan.budget, self._step_nodes), table.page_tokens
        for share in shares:
            if not share.guess:
                continue
            row = share.row
            known = len(row.tokens)
            # A token must be due, and there must be one before it. A drafter must have been told of all before the root: a lazy one will
            # be, one that hears all has been, with features.
            if row.cold or known < 2 or row.computed + share.known != known or not (lazy or row.heard == known - 1):
                continue
            # Guesses need a slot each; the deepest useful one stands before the last token that may be generated, and on a position that
            # the model has.
            most = min(share.guess, left, self._nodes, table.granted[row.number] * size - known)
            levels = min(row.params.prompt_tokens + row.params.max_new_tokens, self._longest + 1) - known - 1
            if most > 0 and levels > 0:
                asked.append(share)
                nodes.append(most)
                depth.append(levels)
                left -= 0 if compete else most
        return asked, nodes, depth

    def _ask(self, rows: Sequence[Row], nodes: list[int], terms: Terms, needs: Needs) -> list[Draft]:
        numbers = [row.number for row in rows]
        if not needs.tells:
            return self._drafter.propose(numbers, nodes, terms)
        before = [needs.behind(number) for number in numbers]
        drafts = self._drafter.propose(numbers, nodes, terms)
        self._caught_up += sum(max(0, then - needs.behind(number) - USUAL) for then, number in zip(before, numbers))
        return drafts

    def _bids(self, rows: Sequence[Row], depth: list[int], plan: StepPlan) -> Bids:
        weight = [plan.weights.get(row.number, 1.0) for row in rows] if plan.weights else []
        return Bids(depth, self._vocab, min(plan.budget, self._step_nodes), weight, plan.entry_price, plan.discount)

    def _choose(self, shares: Sequence[Share], plan: StepPlan) -> None:
        """Leave of all drafts what is worth its toll."""
        survival: list[list[float]] = []
        worth: list[list[float]] = []
        trust, weights, price = self._trust, plan.weights, plan.entry_price
        for share in shares:
            row = share.row
            number, known = row.number, len(row.tokens)
            trust.settle(number, row.tokens)
            values = trust.offer(number, share.draft, known)
            survival.append(values)
            if values:
                own, weight = price * known, weights.get(number, 1.0) if weights else 1.0
                values = [weight * value - own for value in values]
            worth.append(values)
        if not any(worth):
            return
        toll = plan.toll[: min(plan.budget, self._step_nodes)]
        for share, values, nodes in zip(shares, survival, choose(worth, toll, plan.discount)):
            probe = share.draft.probe
            share.expected = sum([values[node] for node in nodes if not probe[node]])
            share.draft = keep(share.draft, nodes)

    def absorb(self, commit: Commit, rows: Sequence[Row]) -> None:
        """What became true in a step; for drafters that hear all."""
        try:
            self._drafter.absorb(commit)
            for row, start, tokens in zip(rows, commit.start, commit.tokens):
                row.heard = start + len(tokens)
        except Exception as error:
            self._fail("absorb", rows, error)

    def answered(self, row: int, draft: Draft, picks: Sequence[int]) -> None:
        """The target's picks at the nodes of a row's draft; those at its probes are told with the next commit."""
        paths = zip(draft.paths(), draft.probe, picks, strict=True)
        self._answers[row] = {tuple(path): pick for path, probe, pick in paths if probe}

    def answers(self, rows: Sequence[Row]) -> list[dict[tuple[int, ...], int]] | None:
        return [self._answers.pop(row.number, {}) for row in rows] if self._answers else None

    def news(self) -> list[str]:
        """What went wrong since this was asked last, one line each."""
        return [*self.failures.news(), *self.needs.news()]

    def chosen(self) -> float:
        """Seconds that the drafter spent by its own choice since this was asked last."""
        return self.needs.chosen()

    def caught_up(self) -> int:
        """Tokens beyond the usual that the drafter read since this was asked last; −1 of one that reads all of a row when it is asked
        about it."""
        read, self._caught_up = self._caught_up, 0
        return read if self.needs.tells else -1

    def late(self) -> Late:
        """What the drafter had to do without since this was asked last."""
        before, self._late = self._late, self.needs.late()
        return Late(*(max(0, now - then) for now, then in zip(self._late, before)))

    def forget(self, rows: Sequence[Row]) -> None:
        """These rows are gone."""
        for row in rows:
            self._trust.forget(row.number)
            self._answers.pop(row.number, None)
        # A drafter that raised while it was told may have kept a part of it.
        known = [row for row in rows if row.heard or row.cold]
        if not known or self.failures.enough:
            return
        try:
            self._drafter.forget([row.number for row in known])
        except Exception as error:
            self._fail("forget", known, error)

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Tell a lazy drafter all that became true since it last heard of these rows, up to the root, which it learns as `next`."""
        told: list[Row] = []
        numbers: list[int] = []
        start: list[int] = []
        tokens: list[list[int]] = []
        newest: list[int | None] = []
        prompt: list[int] = []
        scope: list[str] = []
        params: list[SamplingParams] = []
        for row in rows:
            text, heard = row.tokens, row.heard
            if heard < len(text) - 1:
                told.append(row)
                numbers.append(row.number)
                start.append(heard)
                tokens.append(text[heard:-1])
                newest.append(text[-1])
                prompt.append(row.params.prompt_tokens)
                scope.append(row.scope)
                params.append(self.told(row) if self._rejects else row.params)
        if told:
            answers = self.answers(told) if self._answers else None
            self._drafter.absorb(Commit(numbers, start, tokens, newest, None, prompt, scope, params, answers))
            for row in told:
                row.heard = len(row.tokens) - 1

    def _fail(self, verb: str, rows: Sequence[Row], error: Exception) -> None:
        self.failures.add(verb, [row.number for row in rows], error)
        for row in rows:
            row.cold = True
        if self.failures.enough:
            self._drafter = Silent()  # and what it held goes with it
