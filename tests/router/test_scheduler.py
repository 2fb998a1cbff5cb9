"""What the batcher promises, one promise at a time. The machine test holds them all together under random use."""

from __future__ import annotations

import pytest

from forerun.messages import StepPlan, StepResult
from forerun.router.events import Admitted, Stepped
from forerun.router.policy import Policy
from forerun.router.scheduler import DEADLINE
from tests.router.driver import known, prompt, roomy
from tests.router.worker_model import answer


def test_a_request_from_the_first_plan_to_the_last_token() -> None:
    driver = roomy()
    case = driver.steady(prompt(6), 3)
    assert repr(driver.scheduler) == "0 running, 1 waiting, 0/64 pages"
    plan = driver.plan()
    assert plan is not None
    assert (plan.admit[0].tokens, plan.admit[0].computed, known(plan)) == (case.prompt, 0, [6])
    assert repr(driver.scheduler) == "1 running, 0 waiting, 2/64 pages"
    driver.drain()
    driver.check()
    assert case.stream.reason == "length"
    assert len(case.stream.got) == 3
    assert repr(driver.scheduler) == "0 running, 0 waiting, 0/64 pages"
    assert driver.scheduler.load().cached_pages == 2
    assert [tally.prefill_tokens for tally in driver.tallies] == [6, 0, 0]
    assert [tally.decode_rows for tally in driver.tallies] == [0, 1, 1]
    assert case.sequence.first_token_at > 0


def test_two_plans_may_be_on_the_way_and_no_more() -> None:
    driver = roomy()
    driver.steady(prompt(6), 9)
    assert known(driver.plan()) == [6]
    assert known(driver.plan()) == [1], "the token it feeds is known to the worker alone"
    assert driver.plan() is None
    driver.land()
    assert known(driver.plan()) == [1]


def test_nothing_is_planned_beyond_the_last_token() -> None:
    driver = roomy()
    driver.steady(prompt(6), 2)
    assert driver.plan() is not None
    assert driver.plan() is not None
    driver.land()
    assert driver.plan() is None
    driver.land()
    assert driver.scheduler.load().running == 0


def test_the_feed_of_a_row_that_ended_on_the_way_comes_to_nothing() -> None:
    driver = roomy()
    start = next(i for i in range(1, 999) if answer(prompt(6, i), 0, 9, 97)[0] == [0])
    case = driver.add(prompt(6, start), 9)
    driver.plan()
    driver.plan()
    driver.land()
    assert case.stream.reason == "eos_token"
    driver.land()
    assert driver.plan() is None


def test_a_row_number_is_used_again_only_in_a_plan_that_drops_it() -> None:
    driver = roomy(rows=1)
    driver.steady(prompt(4), 2)
    driver.steady(prompt(4, 5), 2)
    seen: list[StepPlan] = []
    while (plan := driver.plan()) is not None or driver.plans:
        if plan is not None:
            seen.append(plan)
        driver.land()
    admits = [plan for plan in seen if plan.admit]
    assert [plan.drop for plan in admits] == [[], [0]]
    driver.check()


def test_results_come_in_order() -> None:
    driver = roomy()
    driver.add(prompt(4), 2)
    driver.plan()
    with pytest.raises(ValueError, match=r"step 7 while \[1\]"):
        driver.scheduler.apply(StepResult(7), 0.0)


def test_what_could_never_run_is_not_taken() -> None:
    driver = roomy(pages=4)
    with pytest.raises(ValueError, match="at most 16 can be served"):
        driver.add(prompt(10), 7)
    driver.cases.pop()
    driver.add(prompt(10), 6)
    driver.drain()
    driver.check()


def test_a_plan_is_a_copy() -> None:
    driver = roomy()
    case = driver.steady(prompt(6), 4)
    plan = driver.plan()
    assert plan is not None
    driver.plan()
    driver.land()
    assert plan.admit[0].tokens == case.prompt
    assert len(plan.admit[0].pages) == 2


def test_a_worker_that_forgets_a_row_fails_that_row_alone() -> None:
    driver = roomy()
    forgotten, served = driver.steady(prompt(4), 3), driver.steady(prompt(4, 5), 3)
    driver.plan()
    result = driver.worker.step(driver.plans.popleft())
    for event in driver.scheduler.apply(StepResult(result.step, result.emit[1:]), driver.now):
        event.tell(driver)
    assert forgotten.stream.failure is not None
    assert forgotten.stream.failure.status == 500
    driver.drain()
    assert served.stream.reason == "length"


def test_a_row_error_is_that_row_s_alone() -> None:
    """D06: what goes wrong for one request fails that request."""
    driver = roomy()
    cases = [driver.steady(prompt(5, 10 * i), 6) for i in range(3)]
    driver.turn()
    driver.worker.fail_row = 1
    driver.drain()
    assert [case.stream.reason for case in cases] == ["length", "", "length"]
    failure = cases[1].stream.failure
    assert failure is not None
    assert (failure.kind, failure.status) == ("generation", 424)
    assert failure.message == "Request failed during generation: injected"
    driver.check()


def test_events_come_with_whatever_is_called_next() -> None:
    driver = roomy()
    driver.add(prompt(4), 1)
    plan = driver.scheduler.plan(1.0)
    assert plan is not None
    events = driver.scheduler.apply(driver.worker.step(plan), 1.0)
    assert isinstance(events[0], Admitted)
    assert isinstance(events[-1], Stepped)
    assert driver.scheduler.take_events() == []


def test_a_long_prompt_never_stops_a_running_stream() -> None:
    driver = roomy(pages=128, max_step_tokens=64)
    stream = driver.steady(prompt(4), 30)
    driver.turn()
    driver.turn()
    driver.add(prompt(200, 7), 1)
    before = len(stream.stream.got)
    for _ in range(5):
        driver.turn()
    assert len(stream.stream.got) == before + 5
    driver.drain()
    driver.check()


def test_chunks_beside_streams_keep_the_inter_token_bound() -> None:
    """10 ms a plain step, 1 ms a token: with a bound of 30 ms, 20 tokens fit; alone the whole step is there."""
    driver = roomy(
        pages=256, max_step_tokens=101, step_seconds=(0.01, 0.11), policy=Policy(max_inter_token_ms=30, waiting_served_ratio=0.0)
    )
    driver.add(prompt(300, 3), 40)
    assert known(driver.plan()) == [101]
    driver.drain()
    driver.steady(prompt(4, 11), 60)
    driver.turn()
    driver.turn()
    driver.add(prompt(300, 7), 1)
    driver.land()
    plan = driver.plan()
    assert known(plan)[0] == 1
    assert 8 <= known(plan)[1] <= 101
    driver.drain()
    driver.check()


def test_max_batch_prefill_tokens_bounds_the_prompt_tokens_of_every_step() -> None:
    driver = roomy(pages=128, policy=Policy(max_batch_prefill_tokens=10))
    for i in range(5):
        driver.add(prompt(23, 3 * i), 3)
    driver.drain()
    driver.check()
    assert max(tally.prefill_tokens for tally in driver.tallies) == 10


def test_max_batch_size_bounds_the_rows() -> None:
    driver = roomy(policy=Policy(max_batch_size=2))
    for i in range(6):
        driver.steady(prompt(5, 3 * i), 4)
    most = 0
    while driver.plan() is not None or driver.plans:
        most = max(most, driver.scheduler.load().running)
        driver.land()
    driver.check()
    assert most == 2


def test_few_prompts_beside_many_streams_take_half_a_share_for_a_while() -> None:
    """`waiting_served_ratio` and `max_waiting_tokens`: they weigh a prompt against the streams, and never stop it."""
    driver = roomy(pages=256, max_step_tokens=104, policy=Policy(waiting_served_ratio=0.5, max_waiting_tokens=2))
    for i in range(4):
        driver.steady(prompt(4, 50 * i), 50)
    driver.turn()
    driver.turn()
    driver.add(prompt(600, 7), 1)
    driver.land()
    shares = []
    for _ in range(3):
        plan = driver.plan()
        shares.append(known(plan)[-1])
        driver.land()
    assert shares == [52, 52, 100]


def test_a_cancelled_sequence_feeds_nothing_from_the_next_plan_on() -> None:
    """B02, B04: its row, pages and place are free at once."""
    driver = roomy(rows=1, pages=16)
    first, second = driver.steady(prompt(6), 40), driver.steady(prompt(6, 5), 3)
    for _ in range(4):
        driver.turn()
    driver.scheduler.cancel(first.sequence)
    assert repr(driver.scheduler) == "0 running, 1 waiting, 0/16 pages"
    plan = driver.plan()
    assert plan is not None
    assert plan.drop == [0]
    assert plan.admit[0].tokens == second.prompt
    driver.scheduler.cancel(first.sequence)
    driver.drain()
    driver.check()
    assert second.stream.reason == "length"


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 9])
def test_bystanders_of_a_cancellation_hear_the_same(turns: int) -> None:
    """B06: half of the streams are cut in the queue, in prefill or in decode."""
    driver = roomy(rows=6, max_step_tokens=16)
    cases = [driver.steady(prompt(9, 100 * i), 8) for i in range(8)]
    for _ in range(turns):
        driver.turn()
    for case in cases[::2]:
        driver.scheduler.cancel(case.sequence)
    driver.drain()
    driver.check()
    assert all(case.stream.reason for case in cases[1::2])


def test_a_text_rule_ends_a_sequence_and_nothing_is_said_after() -> None:
    driver = roomy()
    case = driver.steady(prompt(6), 9, stop_after=3)
    driver.drain()
    assert len(case.stream.got) == 3
    assert case.stream.reason == ""


def test_a_deadline_in_the_queue_costs_no_prefill() -> None:
    """B12."""
    driver = roomy(rows=1)
    driver.steady(prompt(6), 40)
    late = driver.add(prompt(9, 5), 3, deadline=driver.now + 2)
    driver.turn()
    computed = driver.worker.computed_tokens
    driver.now += 3
    driver.turn()
    assert late.stream.failure is DEADLINE
    driver.drain()
    assert driver.worker.computed_tokens == computed + 39


def test_a_deadline_ends_a_running_stream() -> None:
    driver = roomy()
    case = driver.steady(prompt(6), 40, deadline=driver.now + 2)
    for _ in range(5):
        driver.turn()
    driver.now += 3
    assert driver.plan() is None
    assert case.stream.failure is DEADLINE
    assert (DEADLINE.status, DEADLINE.kind) == (504, "deadline_exceeded")
    assert case.stream.got
    driver.drain()
    driver.check()


def test_deadlines_hold_while_there_is_no_worker() -> None:
    driver = roomy()
    case = driver.add(prompt(6), 4, deadline=driver.now + 2)
    driver.scheduler.expire(driver.now + 1)
    assert len(driver.scheduler.take_events()) == 0
    driver.scheduler.expire(driver.now + 2)
    driver.tell()
    assert case.stream.failure is DEADLINE
