from __future__ import annotations

import itertools

from forerun.bench.compare import ours
from forerun.bench.policies import Always
from forerun.bench.simulate import simulate
from forerun.bench.traces import tokens_of
from forerun.bench.unforeseen import unforeseen


def test_a_scenario_is_made_from_its_seed_and_number_alone() -> None:
    few, more = list(unforeseen(3, 7)), list(unforeseen(5, 7))
    assert more[:3] == few
    assert len({scenario.name for scenario in [*more, *unforeseen(5, 8)]}) == 10


def test_more_rows_never_take_less_time() -> None:
    for scenario in unforeseen(60, 1):
        seconds = [seconds for _, seconds in scenario.machine.steps]
        assert all(0 < before < after for before, after in itertools.pairwise(seconds))


def test_both_policies_write_all_of_it() -> None:
    scenario = min(unforeseen(20, 2), key=lambda scenario: tokens_of(scenario.tracks))
    for policy in (Always(0), ours(scenario)):
        assert simulate(scenario, policy).tokens == tokens_of(scenario.tracks)
