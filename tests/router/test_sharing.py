"""Prefixes as requests see them: found, shared while they are computed, kept apart, evicted."""

from __future__ import annotations

import pytest

from forerun.router.policy import Policy
from tests.router.driver import prompt, roomy


def test_the_second_time_a_prompt_is_found_and_the_answer_is_the_same() -> None:
    """D08."""
    driver = roomy()
    first = driver.steady(prompt(13), 6)
    driver.drain()
    second = driver.steady(first.prompt, 6)
    driver.drain()
    assert (first.sequence.prefix_hit_tokens, second.sequence.prefix_hit_tokens) == (0, 12)
    assert first.stream.got == second.stream.got
    driver.check()


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_prompt_log_probabilities_are_the_same_both_times(length: int) -> None:
    """D10: page − 1, page, page + 1."""
    driver = roomy()
    driver.add(prompt(length), 4)
    driver.drain()
    cases = []
    for _ in range(2):
        cases.append(driver.add(prompt(length), 4, prompt_logprobs=True, cache=False))
        driver.drain()
    driver.check()
    assert len(cases[0].stream.echo) == length - 1
    assert cases[0].stream.echo == cases[1].stream.echo


def test_prompt_log_probabilities_are_told_once_through_a_restart() -> None:
    driver = roomy(max_step_tokens=4)
    case = driver.add(prompt(11), 4, prompt_logprobs=True)
    driver.turn()
    driver.turn()
    driver.restart()
    driver.turn()
    driver.restart()
    driver.drain()
    driver.check()
    assert len(case.stream.echo) == 10
    case = driver.steady(prompt(5, 4), 9, prompt_logprobs=True)
    for _ in range(6):
        driver.turn()
    driver.restart()
    plan = driver.plan()
    assert plan is not None
    assert not plan.admit[0].params.prompt_logprobs, "all of them were told"
    driver.drain()
    driver.check()


def test_answers_are_reused_by_the_next_turn_of_a_conversation() -> None:
    driver = roomy()
    first = driver.steady(prompt(10), 14)
    driver.drain()
    second = driver.add([*first.sequence.tokens, 3, 5], 4)
    driver.drain()
    assert second.sequence.prefix_hit_tokens == 20
    driver.check()


def test_prefixes_stay_inside_a_tenant_and_an_adapter() -> None:
    """D11."""
    driver = roomy()
    hits = []
    for tenant, adapter in [("a", None), ("a", None), ("b", None), ("a", "lora"), ("b", None)]:
        case = driver.add(prompt(13), 3, tenant=tenant, adapter=adapter)
        driver.drain()
        hits.append(case.sequence.prefix_hit_tokens)
    assert hits == [0, 12, 0, 0, 12]


def test_a_request_may_stay_out_of_the_cache() -> None:
    driver = roomy()
    driver.add(prompt(13), 3, cache=False)
    driver.drain()
    assert driver.scheduler.load().cached_pages == 0
    driver.add(prompt(13), 3)
    driver.drain()
    out = driver.add(prompt(13), 3, cache=False)
    driver.drain()
    assert out.sequence.prefix_hit_tokens == 0


def test_the_cache_can_be_switched_off() -> None:
    driver = roomy(policy=Policy(prefix_caching=False))
    for _ in range(2):
        case = driver.add(prompt(13), 3)
        driver.drain()
        assert case.sequence.prefix_hit_tokens == 0
    assert driver.scheduler.load().cached_pages == 0


def test_prompts_that_come_together_are_computed_once() -> None:
    """`best_of`, or many requests with one system prompt: pages are shared as soon as each is full."""
    driver = roomy(max_step_tokens=32)
    stem = prompt(60)
    cases = [driver.add([*stem, 1 + i], 3, seed=i) for i in range(6)]
    driver.drain()
    driver.check()
    assert [case.sequence.prefix_hit_tokens for case in cases] == [0] + [60] * 5
    assert sum(tally.prefill_tokens for tally in driver.tallies) == 61 + 5


def test_who_waits_for_a_page_does_not_wait_for_a_dead_owner() -> None:
    driver = roomy(max_step_tokens=16)
    owner = driver.add(prompt(60), 3)
    heir = driver.add(prompt(60), 3)
    driver.turn()
    driver.turn()
    driver.scheduler.cancel(owner.sequence)
    driver.drain()
    driver.check()
    assert heir.stream.reason
    assert heir.sequence.prefix_hit_tokens > 0


def test_a_full_pool_gives_up_the_oldest_prefixes_first() -> None:
    driver = roomy(pages=16, rows=1)
    for start in (1, 2, 3):
        driver.add(prompt(20, start), 1)
        driver.drain()
    driver.add(prompt(20, 4), 1)
    driver.drain()
    hits = []
    for start in (4, 3, 2):
        case = driver.add(prompt(20, start), 1)
        driver.drain()
        hits.append(case.sequence.prefix_hit_tokens)
    assert hits[0] == hits[1] == 16
    driver.check()
