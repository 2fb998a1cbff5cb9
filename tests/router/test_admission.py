"""Who gets in when not everybody fits."""

from __future__ import annotations

from forerun.router.policy import Policy
from tests.router.driver import Case, Driver, prompt, roomy
from tests.router.worker_model import ready


def pool_of(positions: int, rows: int = 16, **policy: float) -> Driver:
    return Driver(ready(rows, positions // 4, 4, vocab=97, max_step_tokens=2048), Policy(watermark=0.0, **policy))  # type: ignore[arg-type]


def until(driver: Driver, case: Case, most: int = 3000) -> int:
    """Turns until it is over."""
    for turn in range(most):
        if case.stream.over:
            return turn
        driver.turn()
    raise AssertionError(f"not over after {most} turns: {driver.scheduler}")


def test_first_come_first_served() -> None:
    driver = roomy(rows=2)
    cases = [driver.steady(prompt(5, 40 * i), 3) for i in range(7)]
    driver.drain()
    assert driver.order == [case.sequence for case in cases]


def test_two_that_do_not_fit_together_run_one_after_the_other() -> None:
    """D01: pool of 1,000, two prompts of 700 at once."""
    driver = pool_of(1000)
    first, second = driver.add(prompt(700, 1), 20), driver.add(prompt(700, 2), 20)
    driver.turn()
    assert repr(driver.scheduler) == "1 running, 1 waiting, 176/250 pages"
    driver.drain()
    driver.check()
    assert first.stream.reason
    assert second.stream.reason
    assert driver.preemptions == 0, "the second was never let in too early"


def test_many_of_the_greatest_length_stay_inside_the_memory() -> None:
    """D13: eight prompts of maximum length at once."""
    driver = pool_of(400)
    cases = [driver.add(prompt(380, 11 * i), 20) for i in range(8)]
    driver.drain()
    driver.check()
    assert all(case.stream.reason for case in cases)


def nearly_full() -> tuple[Driver, Case, Case, list[Case]]:
    """D03: a pool of 1,000 nearly full, one request of 600, then ten of 20."""
    driver = pool_of(1000)
    running = driver.steady(prompt(500, 1), 200)
    driver.turn()
    driver.turn()
    big = driver.add(prompt(600, 2), 20)
    small = [driver.steady(prompt(20, 100 + i), 5) for i in range(10)]
    return driver, running, big, small


def test_small_ones_do_not_wait_for_the_big_one_in_front_of_them() -> None:
    driver, running, big, small = nearly_full()
    for case in small:
        until(driver, case)
    assert not running.stream.over
    assert driver.scheduler.load().waiting == 1
    driver.drain()
    driver.check()
    assert big.stream.reason


def test_a_stream_of_small_ones_does_not_starve_the_big_one() -> None:
    driver, running, big, _ = nearly_full()
    until(driver, running)
    more = 0
    while big.sequence not in driver.hits:
        driver.steady(prompt(20, 1000 + more), 5)
        driver.turn()
        more += 1
        assert more < 50, "small ones kept coming and the big one never got in"
    driver.drain()
    driver.check()


def test_overtakers_delay_the_big_one_once_at_most() -> None:
    """Small ones keep coming, before and after the end of what held the pool: the big one starts one small one's life after that."""
    driver = pool_of(1000, rows=64)
    running = driver.steady(prompt(600, 1), 60)
    driver.turn()
    big = driver.add(prompt(800, 2), 20)
    after = 0
    for i in range(500):
        driver.steady(prompt(8, 500 + i), 30)
        driver.turn()
        after += running.stream.over
        if big.sequence in driver.hits:
            break
    assert after <= 33
    assert len(driver.hits) > 25, "small ones passed all the time"
    for case in driver.cases[500:]:
        driver.scheduler.cancel(case.sequence)
    driver.drain()
    driver.check()


def test_small_ones_pass_even_one_that_needs_the_whole_pool() -> None:
    driver = pool_of(400)
    running = driver.steady(prompt(200, 1), 60)
    driver.turn()
    big = driver.add(prompt(390, 2), 10)
    turns = 0
    while not big.stream.over:
        driver.steady(prompt(20, 100 + turns), 5)
        driver.turn()
        turns += 1
        assert turns < 100
        if not running.stream.over and turns > 10:
            assert driver.cases[turns - 8].stream.over, "they do not wait for the big one"
    driver.drain()
    driver.check()


def test_a_short_prompt_slips_in_beside_a_long_one() -> None:
    driver = roomy(pages=256, max_step_tokens=32)
    long = driver.add(prompt(800, 3), 1)
    driver.turn()
    short = driver.steady(prompt(20, 9), 2)
    assert until(driver, short) < 8
    assert not long.stream.over
    driver.drain()
    driver.check()


def test_long_prompts_are_computed_one_after_the_other() -> None:
    driver = roomy(pages=256, max_step_tokens=32)
    first, second = driver.steady(prompt(300, 3), 2), driver.steady(prompt(300, 5), 2)
    assert until(driver, first) < 14, "as if it were alone"
    until(driver, second)
    driver.check()


def test_short_prompts_do_not_starve_a_long_one() -> None:
    driver = roomy(pages=256, rows=4, max_step_tokens=32)
    long = driver.steady(prompt(600, 3), 2)
    driver.turn()
    turns = 0
    while not long.stream.over:
        if driver.scheduler.load().waiting < 4:
            driver.steady(prompt(30, 700 + turns), 1)
        driver.turn()
        turns += 1
        assert turns < 60, "half of every step is for the oldest"
    driver.drain()
    driver.check()


def test_a_waiting_long_prompt_is_let_in_while_short_ones_keep_coming() -> None:
    driver = roomy(pages=512, rows=6, max_step_tokens=32)
    driver.steady(prompt(400, 3), 2)
    driver.turn()
    second = driver.steady(prompt(400, 5), 2)
    turns = 0
    while not second.stream.over:
        driver.steady(prompt(30, 900 + turns), 1)
        driver.turn()
        turns += 1
        assert turns < 150
    for case in driver.cases:
        driver.scheduler.cancel(case.sequence)


def test_who_was_driven_out_comes_back_before_the_new() -> None:
    driver = pool_of(64)
    driver.steady(prompt(16, 1), 30)
    young = driver.steady(prompt(16, 2), 30)
    while not driver.preemptions:
        driver.turn()
    new = driver.steady(prompt(40, 3), 3)
    assert until(driver, young) >= 0
    assert not new.stream.over
    driver.drain()
    driver.check()


def test_the_reserve_keeps_the_running_from_being_driven_out_at_once() -> None:
    """Pool of 25 pages, one sequence growing: the second would fit to the last page, and is let in when there is room to grow."""
    outcome = {}
    for watermark in (0.0, 0.2):
        driver = Driver(ready(4, 25, 4, vocab=97), Policy(watermark=watermark))
        driver.steady(prompt(40, 1), 20)
        driver.turn()
        driver.steady(prompt(50, 2), 4)
        driver.drain()
        driver.check()
        outcome[watermark] = driver.preemptions
    assert outcome[0.0] >= outcome[0.2] == 0


def test_tenants_share_the_rows() -> None:
    driver = roomy(rows=2)
    for i in range(6):
        driver.steady(prompt(5, 30 * i), 6, tenant="loud")
    driver.turn()
    quiet = driver.steady(prompt(5, 777), 6, tenant="quiet")
    driver.drain()
    driver.check()
    assert driver.order.index(quiet.sequence) <= 3


def test_a_big_request_keeps_its_place_whatever_other_tenants_do() -> None:
    driver = pool_of(400)
    running = driver.steady(prompt(200, 1), 40, tenant="a")
    driver.turn()
    big = driver.add(prompt(380, 2), 10, tenant="a")
    driver.turn()
    for i in range(200):
        driver.steady(prompt(60, 300 + i), 30, tenant="b")
        driver.turn()
        if big.sequence in driver.hits:
            break
    assert big.sequence in driver.hits, driver.scheduler
    assert running.stream.over
    for case in driver.cases:
        driver.scheduler.cancel(case.sequence)
