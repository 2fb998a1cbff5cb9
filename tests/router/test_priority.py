"""Priority: a head start of so many seconds, which orders admission and spares from giving way, and starves nobody."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.router.entry import HEAD_START_SECONDS
from forerun.router.policy import Policy
from tests.router.driver import Case, Driver, prompt, roomy


def full(rows: int = 1) -> tuple[Driver, list[Case]]:
    """All rows are taken for a while."""
    driver = roomy(rows=rows)
    running = [driver.steady(prompt(5, 900 + i), 12) for i in range(rows)]
    driver.turn()
    driver.turn()
    return driver, running


def test_the_urgent_go_first_and_equals_in_order_of_arrival() -> None:
    """D12: slots full, a low-priority and then a high-priority request."""
    driver, _ = full()
    cases = [driver.steady(prompt(5, 40 * i), 3, priority=p) for i, p in enumerate((0, -1, 2, 0, 2, 1))]
    driver.drain()
    assert driver.order[1:] == [cases[i].sequence for i in (2, 4, 5, 0, 3, 1)]


def test_a_stream_of_urgent_ones_delays_for_as_long_as_their_head_start_and_no_longer() -> None:
    driver, _ = full()
    low = driver.steady(prompt(5, 1), 3)
    came = driver.now
    number = 0
    while low.sequence not in driver.hits:
        number += 1
        driver.steady(prompt(5, 10 + number), 3, priority=3)
        driver.now += 0.5
        for _ in range(2):
            driver.turn()
        assert driver.now < came + 200
    assert driver.now - came >= 3 * HEAD_START_SECONDS
    later = [case for case in driver.cases if case.sequence.queued_at > came + 3 * HEAD_START_SECONDS]
    assert not any(case.sequence in driver.hits for case in later), "these came too late to go past it"
    driver.drain()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-100, 100), st.sampled_from([0.0, 0.3, 9.9, 10.0, 400.0]), st.integers(0, 3)), max_size=14), st.data()
)
def test_who_is_overtaken_and_for_how_long(arrivals: list[tuple[int, float, int]], data: st.DataObject) -> None:
    """Equal requests but for priority and time. Whoever came later and was admitted earlier ranks higher by at least the time between."""
    driver = roomy(rows=data.draw(st.integers(1, 3)))
    for number, (priority, pause, turns) in enumerate(arrivals):
        driver.steady(prompt(5, 40 * number), 3, priority=priority)
        driver.now += pause
        for _ in range(turns):
            driver.turn()
    driver.drain()
    driver.check()
    place = {sequence: i for i, sequence in enumerate(driver.order)}
    cases = [case.sequence for case in driver.cases]
    for i, early in enumerate(cases):
        for late in cases[i + 1 :]:
            if place[late] < place[early]:
                assert late.queued_at - early.queued_at <= HEAD_START_SECONDS * (late.priority - early.priority)
                assert late.priority > early.priority


def test_the_least_urgent_gives_way() -> None:
    """Two that fit together at first and not at the end: the older one yields to the urgent one, and comes back."""
    driver = roomy(pages=8, policy=Policy(watermark=0.0))
    low, high = driver.steady(prompt(8), 20, priority=-1), driver.steady(prompt(8, 9), 20)
    driver.drain()
    driver.check()
    assert (low.sequence.preemptions >= 1, high.sequence.preemptions) == (True, 0)
    assert len(low.stream.got) == len(high.stream.got) == 20


def test_an_urgent_one_that_needs_many_pages_is_not_passed_by_small_ones() -> None:
    driver = roomy(pages=20, rows=16, policy=Policy(watermark=0.0))
    running = driver.steady(prompt(30, 1), 20)
    driver.turn()
    small = [driver.steady(prompt(8, 50 + i), 20) for i in range(4)]
    big = driver.steady(prompt(60, 2), 10, priority=1)
    driver.drain()
    driver.check()
    order = [driver.order.index(case.sequence) for case in (running, big, *small)]
    assert order[1] < max(order[2:]), "it did not wait for all of those that came before it"
    assert big.sequence.preemptions == 0


def test_it_comes_back_at_its_place_after_a_death() -> None:
    driver = roomy(rows=2)
    low = [driver.steady(prompt(5, 40 * i), 6) for i in range(2)]
    driver.turn()
    driver.turn()
    high = driver.steady(prompt(5, 300), 6, priority=5)
    driver.restart()
    plan = driver.plan()
    assert plan is not None
    assert [admit.tokens for admit in plan.admit] == [high.sequence.tokens, low[0].sequence.tokens]
    driver.drain()
    driver.check()


def test_priority_is_no_reprieve() -> None:
    """A deadline passes whatever the priority, and the one that waits for it does not hold up the others."""
    driver, _ = full()
    urgent = driver.steady(prompt(5, 1), 3, priority=100, deadline=driver.now + 1)
    other = driver.steady(prompt(5, 2), 3)
    driver.now += 2
    driver.drain()
    assert urgent.stream.failure is not None and urgent.stream.failure.kind == "deadline_exceeded"
    assert other.stream.reason == "length"


def test_of_tenants_with_as_many_running_the_first_come_is_next() -> None:
    driver, _ = full()
    quiet = [driver.steady(prompt(5, 500 + i), 3, priority=-100, tenant="quiet") for i in range(3)]
    loud = [driver.steady(prompt(5, 40 * i), 3, priority=i, tenant="loud") for i in range(3)]
    driver.drain()
    assert driver.order[1:] == [case.sequence for case in (*quiet, *reversed(loud))]


def test_priority_does_not_buy_the_turn_of_another_tenant() -> None:
    driver, _ = full(rows=2)
    loud = [driver.steady(prompt(5, 40 * i), 3, priority=100, tenant="loud") for i in range(6)]
    quiet = [driver.steady(prompt(5, 500 + i), 3, priority=-100, tenant="quiet") for i in range(2)]
    driver.drain()
    places = [driver.order.index(case.sequence) for case in quiet]
    assert max(places) < 2 + 2 * len(quiet), f"every other turn is theirs: {places}"
    assert all(case.stream.reason for case in loud)
