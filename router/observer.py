"""What the batcher tells whoever keeps the metrics. A protocol: the router does not know Prometheus."""

from __future__ import annotations

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step of a replica. `seconds`: from the moment the worker could start it to its result."""

    seconds: float
    prefill_tokens: int
    """known tokens fed by rows that are still behind (chunks), all rows together"""
    decode_rows: int
    """rows that fed one known token"""
    rows: int
    nodes: int
    tokens: int
    """committed"""
    drafted: int
    accepted: int
    draft_us: int
    verify_us: int
    asked: int = 0
    """rows that might have had guesses"""
    drafts: int = 0
    """rows that had some"""
    accepted_at: list[int] = dataclasses.field(default_factory=list)
    """rows whose guess was accepted, 1, 2, … steps behind the newest token"""
    sources: list[tuple[list[int], list[int]]] = dataclasses.field(default_factory=list)
    """for each drafter: guesses that were verified and guesses that were accepted, by depth as well"""
    draft_failures: int = 0
    """times that the drafter raised"""
    late_positions: int = 0
    late_answers: int = 0
    unserved: int = 0
    """what the drafter had to do without"""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The state of a replica after a turn of its loop. Page counts are of its pool; `cached_pages` hold prefixes that nobody uses now."""

    waiting: int
    running: int
    used_pages: int
    cached_pages: int
    total_pages: int
    page_tokens: int


class Observer(Protocol):
    """All methods are called on the event loop, must be quick and must not raise."""

    def load(self, load: Load) -> None: ...
    def admitted(self, sequences: int) -> None:
        """A plan admitted this many sequences that were waiting."""
        ...

    def stepped(self, report: StepReport) -> None: ...
    def prefix(self, hit_tokens: int, prompt_tokens: int) -> None: ...
    def preempted(self, sequences: int) -> None: ...
    def worker_died(self, reason: str) -> None: ...
