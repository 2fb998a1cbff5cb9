"""A full table lives through everything at once, once for each registered drafter and for some that mean harm: all kinds of requests,
several answers to one, one to sixteen rows, prompts in parts beside guesses of any length, preemptions, prefix hits, requests given up,
workers restarted. Every stream hears, bit for bit, what it would have heard alone and without guesses; everything is given back; and that
all of it really happened is asserted too, for a test in which it did not would prove nothing.

The random machines (`test_cases_together.py`) look for what nobody thought of; this one leaves nothing out.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

from forerun.engine.drafters.draft import Draft, Drafter
from forerun.messages import StepPlan, StepResult
from forerun.router.policy import Policy
from forerun.router.request import Run, Sequence
from tests.engine.test_identity import ALL as KINDS
from tests.engine.test_identity import eos, illegal, twins, wrong
from tests.engine.test_registered import ALL, opened
from tests.engine.tiny import LONGEST, VOCAB
from tests.engine.together import Gambler, Rogue, Together, answer_of
from tests.router.test_scheduler_machine import check_books

pytestmark = pytest.mark.timeout(600)

ROWS = 16
MOST = 8
"""guesses of a row"""
PROMPTS = ((1, 37), (2, 5))
"""(seed, length): the first has two whole pages, so that another request with it finds them"""
CROWDED, TIGHT, ROOMY = 10, 21, 40
"""Pages: three sequences, or more, that grow take each other's places; or sixteen of them run at once."""


@dataclasses.dataclass
class Seen:
    """What happened. `sizes`: rows of a step; `allowed`: most guesses of a row."""

    sizes: set[int] = dataclasses.field(default_factory=set)
    allowed: set[int] = dataclasses.field(default_factory=set)
    drafted: int = 0
    mixed: int = 0
    """steps with guesses beside a part of a prompt"""
    accepted: int = 0
    given_up: int = 0
    restarts: int = 0
    ruled: set[str] = dataclasses.field(default_factory=set)
    """what happened to sequences that follow a grammar"""

    def step(self, plan: StepPlan, result: StepResult) -> None:
        self.sizes.add(len(plan.feed))
        self.allowed |= {feed.guess for feed in plan.feed}
        self.drafted += sum(emit.drafted for emit in result.emit)
        self.accepted += sum(emit.accepted for emit in result.emit)
        self.mixed += result.nodes > 0 and any(feed.known > 1 and not feed.guess for feed in plan.feed)


class Crowd(Together):
    """`choices`: answers to one request, each with dice of its own."""

    def __init__(self, open_drafter: Callable[[], Drafter], pages: int, dtype: torch.dtype) -> None:
        policy = Policy(
            max_batch_size=ROWS, max_batch_total_tokens=16 * pages, max_step_tokens=40, max_batch_prefill_tokens=16, watermark=0
        )
        super().__init__(open_drafter, dtype, policy, Gambler(3, MOST))
        self.seen = Seen()
        self.dice = random.Random(7)

    def land(self) -> StepResult:
        plan, result = self.plans[0], super().land()
        self.seen.step(plan, result)
        check_books(self)
        return result

    def request(self, kind: str, prompt: tuple[int, int], choices: int, **more: object) -> None:
        for choice in range(choices):
            sequence, _ = self.ask(kind, *prompt, choice=choice, **more)  # type: ignore[arg-type]
            self._note(sequence, "several", choices > 1)

    @property
    def halfway(self) -> list[Sequence]:
        return [sequence for sequence, stream in self.streams if stream.heard and not stream.over and not sequence.cancelled]

    def give_up(self) -> None:
        """Somebody who has heard something already leaves, and what he asked for is not heard to its end."""
        if self.halfway:
            ruled = [sequence for sequence in self.halfway if sequence.params.grammar]
            leaving = self.dice.choice(ruled if ruled and self.seen.given_up % 2 else self.halfway)
            self.scheduler.cancel(leaving)
            self.seen.given_up += 1
            self._note(leaving, "given up")

    def restart(self) -> None:
        for sequence in self.halfway:
            self._note(sequence, "restarted")
        super().restart()
        self.seen.restarts += 1

    def tokens(self, sequence: Sequence, run: Run) -> None:
        super().tokens(sequence, run)
        self._note(sequence, "guesses held", run.accepted > 0)

    def admitted(self, sequence: Sequence, hit_tokens: int) -> None:
        super().admitted(sequence, hit_tokens)
        self._note(sequence, "a prefix was found", hit_tokens > 0)

    def preempted(self, sequence: Sequence) -> None:
        super().preempted(sequence)
        self._note(sequence, "preempted")

    def _note(self, sequence: Sequence, what: str, happened: bool = True) -> None:
        if happened and sequence.params.grammar:
            self.seen.ruled.add(what)


def live(crowd: Crowd) -> None:
    """One after the other comes, until the table is full and others wait; accidents meanwhile; then they become fewer again."""
    kinds, dice = [*list(KINDS)[::3], *list(KINDS)[1::3], *list(KINDS)[2::3]], crowd.dice  # so that like ones do not come together
    for turn, kind in enumerate([*kinds, *kinds]):
        limit, stop, stop_after = dice.choice([(24, None, None), (24, 8, None), (19, None, None), (24, None, 7)])
        more = {"echo": turn % 5 == 2, "speculate": dice.choice([None, None, None, 2]), "priority": dice.choice([0, 0, 1])}
        crowd.request(kind, PROMPTS[turn % 2], 1 + turn % 3, limit=limit, stop=stop, stop_after=stop_after, **more)
        crowd.turn()
        if turn % 6 == 5:
            crowd.give_up()
        if turn in (12, 23):
            crowd.restart()
    crowd.close()


class Adversary(Rogue):
    """Knows every answer, and makes one thing of it."""

    def __init__(self, make: Callable[[list[int], int], Draft], dtype: torch.dtype) -> None:
        self._make = make
        whole = [answer_of(kind, *prompt, dtype, choice=choice) for kind in KINDS for prompt in PROMPTS for choice in range(3)]
        super().__init__(0, [each.prompt + each.tokens for each in whole])

    def _draft(self, future: list[int], most: int) -> Draft:
        return self._make(future, most)


def beyond(future: list[int], most: int) -> Draft:
    """More than may be, and deeper than the answer can get."""
    return Draft.chain((future + [0] * LONGEST)[:LONGEST])


ADVERSARIES = {"always wrong": wrong, "always the end": eos(VOCAB - 1), "illegal": illegal, "twins": twins, "beyond": beyond}


@pytest.mark.parametrize(("pages", "dtype"), [(TIGHT, torch.float32), (ROOMY, torch.bfloat16)], ids=["tight", "roomy"])
@pytest.mark.parametrize("spec", ALL)
def test_every_registered_drafter(spec: str, pages: int, dtype: torch.dtype) -> None:
    crowd = Crowd(lambda: opened(spec), pages, dtype)
    live(crowd)
    everything_happened(crowd)
    assert crowd.seen.accepted > 0 or not crowd.seen.drafted, "some guesses held, of a drafter that had any in so short a time"
    assert crowd.bridge.engine._speculator.failures.count == 0


@pytest.mark.parametrize("spec", ALL)
def test_rows_with_grammars_take_each_others_place(spec: str) -> None:
    """Each reads again what it had generated, behind a prefix that was found, and goes on where its grammar stood."""
    crowd = Crowd(lambda: opened(spec), CROWDED, torch.float32)
    for kind in KINDS:
        for prompt in PROMPTS:
            if "grammar" in KINDS[kind]:
                crowd.request(kind, prompt, 2)
    crowd.close()
    assert crowd.seen.ruled >= {"several", "preempted", "a prefix was found", "guesses held"}
    assert not crowd.drafter.rows  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", ADVERSARIES.values(), ids=ADVERSARIES)
def test_drafters_that_mean_harm(make: Callable[[list[int], int], Draft]) -> None:
    crowd = Crowd(lambda: Adversary(make, torch.float32), TIGHT, torch.float32)
    live(crowd)
    everything_happened(crowd)
    assert crowd.seen.drafted > 100
    assert (crowd.seen.accepted > 100) == (make in (illegal, twins, beyond)), "of these a part is right"


def everything_happened(crowd: Crowd) -> None:
    seen = crowd.seen
    assert 1 in seen.sizes and len(seen.sizes) > 11
    assert ROWS in seen.sizes or crowd.preemptions > 2, "as many as there may be, or they get in each other's way"
    assert {stream.reason for _, stream in crowd.streams} == {"length", "eos_token", ""}
    assert seen.given_up > 2 and seen.restarts == 2
    assert sum(hit > 0 for hit in crowd.hits.values()) > 5
    assert len(seen.allowed) > 4 and seen.mixed > 5
    assert seen.ruled >= {"several", "a prefix was found", "guesses held", "given up", "restarted"}
    assert not crowd.drafter.rows, "it remembers a row that is gone"  # type: ignore[attr-defined]
