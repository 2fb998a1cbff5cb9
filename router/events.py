"""What a step changed, told to whoever runs the scheduler.

Owns the shapes of the news and nothing else. Each event tells itself to a `Listener` (double dispatch), so that nobody has to ask
an event what it is. Events are in the order in which things became true; those of one sequence are in the order of its stream.

A listener that cancels a sequence while it is being told (a stop string) may still be told of that sequence's end by an event
that was on the way: `sequence.cancelled` says so, and the stream must then hear nothing more.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from forerun.router.request import Failure, Run, Sequence


class Tally(msgspec.Struct, frozen=True):
    """A finished step in numbers. `prefill_tokens`: known tokens fed by rows that were still behind. `decode_rows`: rows that fed one known
    token to get the next. `tokens`: committed. `drafted`, `accepted`: guesses. Of the decoding rows that brought something: `roots` counts
    them, `asked` those that might guess, `drafts` those that did, `read` their tokens before the
    step. `accepted_at[d]`: rows whose guess d + 1 steps behind the root was accepted."""

    step: int
    prefill_tokens: int
    decode_rows: int
    tokens: int
    drafted: int
    accepted: int
    roots: int = 0
    asked: int = 0
    read: int = 0
    accepted_at: list[int] = []
    drafts: int = 0


class Listener(Protocol):
    """Whoever wants to hear of events. Methods are called synchronously, in order."""

    def tokens(self, sequence: Sequence, run: Run) -> None:
        """`run.tokens` is empty where a chunk brought prompt log-probabilities only."""
        ...

    def ended(self, sequence: Sequence, reason: str) -> None: ...
    def failed(self, sequence: Sequence, failure: Failure) -> None: ...
    def admitted(self, sequence: Sequence, hit_tokens: int) -> None:
        """It left the queue. `hit_tokens`: tokens whose KV was found in the prefix cache; also after a preemption."""
        ...

    def preempted(self, sequence: Sequence) -> None: ...
    def stepped(self, tally: Tally) -> None: ...


class Tokens(msgspec.Struct, frozen=True, gc=False):
    sequence: Sequence
    run: Run

    def tell(self, listener: Listener) -> None:
        listener.tokens(self.sequence, self.run)


class Ended(msgspec.Struct, frozen=True):
    """Comes right after the `Tokens` with the last token."""

    sequence: Sequence
    reason: str

    def tell(self, listener: Listener) -> None:
        listener.ended(self.sequence, self.reason)


class Failed(msgspec.Struct, frozen=True):
    sequence: Sequence
    failure: Failure

    def tell(self, listener: Listener) -> None:
        listener.failed(self.sequence, self.failure)


class Admitted(msgspec.Struct, frozen=True):
    sequence: Sequence
    hit_tokens: int

    def tell(self, listener: Listener) -> None:
        listener.admitted(self.sequence, self.hit_tokens)


class Preempted(msgspec.Struct, frozen=True):
    sequence: Sequence

    def tell(self, listener: Listener) -> None:
        listener.preempted(self.sequence)


class Stepped(msgspec.Struct, frozen=True):
    """The last event of every `apply`."""

    tally: Tally

    def tell(self, listener: Listener) -> None:
        listener.stepped(self.tally)


Event = Tokens | Ended | Failed | Admitted | Preempted | Stepped
