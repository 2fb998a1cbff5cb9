"""The one seam through which guesses enter a plan: who may have how many of them in the next step, and what they have to bring.

The scheduler asks once a step, for the rows that are about to decode, and lowers the answer where a rule says so (the request's own
limit, the end of the answer, pages). A `Budget` that learns is a `Controller`: it also hears what became of its guesses.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from forerun.messages import Profile
from forerun.router.request import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Allowance:
    """`guess[i]`: most guessed nodes of sequence i. `total`: nodes of the step in all. `price`: survival below which no node is worth its
    cost, whatever the others are. Which ones are, `toll[n]` decides, the tokens that n + 1 guesses must bring together, and `entry_price`,
    what a node must bring on top for each position that it attends to. Without tolls guesses are free."""

    guess: list[int]
    total: int
    price: float = 0.0
    toll: list[float] = dataclasses.field(default_factory=list)
    entry_price: float = 0.0
    discount: float = 1.0
    """share of the tolls that guesses must bring where none would be kept otherwise"""
    goodput: float = 0.0
    """tokens a second that the replica makes: what its time is worth to whoever may spend some"""
    weights: list[float] = dataclasses.field(default_factory=list)
    """what a guessed token of each sequence is worth; empty = one"""


class Budget(Protocol):
    def __call__(self, sequences: list[Sequence], prompts: int = 0) -> Allowance | None:
        """For `sequences`, which decode in the next step beside so many tokens of `prompts`. None: no guesses in this step, which then
        costs exactly a plain one."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """A finished step. `roots`: rows that decoded, each of which brings a token without any guess. `rows`: of the forward, `nodes` of them
    guesses and `prefill_tokens` prompt. `asked`: sequences that might have guesses, `drafts`: that had some. `read`: tokens of all that
    decoded. `tokens`: committed. `draft_seconds` are part of `seconds`, `chosen_seconds` of these: what the drafter
    need not have spent, and weighs by itself. `caught_up`: tokens that the drafter read, beyond the usual; −1: all that it was not asked
    about before."""

    roots: int
    rows: int
    nodes: int
    asked: int
    read: int
    tokens: int
    seconds: float
    draft_seconds: float
    prefill_tokens: int = 0
    drafts: int = 0
    chosen_seconds: float = 0.0
    caught_up: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """A breaker: "closed", "half-open" or "open". `openings`: how often it opened. `wait`: rounds of its last wait. `short`: plain rounds
    that guesses have lost so far, as long as it is not believed."""

    state: str
    openings: int
    wait: int
    short: float


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """What a controller thinks, for metrics and people. `budget`, `asked`, `price`: nodes, sequences and λ (of a node, on average) of the
    last step that had guesses. `guessing`: whether the last step might have some. `gain`: tokens a second over those of plain decoding, as
    expected. `expected_seconds`, `measured_seconds`, `surprise`: of the last step that was learned from (it had no prompts, and was not out
    of all proportion), and their ratio as steps have it.
    `drift`: how much slower (> 1) the machine is than when it was profiled. `guards`: by least number of sequences. `costs`: (rows, seconds
    by the profile, seconds now) of plain steps of one sequence without context; `contexts` as in the profile. `jump`: how much longer steps
    with guesses take than their rows say. `drafting[n]`: seconds of drafting for n sequences. `honesty`: guesses that hold for each that
    the worker expects to. `earned`: mean accepted guesses of an ask. `rough`: the worker has not measured yet what steps cost, it had a
    first look."""

    controller: str
    guessing: bool = False
    budget: int = 0
    asked: int = 0
    price: float = 0.0
    gain: float = 1.0
    expected_seconds: float = 0.0
    measured_seconds: float = 0.0
    surprise: float = 1.0
    drift: float = 1.0
    guards: dict[int, Guard] = dataclasses.field(default_factory=dict)
    costs: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    contexts: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    jump: float = 1.0
    drafting: list[float] = dataclasses.field(default_factory=list)
    honesty: float = 1.0
    earned: float = 0.0
    rough: bool = False


class Controller(Budget, Protocol):
    """A budget that learns. Hears of steps in the order in which they ended."""

    def landed(self, sequence: Sequence, nodes: int, accepted: int, expected: float) -> None:
        """What came of asking about this sequence: so many nodes were verified, and so many held. `expected`: how many the worker believed
        would; 0 = it does not say."""
        ...

    def stepped(self, round: Round) -> None: ...
    def forget(self, sequence: Sequence) -> None:
        """It has ended. Idempotent."""
        ...

    def profiled(self, profile: Profile) -> None:
        """The worker has measured what steps cost: instead of what it said at first."""
        ...

    def snapshot(self) -> Snapshot: ...


class NoGuesses:
    """`--speculator none`."""

    def __call__(self, sequences: list[Sequence], prompts: int = 0) -> Allowance | None:
        return None

    def landed(self, sequence: Sequence, nodes: int, accepted: int, expected: float) -> None:
        return None

    def stepped(self, round: Round) -> None:
        return None

    def forget(self, sequence: Sequence) -> None:
        return None

    def profiled(self, profile: Profile) -> None:
        return None

    def snapshot(self) -> Snapshot:
        return Snapshot("none")


no_guesses = NoGuesses()
