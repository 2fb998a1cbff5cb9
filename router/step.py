"""A plan that was sent and whose result is not there yet."""

from __future__ import annotations

import msgspec

from forerun.router.entry import Entry


class Fed(msgspec.Struct, frozen=True, gc=False):
    """Who held a row in this step, and what it fed. `picks`: the step brings it 1 … 1 + `guess` tokens; otherwise it is a chunk."""

    entry: Entry
    row: int
    known: int
    guess: int
    picks: bool


class Step:
    __slots__ = ("decode_rows", "fed", "number", "prefill_tokens")

    def __init__(self, number: int) -> None:
        self.number = number
        self.fed: list[Fed] = []
        self.decode_rows = 0
        self.prefill_tokens = 0
