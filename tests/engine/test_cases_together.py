"""Whatever comes in whatever order, through the real scheduler into the real engine: every stream hears bit for bit what it would have
heard alone and without guesses, and everything is given back. Once for every registered drafter, and for one that means harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from forerun.engine.drafters.draft import Drafter
from forerun.engine.drafters.failures import MOST_FAILURES
from forerun.router.policy import Policy
from tests.engine.test_identity import ALL as KINDS
from tests.engine.test_registered import ALL, opened
from tests.engine.together import Gambler, Rogue, Together, answer_of
from tests.router.test_scheduler_machine import check_books

pytestmark = pytest.mark.timeout(600)

PROMPTS = ((1, 21), (1, 40), (2, 5), (3, 33), (4, 1))
"""(seed, length): some begin alike, some are shorter than a page"""


class Machine(RuleBasedStateMachine):
    open_drafter: ClassVar[Callable[[int, torch.dtype], Drafter]]
    harmless: ClassVar[bool] = True

    @initialize(
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        rows=st.integers(1, 16),
        pages=st.integers(4, 16),
        step_tokens=st.sampled_from([16, 33, 64]),
        prefill=st.sampled_from([1, 7, 64]),
        caching=st.booleans(),
        most=st.sampled_from([1, 4, 12]),
        seed=st.integers(0, 1 << 16),
    )
    def open(self, dtype: torch.dtype, rows: int, pages: int, most: int, seed: int, **limits: Any) -> None:
        policy = Policy(
            max_batch_size=rows,
            max_batch_total_tokens=pages * 16,
            max_step_tokens=limits["step_tokens"],
            max_batch_prefill_tokens=limits["prefill"],
            prefix_caching=limits["caching"],
            watermark=0.0,
        )
        opener = type(self).open_drafter
        self.driver = Together(lambda: opener(seed, dtype), dtype, policy, Gambler(seed, most))

    @rule(
        kind=st.sampled_from(sorted(KINDS)),
        prompt=st.sampled_from(PROMPTS),
        limit=st.sampled_from([24, 24, 1, 2, 9]),
        stop=st.sampled_from([None, None, 3, 8]),
        more=st.fixed_dictionaries(
            {
                "stop_after": st.sampled_from([None, None, None, 1, 5]),
                "echo": st.sampled_from([False, False, False, True]),
                "speculate": st.sampled_from([None, None, None, 0, 2]),
                "priority": st.sampled_from([0, 0, 1]),
            }
        ),
        copies=st.integers(1, 3),
        apart=st.booleans(),
    )
    def add(self, kind: str, prompt: tuple[int, int], limit: int, stop: int | None, more: dict[str, Any], copies: int, apart: bool) -> None:
        """`copies`: the same request again, or `apart`: several answers to one, each with dice of its own."""
        for copy in range(copies):
            self.driver.ask(kind, *prompt, limit=limit, stop=stop, choice=copy * apart, **more)

    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.plans)
    @rule()
    def land(self) -> None:
        self.driver.land()

    @rule(turns=st.integers(1, 9))
    def turns(self, turns: int) -> None:
        for _ in range(turns):
            self.driver.turn()

    @precondition(lambda self: self.driver.streams)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        self.driver.scheduler.cancel(self.driver.streams[which % len(self.driver.streams)][0])

    @rule()
    def restart(self) -> None:
        self.driver.restart()

    @invariant()
    def books(self) -> None:
        if hasattr(self, "driver"):
            check_books(self.driver)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.close()
            failures = self.driver.bridge.engine._speculator.failures.count
            assert failures == 0 or not self.harmless
            assert failures >= MOST_FAILURES or not self.driver.drafter.rows, "it remembers a row that is gone"  # type: ignore[attr-defined]


def run(machine: type[Machine], examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
        ),
    )


@pytest.mark.parametrize("spec", ALL)
def test_every_drafter(spec: str) -> None:
    run(type("Registered", (Machine,), {"open_drafter": staticmethod(lambda seed, dtype: opened(spec))}), 8)


def answers(dtype: torch.dtype) -> list[list[int]]:
    return [(whole := answer_of(kind, *prompt, dtype)).prompt + whole.tokens for kind in KINDS for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("lazy", "failing"),
    [(True, False), (False, True), pytest.param(True, True, marks=pytest.mark.slow), pytest.param(False, False, marks=pytest.mark.slow)],
)
def test_a_drafter_that_means_harm(lazy: bool, failing: bool) -> None:
    opener = staticmethod(lambda seed, dtype: Rogue(seed, answers(dtype), lazy, failing))
    run(type("Harmful", (Machine,), {"open_drafter": opener, "harmless": False}), 15)
