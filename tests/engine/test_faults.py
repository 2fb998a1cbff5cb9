"""A fault anywhere inside a drafter, for every registered one, by being registered: no answer changes, nothing else goes wrong for it, and
who comes afterwards is guessed for as before."""

from __future__ import annotations

import dis
import logging
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from forerun.engine.drafters import draft
from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Terms
from forerun.engine.drafters.failures import MOST_FAILURES
from forerun.messages import Emit, Feed
from tests.engine.test_identity import fresh, truth
from tests.engine.test_registered import ALL, Watched, open_any
from tests.engine.tiny import Front, Sequence_, tiny_engine

HOME = str(Path(draft.__file__).parent)
REQUESTS = (("greedy", 1, 21), ("temperature", 2, 5), ("greedy", 3, 40))
LIKELY = 400
"""calls among which a fault is drawn: fewer than the first draft of the smallest drafter and the telling before it take"""


class Fault(Exception):
    """Nobody expects it."""


class Faulty:
    """A drafter in which the calls of these numbers raise, of all calls that functions of the drafters' package get or make."""

    def __init__(self, drafter: Drafter, *faults: int) -> None:
        self.needs = drafter.needs
        self.raised = 0
        self._drafter, self._faults, self._calls = drafter, set(faults), 0

    def absorb(self, commit: Commit) -> None:
        self._watched(self._drafter.absorb, commit)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        drafts: list[Draft] = self._watched(self._drafter.propose, rows, budget, terms)
        return drafts

    def forget(self, rows: list[int]) -> None:
        self._watched(self._drafter.forget, rows)

    def _watched(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        if self.raised == len(self._faults):
            return verb(*arguments)

        def look(frame: FrameType, event: str, _: Any) -> None:
            if event.endswith("call") and frame.f_code.co_filename.startswith(HOME) and not (event == "call" and closing(frame)):
                self._calls += 1
                if self._calls in self._faults:
                    self.raised += 1
                    raise Fault(frame.f_code.co_qualname)

        before = sys.getprofile()
        sys.setprofile(look)
        try:
            return verb(*arguments)
        finally:
            sys.setprofile(before)


def closing(frame: FrameType) -> bool:
    """Of a frame of which a call is reported: it is a generator that is being closed. Nobody can catch what is raised there."""
    return frame.f_code.co_code[frame.f_lasti] != dis.opmap["RESUME"]


class Shy(Front):
    """`shy`: guesses in every third step, and then for one row: what becomes true is told late, and of some rows nobody asks."""

    shy = False
    turn = 0

    def step(self, shares: dict[int, int] | None = None, guess: int = 0, price: float = 0.0) -> list[Emit]:
        self.turn += 1
        return super().step(shares, 0 if self.shy and self.turn % 3 else guess, price)

    def _send(self, feeds: list[Feed], fed: list[tuple[Sequence_, int]], **terms: Any) -> list[Emit]:
        return super()._send(feeds, fed, **terms | {"budget": min(8, terms["budget"])} if self.shy else terms)


def served(front: Front) -> int:
    """Some requests at once. How many guesses were accepted."""
    answers = [truth(*request) for request in REQUESTS]
    sequences = [fresh(answer) for answer in answers]
    for sequence in sequences:
        front.admit(sequence)
    front.run(guess=8)
    assert [sequence.answer for sequence in sequences] == [answer.answer for answer in answers]
    return sum(sequence.accepted for sequence in sequences)


def survived(spec: str, faults: list[int], caplog: pytest.LogCaptureFixture, shy: bool = False) -> None:
    caplog.clear()
    watched = Watched(open_any(spec))
    faulty = Faulty(watched, *faults)
    front = Shy(tiny_engine(faulty))
    front.shy = shy
    served(front)
    front.shy = False
    for _ in range(8):  # a drafter of few calls comes to its faults later
        if faulty.raised < len(faults):
            served(front)
    assert served(front) > 0, "rows that begin anew are guessed for"
    assert faulty.raised == len(faults)
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == len(faults), "nothing follows from a fault"
    assert not watched.rows


@pytest.mark.parametrize("spec", ALL)
def test_a_fault_costs_guesses_and_nothing_else(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    survived(spec, [random.Random(spec).randrange(1, LIKELY)], caplog)


def test_only_a_generator_that_is_left_is_closing() -> None:
    def numbers() -> Iterator[int]:
        yield from (number for number in range(2))

    seen: list[bool] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: seen.append(closing(frame)) if event == "call" else None)
    try:
        assert list(numbers()) == [0, 1]
        whole, seen[:] = list(seen), []
        assert next(numbers()) == 0
    finally:
        sys.setprofile(before)
    assert whole and not any(whole)
    assert seen == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("spec", ALL)
def test_faults_at_many_places(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    dice = random.Random(spec)
    for _ in range(40):
        survived(spec, dice.sample(range(1, LIKELY), MOST_FAILURES - 1), caplog)
        survived(spec, [dice.randrange(1, LIKELY)], caplog, shy=True)


def test_what_was_about_to_be_computed_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model fails in its first forward, over a prompt whose pages another sequence then shares. One that is the target is right
    about every token, unless it reads entries that nobody wrote."""
    drafter = open_any("model={itself}")
    front = Front(tiny_engine(drafter))
    first, second = (fresh(truth(*REQUESTS[-1])) for _ in range(2))
    front.admit(first)
    with monkeypatch.context() as broken:
        broken.setattr(drafter, "_run", None)
        while len(first.tokens) < 2:
            front.step(guess=8)
    front.admit(second, first.pages[:2])
    front.run(guess=8)
    assert first.answer == second.answer and not first.accepted
    assert second.accepted + 5 >= len(second.tokens), "at most every ninth token and the first were no guesses"
