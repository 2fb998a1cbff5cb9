"""A drafter among others that may fail: what it raises is its own loss, and not that of those beside it.

Is a drafter itself. A row at which the drafter failed is cold: nothing more is told or asked about it until it begins anew. After
enough failures the drafter is not called again. What `Speculator` does for the whole, this does for each source of a join.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from operator import lt

from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Needs, Silent, Terms
from forerun.engine.drafters.failures import Failures


class Guarded:
    """`needs`: of the drafter; kept when it is silenced, since its layers and pools stay with it."""

    def __init__(self, drafter: Drafter, name: str) -> None:
        self.needs: Needs = drafter.needs
        self.failures = Failures(name)
        self._drafter = drafter
        self._cold: set[int] = set()

    def absorb(self, commit: Commit) -> None:
        if self._cold:
            self._cold.difference_update(row for row, start in zip(commit.rows, commit.start) if not start)
            commit = commit.without(self._cold)
        if not commit.rows:
            return
        try:
            self._drafter.absorb(commit)
        except Exception as error:
            self._fail("absorb", commit.rows, error)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        """No guesses for rows that are cold, or when it fails. What is no draft is a failure as well."""
        if not self._cold:
            return self._ask(rows, budget, terms)
        found = [Draft.none()] * len(rows)
        places = [i for i, row in enumerate(rows) if row not in self._cold]
        if places:
            for i, draft in zip(places, self._ask([rows[i] for i in places], [budget[i] for i in places], terms)):
                found[i] = draft
        return found

    def _ask(self, rows: list[int], budget: list[int], terms: Terms) -> list[Draft]:
        try:
            drafts = self._drafter.propose(rows, budget, terms)
            if len(drafts) != len(rows):
                raise ValueError(f"{len(drafts)} drafts for {len(rows)} rows")
            for draft in drafts:
                _check(draft)
        except Exception as error:
            self._fail("propose", rows, error)
            return [Draft.none()] * len(rows)
        return drafts

    def behind(self, rows: Sequence[int]) -> list[int]:
        """Tokens of each of these rows that it has yet to read: none of rows that are cold, which it never will."""
        try:
            return [0 if row in self._cold else self._drafter.needs.behind(row) for row in rows]
        except Exception as error:
            self._fail("propose", rows, error)
            return [0] * len(rows)

    def forget(self, rows: list[int]) -> None:
        """Of cold rows as well: of what it failed to be told it may have kept a part."""
        self._cold.difference_update(rows)
        try:
            self._drafter.forget(rows)
        except Exception as error:
            self._fail("forget", [], error)

    def news(self) -> list[str]:
        """What went wrong since this was asked last, one line each."""
        return self.failures.news()

    def _fail(self, verb: str, rows: Sequence[int], error: Exception) -> None:
        self.failures.add(verb, rows, error)
        self._cold.update(rows)
        if self.failures.enough:
            self._drafter = Silent()  # and what it held goes with it
            self._cold.clear()


def _check(draft: Draft) -> None:
    """ValueError for what is no tree, or has confidences that are no numbers."""
    count = draft.count
    if not count == len(draft.parent) == len(draft.confidence) == len(draft.probe):
        raise ValueError("the lists of a draft have different lengths")
    if isnan(sum(draft.confidence)):
        raise ValueError("a confidence of a draft is not a number")
    if not (all(map(lt, draft.parent, range(count))) and min(draft.parent, default=-1) >= -1):
        raise ValueError("a node of a draft comes before its parent")
