"""What a client asked, and the streams of tokens that answer it.

Owned by the front. `Request` never changes after validation; `Sequence` is mutated by the scheduler alone; a `TokenStream` is how
the server hears of tokens. Knows nothing of text, sockets or devices.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import msgspec

from forerun.messages import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A validated request. `tokens`: the prompt's ids after truncation. Times are monotonic seconds (`time.monotonic`)."""

    id: str
    tokens: list[int]
    params: SamplingParams
    arrived: float
    deadline: float | None = None
    """monotonic time after which the answer is worthless; checked in the queue and at every step"""
    priority: int = 0
    """higher = sooner: the order of admission (`entry.py`), who gives way, and what its guesses weigh"""
    tenant: str = ""
    """prefix pages are shared only inside one tenant (salt of the page hashes)"""
    adapter: str | None = None
    cache: bool = True
    """may use and fill the prefix cache; off when every prompt position must be computed (prompt log-probabilities)"""
    speculate: int | None = None
    """most guesses a step; None = the server decides"""


class Run(msgspec.Struct, frozen=True, gc=False):
    """Tokens that became true together, oldest first. `logprobs` and `top` are parallel to `tokens` or empty. `tokens` is empty in a
    run that only brings prompt log-probabilities of a chunk. (A msgspec struct because one is made for every row of every step.)"""

    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    prompt_logprobs: list[float]
    drafted: int = 0
    accepted: int = 0
    asked: int = 0
    """guesses it might have had"""
    expected: float = 0.0
    """guesses that the worker believed to be accepted"""
    prompt_top: list[list[tuple[int, float]]] = []
    """parallel to `prompt_logprobs`, or empty"""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence ended without finishing. `kind` is TGI's error_type (generation, incomplete_generation, overloaded, …)."""

    message: str
    kind: str
    status: int


class TokenStream(Protocol):
    """Where a sequence's tokens go. All three are called on the event loop, synchronously, in order; nothing is called after `end`
    or `fail`, nor after the sequence was cancelled. None of them may block or raise."""

    def tokens(self, run: Run) -> bool:
        """New tokens. Returns True when a text rule ends the sequence here (a stop string); the caller then cancels it and calls
        nothing more."""
        ...

    def end(self, reason: str) -> None:
        """The worker ended it by a token rule: "length" or "eos_token". Comes after the `tokens` call with the last token."""
        ...

    def fail(self, failure: Failure) -> None: ...


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens (`best_of` makes several of one request).

    Invariant: `tokens[:prompt_tokens]` is the request's prompt, the rest what the worker emitted so far. The scheduler alone writes it.
    """

    request: Request
    params: SamplingParams
    stream: TokenStream
    tokens: list[int]
    queued_at: float = 0.0
    started_at: float = 0.0
    """first time it was put in a plan; 0 = never"""
    first_token_at: float = 0.0
    prefix_hit_tokens: int = 0
    """prompt tokens found in the prefix cache at its first admission"""
    preemptions: int = 0
    cancelled: bool = False
    """nobody wants it any more: its stream must hear nothing"""

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.params.prompt_tokens
