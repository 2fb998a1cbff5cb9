"""What the operator may decide about batching, in TGI's words.

Numbers only: what follows from them together with a worker's `Ready` is worked out once, in `sizes.py` and `pace.py`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """None means that the worker's own limit holds. A limit above the worker's is lowered to it."""

    max_batch_prefill_tokens: int | None = None
    """prompt tokens of one step, all rows together"""
    max_batch_total_tokens: int | None = None
    """positions with KV at any time, all rows and cached prefixes together"""
    max_batch_size: int | None = None
    """sequences running at once"""
    max_step_tokens: int | None = None
    """known tokens of one step, prompt chunks and decode rows together"""
    max_total_tokens: int | None = None
    """longest sequence, prompt and answer"""
    max_waiting_tokens: int = 20
    """see `waiting_served_ratio`; 0 = prompts get their full share of every step"""
    waiting_served_ratio: float = 0.3
    """While fewer prompts wait than this times the running streams, prompts get half of their share of a step, for at most
    `max_waiting_tokens` steps in a row. TGI's knobs weigh a prompt's wait against the running streams by *postponing* the prefill; with
    chunked prefill TGI ignores them. Here they keep the trade-off, but a prompt always moves."""
    max_inter_token_ms: float | None = None
    """longest step while streams are running; None = 100 ms, or four plain steps where that is more"""
    prefix_caching: bool = True
    watermark: float = 0.01
    """share of the pages that admission leaves free for rows that are already running, so that they are not preempted at once"""
