"""How many prompt tokens a step may carry while streams are running, so that no stream pauses for longer than the bound.

A step is taken to cost `base + tokens · per_token`. Both start from what the worker measured when it warmed up and follow what steps really
take, because a step of sixteen rows with long contexts costs more than the one row that was measured. Knows no clock: it is told.
"""

from __future__ import annotations

from forerun.messages import Ready

_DEFAULT_SECONDS = 0.1
_DEFAULT_STEPS = 4
_WEIGHT = 1 / 16
"""share of a new measurement in the running average"""
_SWING = 4.0
"""estimates stay within this factor of what was measured at start: a single hiccup cannot choke prefill"""
_LEAST = 8
"""tokens a step always has for prompts: a bound that cannot be kept must not stop them"""


class Pace:
    def __init__(self, ready: Ready, max_inter_token_ms: float | None) -> None:
        plain, full = ready.step_seconds
        self._known = plain > 0 and full > plain
        self._most = ready.max_step_tokens
        self._start = (full - plain) / max(ready.max_step_tokens - 1, 1)
        self._base = plain
        self._per_token = self._start
        self.bound_seconds = max(_DEFAULT_SECONDS, _DEFAULT_STEPS * plain) if max_inter_token_ms is None else max_inter_token_ms / 1e3

    def allowance(self) -> int:
        """Prompt tokens that fit in a step which also carries streams."""
        if not self._known:
            return self._most
        return max(_LEAST, min(self._most, int((self.bound_seconds - self._base) / self._per_token)))

    def stepped(self, prefill_tokens: int, seconds: float) -> None:
        """A step took `seconds`, of which the worker knows; `prefill_tokens` 0 = it only carried streams."""
        if not self._known or seconds <= 0:
            return
        if prefill_tokens == 0:
            self._base += _WEIGHT * (seconds - self._base)
            return
        measured = (seconds - self._base) / prefill_tokens
        measured = min(max(measured, self._start / _SWING), self._start * _SWING)
        # A small chunk says little about the cost of a token: it counts by its size.
        self._per_token += _WEIGHT * min(1.0, prefill_tokens / 64) * (measured - self._per_token)
