"""What becomes true while nobody asks a drafter of features, kept as it comes and told later, many steps at once.

    step       1        2        3       …            asked, or enough
    commits   [a b c]  [a b c]  [a b c]  …    ─▶     one commit: a's tokens and features of all these steps, b's, c's

A step without guesses should cost what it costs without a drafter, and what has to be done for a row is the same for one token as for
sixty. Rows that begin, and prompts, are told at once: what they find in the pool changes, and what they bring is large. Knows nothing of
what is done with a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from forerun.engine.drafters.draft import Commit

STEPS = 64
"""commits that may be put off"""
ROWS = 1024
"""feature rows whose memory those may hold, rows of the same steps that came to nothing included"""


class Ear:
    """`learn`: is told in the end. A commit that continues rows continues them where the last one ended. Where telling fails,
    it was about more rows than anybody told of or asked for: `lose` hears of them all, and they are not told of until they begin anew."""

    def __init__(self, learn: Callable[[Commit], None], lose: Callable[[Sequence[int]], None]) -> None:
        self._learn, self._lose = learn, lose
        self._lost: set[int] = set()
        self._heard: list[Commit] = []
        self._held = 0

    def hear(self, commit: Commit) -> None:
        if self._lost:
            self._lost.difference_update(row for row, start in zip(commit.rows, commit.start) if not start)
            commit = commit.without(self._lost)
            if not commit.rows:
                return
        held = self._rows_held(commit)
        if held is None or 0 in commit.start:
            self.heed()
            self._tell([commit])
            return
        if self._held + held > ROWS or len(self._heard) == STEPS:
            self.heed()
        self._heard.append(commit)
        self._held += held

    def heed(self) -> None:
        """Tell all that was put off."""
        if self._heard:
            heard, self._heard, self._held = self._heard, [], 0
            self._tell(heard)

    def lose(self, rows: Collection[int]) -> None:
        """What is known of these rows is not to be trusted."""
        self._lost.update(rows)
        self._lose(sorted(rows))

    def _tell(self, commits: Sequence[Commit]) -> None:
        try:
            self._learn(commits[0] if len(commits) == 1 else joined(commits))
        except Exception:
            self.lose({row for commit in commits for row in commit.rows})
            raise

    def _rows_held(self, commit: Commit) -> int | None:
        """Feature rows of the step that the commit keeps in memory; None for one that is not to be put off: without a feature row for each
        of its tokens, or too large."""
        features = commit.features
        if not features or any(part.shape[0] != len(tokens) for part, tokens in zip(features, commit.tokens)):
            return None
        held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in features}
        rows = sum(held.values()) // max(1, features[0].stride(0) * features[0].itemsize)
        return rows if rows <= ROWS // 4 else None


def joined(commits: Sequence[Commit]) -> Commit:
    """One commit that says what these say, in which no row begins: each row once, where it was first named."""
    places: dict[int, list[tuple[Commit, int]]] = {}
    for commit in commits:
        for i, number in enumerate(commit.rows):
            places.setdefault(number, []).append((commit, i))
    firsts = [told[0] for told in places.values()]
    tokens = [[token for commit, i in told for token in commit.tokens[i]] for told in places.values()]
    newest = [told[-1][0].next[told[-1][1]] for told in places.values()]
    features = [torch.cat([commit.features[i] for commit, i in told if commit.features]) for told in places.values()]
    prompt = [commit.prompt[i] for commit, i in firsts if commit.prompt]
    scope = [commit.scope[i] for commit, i in firsts if commit.scope]
    params = [commit.params[i] for commit, i in firsts if commit.params]
    start = [commit.start[i] for commit, i in firsts]
    return Commit(list(places), start, tokens, newest, features, prompt or None, scope or None, params or None)
