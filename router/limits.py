"""The limits in force: what the operator asked for and what the worker can do, in TGI's words and by TGI's rules."""

from __future__ import annotations

import dataclasses

from forerun.config import Config
from forerun.messages import Ready
from forerun.router.policy import Policy


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Known once the worker is ready; the same for as long as the server runs."""

    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    max_batch_prefill_tokens: int
    max_concurrent_requests: int


class LimitError(ValueError):
    """The operator asked for limits that contradict each other or what the worker can do. The message says what to change."""


def resolve(config: Config, ready: Ready) -> Limits:
    """What was not asked for follows from the model and the pool; a sequence longer than the model allows is never promised. Raises
    LimitError."""
    asked, batching = config.limits, config.batching
    room = ready.pages * ready.page_tokens
    pool = min(batching.max_batch_total_tokens or room, room)
    total = min(asked.max_total_tokens or pool, ready.max_tokens)
    if total > pool:
        raise _error(
            f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {total} and {pool}, which is what the memory holds. "
            "Lower max_total_tokens or give the worker more memory"
        )
    if total < 2:
        raise _error(f"there is room for {total} tokens: a prompt and an answer need 2. Give the worker more memory")
    top = asked.max_input_tokens or total - 1
    if top >= total:
        raise _error(
            f"`max_input_tokens` must be < `max_total_tokens`. Given: {top} and {total}, which is what model and memory allow. "
            "Lower max_input_tokens"
        )
    prefill = min(batching.max_batch_prefill_tokens or ready.max_step_tokens, ready.max_step_tokens)
    return Limits(top, total, pool, prefill, asked.max_concurrent_requests)


def policy(config: Config, limits: Limits) -> Policy:
    """How the scheduler is to batch under these limits."""
    batching = config.batching
    return Policy(
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        max_batch_total_tokens=limits.max_batch_total_tokens,
        max_batch_size=batching.max_batch_size,
        max_total_tokens=limits.max_total_tokens,
        max_waiting_tokens=batching.max_waiting_tokens,
        waiting_served_ratio=batching.waiting_served_ratio,
        max_inter_token_ms=batching.max_inter_token_ms,
        prefix_caching=batching.prefix_caching,
    )


def _error(message: str) -> LimitError:
    return LimitError(f"Argument validation error: {message}")
