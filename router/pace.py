"""How many prompt tokens a step may carry while streams are running, so that no stream pauses for longer than the bound; and what prompts
leave of it to guesses.

A step is taken to cost `base + rows · per_row`, whatever its rows are: newest tokens of streams, prompt tokens or guesses. Both start from
what the worker measured when it warmed up and follow what steps really take, because a step of sixteen rows with long contexts costs more
than the one row that was measured. Guesses are among the rows so that their time is not taken for that of prompts, which would then get
less and less of a step. A step of streams alone says what the base is; any other only that all of it is dearer or cheaper, so that a base
once wrong does not stay so where every step has prompts. Knows no clock: it is told.
"""

from __future__ import annotations

from forerun.messages import Ready
from forerun.router.standstill import Standstill

_DEFAULT_SECONDS = 0.1
_DEFAULT_STEPS = 4
_WEIGHT = 1 / 16
"""share of a new measurement in the running average"""
_FULL_ROWS = 64
"""A step with fewer rows beside its streams' own says little about the cost of a row: it counts by their number."""
_SWING = 4.0
"""the cost of a row stays within this factor of what was measured at start"""
_SURPRISE = 2.0
"""a step counts as no longer or shorter than expected by more than this factor"""
_LEAST = 8
"""tokens a step always has for prompts: a bound that cannot be kept must not stop them"""


class Pace:
    def __init__(self, ready: Ready, max_inter_token_ms: float | None) -> None:
        plain, full = ready.step_seconds
        self._known = plain > 0 and full > plain
        self._most = ready.max_step_tokens
        self._start = self._per_row = (full - plain) / max(ready.max_step_tokens - 1, 1)
        self._base = max(0.0, plain - self._per_row)
        self._plain = plain
        self._standstill = Standstill()
        self._bound = None if max_inter_token_ms is None else max_inter_token_ms / 1e3

    @property
    def bound_seconds(self) -> float:
        """The pause that prompts may cause. By default some steps of one stream: as they are now, where the worker started beside others on
        a busy machine, and as they were then, where contexts that many streams read have become part of the base."""
        if self._bound is not None:
            return self._bound
        return max(_DEFAULT_SECONDS, _DEFAULT_STEPS * min(self._plain, self._base + self._per_row))

    def allowance(self, streams: int) -> int:
        """Prompt tokens that fit in a step which also carries the newest token of so many streams."""
        return max(_LEAST, self.room(streams))

    def room(self, rows: int) -> int:
        """Rows that fit in a step beside so many."""
        if not self._known:
            return self._most
        return max(0, min(self._most, int((self.bound_seconds - self._base) / self._per_row) - rows))

    def stepped(self, streams: int, more: int, seconds: float) -> None:
        """The forward of a step took `seconds`: the newest tokens of so many `streams` and `more` rows, prompt tokens and guesses."""
        if not self._known or seconds <= 0:
            return
        expected = self._base + (streams + more) * self._per_row
        if self._standstill.saw(seconds, expected):  # a process that is stopped now and then cannot choke prefill
            return
        surprise = min(max(seconds / expected, 1 / _SURPRISE), _SURPRISE) - 1
        if more == 0:
            self._base = max(0.0, self._base + _WEIGHT * surprise * expected)
            return
        scale = 1 + _WEIGHT * min(1.0, more / _FULL_ROWS) * surprise
        self._base *= scale
        self._per_row = min(max(self._per_row * scale, self._start / _SWING), self._start * _SWING)
