"""What the measurement of pauses beside grammars makes of its turns, and that no grammar comes twice."""

from __future__ import annotations

import json

from forerun.bench.grammars import HONEST, HOSTILE, Grammars, Settings, Turn, bars
from forerun.bench.stats import summarize


def turn(beside: bool, *gaps: float) -> Turn:
    return Turn(beside, summarize(gaps), {"422": 2} if beside else {})


def test_the_shortest_pauses_of_each_kind_count() -> None:
    turns = [turn(True, 30.0), turn(False, 90.0), turn(True, 15.0), turn(False, 10.0), turn(False, 12.0)]
    (bar,) = bars(turns)
    assert bar.measured == 1.5 and bar.passed and "{'422': 4}" in bar.note
    (bar,) = bars([turn(True, 25.0), turn(False, 12.0)])
    assert not bar.passed


def test_every_grammar_is_a_new_one() -> None:
    made = Grammars("model", [], Settings(), print)
    bodies = [made._body(number) for number in range(3 * len(HOSTILE | HONEST))]
    assert len(set(bodies)) == len(bodies)
    assert {json.loads(body)["parameters"]["grammar"]["type"] for body in bodies} == {"json", "regex"}
