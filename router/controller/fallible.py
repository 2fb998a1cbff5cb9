"""A controller that may fail: what it raises costs guesses, and never a plan or a token.

What it is asked and told stands between the queue and the worker, and between a result and the streams. So it is not trusted: after a fault
another one begins where it began, and after enough of them nobody guesses any more. A fault is forgotten after many steps without another.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from forerun.messages import Profile
from forerun.router.guesses import Allowance, Controller, Round, Snapshot, no_guesses
from forerun.router.request import Sequence

MOST_FAILURES = 3
FORGOTTEN = 100_000
"""steps without a fault after which those before do not count any more"""

_log = structlog.get_logger("forerun.router")


class Fallible:
    """`make`: a new one, which knows what steps cost as far as the worker said so when it was ready. What `make` raises goes through where
    this is made, and not later."""

    def __init__(self, make: Callable[[], Controller]) -> None:
        self._make = make
        self._controller = make()
        self._profile: Profile | None = None
        self._failures = 0
        self._well = 0
        """steps since the last fault"""

    def __call__(self, sequences: list[Sequence], prompts: int = 0) -> Allowance | None:
        try:
            return self._controller(sequences, prompts)
        except Exception:
            self._begin_anew()
            return None

    def landed(self, sequence: Sequence, nodes: int, accepted: int, expected: float) -> None:
        try:
            self._controller.landed(sequence, nodes, accepted, expected)
        except Exception:
            self._begin_anew()

    def stepped(self, round: Round) -> None:
        self._well += 1
        try:
            self._controller.stepped(round)
        except Exception:
            self._begin_anew()

    def forget(self, sequence: Sequence) -> None:
        try:
            self._controller.forget(sequence)
        except Exception:
            self._begin_anew()

    def profiled(self, profile: Profile) -> None:
        self._profile = profile
        try:
            self._controller.profiled(profile)
        except Exception:
            self._profile = None
            self._begin_anew()

    def snapshot(self) -> Snapshot:
        try:
            return self._controller.snapshot()
        except Exception:
            self._begin_anew()
            return no_guesses.snapshot()

    def _begin_anew(self) -> None:
        """Called where the fault is caught."""
        self._failures = 1 if self._well > FORGOTTEN else self._failures + 1
        self._well = 0
        enough = self._failures >= MOST_FAILURES
        after = "without guesses until the server is restarted" if enough else "and another one begins"
        _log.exception(f"The controller of guesses failed: please report this. Answers go on, {after}")
        try:
            self._controller = no_guesses if enough else self._make()
            if self._profile is not None:
                self._controller.profiled(self._profile)
        except Exception:
            _log.exception("No other controller could be made: answers go on without guesses until the server is restarted")
            self._controller = no_guesses
