"""How often a drafter failed, and what people are told of it. Whose rows go cold is the business of who called it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger(__name__)

MOST_FAILURES = 3


class Failures:
    """`name`: of the drafter among several; none where there is one."""

    def __init__(self, name: str = "") -> None:
        self._whose = f"the drafter {name}" if name else "the drafter"
        self._news: list[str] = []
        self.count = 0

    @property
    def enough(self) -> bool:
        """It is not to be called again."""
        return self.count >= MOST_FAILURES

    def add(self, verb: str, rows: Sequence[int], error: Exception) -> None:
        self.count += 1
        after = "it is not asked again" if self.enough else f"no more of its guesses for rows {list(rows)}"
        log.error("%s failed in %s (failure %d): %s", self._whose, verb, self.count, after, exc_info=error)
        lines = str(error).splitlines()
        self._news.append(f"{self._whose}: {type(error).__name__} in {verb}: {lines[0] if lines else ''}; {after}")

    def news(self) -> list[str]:
        """What went wrong since this was asked last, one line each."""
        news, self._news = self._news, []
        return news
