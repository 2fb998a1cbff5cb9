"""What the controller is held to, on traces that are drawn in code: never worse than plain decoding, close to the best fixed k of every
trace (known only afterwards), and soon right again after a change."""

from __future__ import annotations

import dataclasses
import random

import pytest

from forerun.bench.compare import FIXED, fixed, ours, recovery, run
from forerun.bench.machine import CPU, GPU, NATIVE, STAIR
from forerun.bench.policies import Always, Clairvoyant
from forerun.bench.scenarios import CHAT, COPY, HONEST, LIAR, change, scenarios
from forerun.bench.simulate import Scenario, simulate
from forerun.bench.traces import Regime, draw, mixed, tokens_of

EVERY = {scenario.name: scenario for scenario in scenarios(200, loads=(1, 4, 16))}


@pytest.mark.parametrize("name", EVERY)
def test_never_slower_than_plain_and_close_to_the_best_fixed_k(name: str) -> None:
    (result,) = run([EVERY[name]], [fixed])
    assert result.over_plain("price") >= 0.99
    assert result.over_best("price") >= 0.95


@pytest.mark.parametrize("load", [1, 4])
@pytest.mark.parametrize(("before", "after"), [(CHAT, COPY), (COPY, CHAT), (HONEST, LIAR), (LIAR, HONEST)])
def test_thirty_rounds_after_a_change_it_is_as_good_as_the_best_fixed_k(before: Regime, after: Regime, load: int) -> None:
    """`best` is the fixed k that is best behind the change; it never had to find it."""
    seeds = range(3)
    scenario = change(before, after, steady=300, behind=900, load=load)
    ratio = 0.0
    for seed in seeds:
        best = max(recovery(simulate(scenario, Always(k), seed), 300, 30, load) for k in (0, *FIXED))
        ratio += recovery(simulate(scenario, ours(scenario), seed), 300, 30, load) / best / len(seeds)
    assert ratio >= 0.95


@pytest.mark.parametrize(("chance", "least"), [(0.02, 0.985), (0.2, 0.985), (0.5, 0.99), (0.7, 1.2)])
def test_a_draft_model_that_reads_every_prompt_is_found_out_within_six_short_answers(chance: float, least: float) -> None:
    """What it takes to read a prompt is paid once: it must neither hide that asking pays, nor be paid for nothing again and again."""
    machine = dataclasses.replace(NATIVE, draft_each=0.0, draft_step=1.5e-3, draft_node=1e-3, draft_read=1.2e-4)
    ratios = []
    for seed in range(3):
        scenario = Scenario(f"draft model {seed}", machine, mixed(random.Random(seed), [Regime(chance, spread=0.5)], 6, 147, 80))
        ratios.append(simulate(scenario, ours(scenario)).speed / simulate(scenario, Always(0)).speed)
    assert min(ratios) >= 0.985 and sum(ratios) / 3 >= least


@pytest.mark.parametrize("seed", [0, 1])
def test_a_crowd_loses_nothing_where_a_node_costs_a_token_and_a_tenth_more_than_was_measured(seed: int) -> None:
    """Guesses would seem to win some percent, which is less than is known of large steps."""
    machine = dataclasses.replace(NATIVE, weather=lambda now, rows: 1.0 if rows <= 32 else 1.1)
    tracks = mixed(random.Random(seed), [Regime(0.9, spread=0.8, silence=0.5)], 48, 120, 40)
    scenario = Scenario(f"dear {seed}", machine, tracks, clients=32)
    assert simulate(scenario, ours(scenario)).speed >= 0.995 * simulate(scenario, Always(0)).speed


@pytest.mark.parametrize("machine", [CPU, STAIR, GPU])
def test_nothing_is_faster_than_knowing_what_holds(machine: object) -> None:
    for scenario in EVERY.values():
        if scenario.machine is machine and scenario.clients == 1 and "copy" in scenario.name:
            known = simulate(scenario, Clairvoyant(scenario.machine)).speed
            assert known >= max(simulate(scenario, policy).speed for policy in (ours(scenario), Always(4), Always(16)))


def test_every_policy_writes_the_same_tokens() -> None:
    scenario = EVERY["cpu bf16, chat and copy, 4"]
    outcomes = [simulate(scenario, policy) for policy in (Always(0), Always(5), ours(scenario))]
    assert {outcome.tokens for outcome in outcomes} == {tokens_of(scenario.tracks)}


def test_plain_decoding_takes_what_the_machine_says() -> None:
    track = draw(random.Random(0), 10, [(CHAT, 50)])
    scenario = EVERY["cpu bf16, chat, 1"]
    outcome = simulate(type(scenario)("one", CPU, [track]), Always(0))
    assert outcome.pace[0][1] == pytest.approx(CPU.seconds(10, 0, 0))
    assert outcome.busy == pytest.approx(sum(CPU.seconds(1, n, n) for n in range(11, 60)) + outcome.pace[0][1])
    assert (outcome.tokens, outcome.nodes) == (50, 0)
