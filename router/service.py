"""The face the server sees: one router with its phase, limits, permits and replicas.

Everything here runs on the event loop and returns at once; only `drain` waits.
"""

from __future__ import annotations

import dataclasses
import enum


class Phase(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The limits in force, in TGI's words; known once the worker is ready."""

    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    max_batch_prefill_tokens: int
    max_concurrent_requests: int


class Refused(Exception):
    """A request that is not taken: 429 with Retry-After. `kind` is TGI's error_type."""

    def __init__(self, message: str, kind: str = "overloaded", retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_seconds = retry_after_seconds
