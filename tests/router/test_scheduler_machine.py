"""Whatever comes in whatever order: every plan is legal, every stream is exact, everything ends, everything is given back."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forerun.router.guesses import Allowance
from forerun.router.policy import Policy
from forerun.router.request import Sequence
from tests.router.driver import Driver
from tests.router.worker_model import ready


class Gambler:
    """Random guesses: any budget must be safe."""

    def __init__(self, seed: int, most: int) -> None:
        self._random = random.Random(seed)
        self._most = most

    def __call__(self, sequences: list[Sequence], prompts: int = 0) -> Allowance | None:
        if not self._most or self._random.random() < 0.2:
            return None
        guess = [self._random.randint(0, self._most) for _ in sequences]
        return Allowance(guess, sum(guess), 0.1)

    def accept(self, guess: int) -> int:
        return self._random.randint(0, guess)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        rows=st.integers(1, 5),
        pages=st.integers(2, 14),
        page_tokens=st.sampled_from([1, 2, 4]),
        step_tokens=st.integers(1, 24),
        prefill=st.one_of(st.none(), st.integers(1, 16)),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        caching=st.booleans(),
        guesses=st.sampled_from([0, 0, 1, 5]),
        seed=st.integers(0, 1 << 16),
    )
    def open(self, rows: int, pages: int, page_tokens: int, step_tokens: int, seed: int, guesses: int, **policy: Any) -> None:
        gambler = Gambler(seed, guesses)
        offer = ready(rows, pages, page_tokens, max_step_tokens=step_tokens, step_seconds=(0.01, 0.05))
        self.driver = Driver(
            offer,
            Policy(
                max_batch_prefill_tokens=policy["prefill"],
                watermark=policy["watermark"],
                prefix_caching=policy["caching"],
                max_inter_token_ms=20,
            ),
            gambler,
            gambler.accept,
        )

    @rule(
        stem=st.integers(0, 2),
        stem_tokens=st.integers(0, 12),
        tail=st.lists(st.integers(1, 2), min_size=1, max_size=9),
        new=st.integers(1, 12),
        data=st.fixed_dictionaries(
            {
                "seed": st.integers(0, 1),
                "tenant": st.sampled_from(["", "", "other"]),
                "cache": st.sampled_from([True, True, False]),
                "wait": st.one_of(st.none(), st.none(), st.integers(0, 8)),
                "stop_after": st.one_of(st.none(), st.none(), st.integers(1, 5)),
                "echo": st.sampled_from([False, False, False, True]),
                "speculate": st.sampled_from([None, None, 0, 2]),
                "priority": st.sampled_from([0, 0, 1, -1]),
            }
        ),
    )
    def add(self, stem: int, stem_tokens: int, tail: list[int], new: int, data: dict[str, Any]) -> None:
        longest = self.driver.scheduler.sizes.longest
        # Prompts that often start alike.
        prompt = ([stem + 1] * stem_tokens + tail)[: longest - 1]
        self.driver.add(
            prompt,
            min(new, longest - len(prompt)),
            seed=data["seed"],
            stop_after=data["stop_after"],
            tenant=data["tenant"],
            cache=data["cache"] and not data["echo"],
            prompt_logprobs=data["echo"],
            speculate=data["speculate"],
            priority=data["priority"],
            deadline=None if data["wait"] is None else self.driver.now + data["wait"],
        )

    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.plans)
    @rule()
    def land(self) -> None:
        self.driver.land()

    @rule(turns=st.integers(1, 6))
    def turns(self, turns: int) -> None:
        for _ in range(turns):
            self.driver.turn()

    @precondition(lambda self: self.driver.cases)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        case = self.driver.cases[which % len(self.driver.cases)]
        self.driver.scheduler.cancel(case.sequence)

    @rule(seconds=st.integers(1, 4))
    def time(self, seconds: int) -> None:
        self.driver.now += seconds

    @rule()
    def restart(self) -> None:
        self.driver.restart()

    @precondition(lambda self: self.driver.worker.rows)
    @rule(which=st.integers(0, 100))
    def row_error(self, which: int) -> None:
        rows = sorted(self.driver.worker.rows)
        self.driver.worker.fail_row = rows[which % len(rows)]

    @invariant()
    def exact(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    @invariant()
    def books(self) -> None:
        if hasattr(self, "driver"):
            check_books(self.driver)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.drain()
        driver.check()
        for case in driver.cases:
            assert case.stream.over or case.sequence.cancelled, "a sequence was forgotten"
        check_books(driver)
        load = driver.scheduler.load()
        assert load.used_pages == 0
        assert driver.scheduler._rows.free == driver.scheduler.sizes.rows
        assert not driver.scheduler._ledger.prefix._promises


def check_books(driver: Driver) -> None:
    """Counts agree with who holds what, and the index with the rows that use it."""
    scheduler = driver.scheduler
    ledger, running = scheduler._ledger, scheduler._rows.running
    pool, prefix = ledger.pool, ledger.prefix
    held = [page for entry in running for page in entry.pages]
    assert all(pool.count(page) == held.count(page) for page in range(pool.total))
    assert pool.used == len(set(held))
    assert pool.idle == sum(pool.count(page) == 0 for page in prefix._nodes)
    assert pool.free + pool.idle + pool.used == pool.total
    assert scheduler.outstanding == len(driver.plans) <= 2
    assert [entry.rank for entry in running] == sorted(entry.rank for entry in running)
    numbers = [entry.number for entry in running]
    assert len(set(numbers)) == len(numbers)
    for entry in running:
        path = []
        node = entry.tip
        while node is not None and node.parent is not None:
            path.append(node.page)
            node = node.parent
        assert path[::-1] == entry.pages[: entry.published]
        assert entry.computed <= len(entry.sequence.tokens)
    assert len(running) + len(scheduler._waiting) == len(scheduler._entries)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
