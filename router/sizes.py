"""How large things are: the worker's limits and the operator's, whichever is lower."""

from __future__ import annotations

import dataclasses
import math

from forerun.messages import Ready
from forerun.router.policy import Policy


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Effective limits of one replica. `longest`: prompt and answer of the longest sequence that is taken; `pages` always hold it, which is
    why the sequence that ranks first can always go on (no deadlock)."""

    rows: int
    pages: int
    page_tokens: int
    longest: int
    step_tokens: int
    prefill_tokens: int
    nodes: int
    """most guesses of a row"""
    reserve: int
    """pages that admission leaves free while others run"""

    @staticmethod
    def of(ready: Ready, policy: Policy) -> Sizes:
        """Raises ValueError, with the cure, where the limits leave nothing to work with."""
        asked = policy.max_batch_total_tokens
        pages = _lower(ready.pages, None if asked is None else -(-asked // ready.page_tokens))
        if pages < 1:
            raise ValueError(f"a pool of {pages} pages holds no sequence: raise max_batch_total_tokens or give the worker more memory")
        step_tokens = _lower(ready.max_step_tokens, policy.max_step_tokens)
        rows = min(_lower(ready.rows, policy.max_batch_size), step_tokens)
        if rows < 1 or step_tokens < 1:
            raise ValueError("a step needs at least one row and one token: raise max_batch_size or max_step_tokens")
        return Sizes(
            rows=rows,
            pages=pages,
            page_tokens=ready.page_tokens,
            longest=min(_lower(ready.max_tokens, policy.max_total_tokens), pages * ready.page_tokens),
            step_tokens=step_tokens,
            prefill_tokens=_lower(step_tokens, policy.max_batch_prefill_tokens),
            nodes=ready.max_nodes,
            reserve=min(math.ceil(pages * policy.watermark), pages - 1),
        )

    def pages_of(self, positions: int) -> int:
        return -(-positions // self.page_tokens)


def _lower(limit: int, wanted: int | None) -> int:
    return limit if wanted is None else min(limit, wanted)
