"""Who gives way when pages run out or the worker dies, and that its stream goes on as if nothing had happened."""

from __future__ import annotations

import pytest

from forerun.router.entry import Entry
from forerun.router.policy import Policy
from tests.router.driver import Case, Driver, prompt, roomy
from tests.router.worker_model import ready


def tight() -> tuple[Driver, Case, Case]:
    """Two that fit together at first and not at the end."""
    driver = roomy(pages=8, policy=Policy(watermark=0.0))
    return driver, driver.steady(prompt(8), 20), driver.steady(prompt(8, 9), 20)


def test_the_youngest_gives_way_and_comes_back_token_exact() -> None:
    driver, old, young = tight()
    driver.drain()
    driver.check()
    assert old.sequence.preemptions == 0
    assert young.sequence.preemptions >= 1
    assert len(young.stream.got) == 20


def test_preemption_with_a_step_on_the_way_loses_no_token() -> None:
    driver, _, young = tight()
    while not driver.preemptions:
        driver.plan()
        if len(driver.plans) == 2 and not driver.preemptions:
            driver.land()
    assert driver.plans, "it was driven out while a step of its was on the way"
    had = len(young.stream.got)
    driver.land()
    assert len(young.stream.got) == had + 1
    driver.drain()
    driver.check()


def test_a_dead_worker_s_sequences_go_on_token_exact() -> None:
    driver = roomy(rows=3)
    cases = [driver.steady(prompt(7, 40 * i), 12) for i in range(5)]
    for _ in range(6):
        driver.turn()
    driver.plan()
    driver.restart()
    assert repr(driver.scheduler) == "0 running, 5 waiting, 0/64 pages"
    assert driver.scheduler.load().cached_pages == 0
    plan = driver.plan()
    assert plan is not None
    assert [admit.tokens for admit in plan.admit] == [case.sequence.tokens for case in cases[:3]]
    assert all(admit.computed == 0 for admit in plan.admit)
    driver.drain()
    driver.check()
    assert all(len(case.stream.got) == 12 for case in cases)


def test_a_smaller_successor_fails_what_it_cannot_hold() -> None:
    driver = roomy(pages=16)
    long, short = driver.steady(prompt(30), 10), driver.steady(prompt(5, 9), 3)
    driver.turn()
    driver.plans.clear()
    driver.ready = ready(rows=4, pages=4, vocab=97)
    driver.scheduler.restart(driver.ready)
    driver.tell()
    assert long.stream.failure is not None
    assert long.stream.failure.status == 500
    driver.worker = type(driver.worker)(driver.ready)
    driver.drain()
    driver.check()
    assert short.stream.reason == "length"


def test_a_restart_puts_right_what_an_exception_left_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = roomy()
    cases = [driver.steady(prompt(9, i), 12) for i in range(4)]
    for _ in range(3):
        driver.turn()

    def broken(entry: Entry) -> None:
        raise RuntimeError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(driver.scheduler._ledger, "landed", broken)
        patch.setattr(driver.scheduler._ledger, "leave", broken)
        with pytest.raises(RuntimeError):
            for _ in range(9):
                driver.turn()
        with pytest.raises(RuntimeError):
            driver.scheduler.cancel(cases[3].sequence)
    driver.restart()
    driver.drain()
    driver.check()
    assert [len(case.stream.got) for case in cases[:3]] == [12, 12, 12]
