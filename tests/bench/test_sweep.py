"""The plan and the arithmetic of a speculation sweep, and that answers which differ are found."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.bench import plots
from forerun.bench.errors import BenchError
from forerun.bench.records import Record
from forerun.bench.speculation import Counts, describe, details, differing, earlier, numbered
from forerun.bench.sweep import Outcome, Side, bars, condense, lives, matches, requests, table
from forerun.bench.workloads import Workload


def workload(name: str, count: int) -> Workload:
    return Workload(name, [f"{name} {number}" for number in range(count)])


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=4),
    st.lists(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=1, max_size=6, unique=True),
    st.integers(1, 3),
)
def test_no_server_sees_a_prompt_twice(sizes: list[int], streams: list[int], rounds: int) -> None:
    chosen = [workload(f"w{number}", size) for number, size in enumerate(sizes)]
    plan = lives(chosen, streams, rounds)
    for life in plan:
        seen = [prompt for match in life for prompt in match.prompts]
        assert len(seen) == len(set(seen))
    played = [(match.round, match.workload, match.streams) for life in plan for match in life]
    wanted = itertools.product(range(rounds), (one.name for one in chosen), [count for count in streams for _ in range(matches(count))])
    assert sorted(played) == sorted(wanted)
    sizes_of = {one.name: len(one.prompts) for one in chosen}
    assert all(len(match.prompts) == min(requests(match.streams), sizes_of[match.workload]) for life in plan for match in life)


def test_who_is_first_alternates_from_round_to_round() -> None:
    assert [len(match.prompts) for life in lives([workload("a", 90)], [1, 4, 16], 1, most=6) for match in life] == [6, 8, 32]
    plan = [match for life in lives([workload("a", 90)], [1, 4], 2) for match in life]
    first = {(match.round, match.streams): match.guessing_first for match in plan}
    assert first[0, 1] != first[1, 1] and first[0, 4] != first[1, 4] and first[0, 1] != first[0, 4]


def outcome(ratio: float, workload: str = "chat", streams: int = 1, round: int = 0, guesses: float = 2.0) -> Outcome:
    plain = Side(seconds=10 * ratio, tokens=1000, requests_rate=1, first_token_ms=9, step_ms=10)
    guessing = Side(seconds=10, tokens=1000, requests_rate=1, first_token_ms=9, step_ms=10)
    pairs = [(5.0, 4.9 * ratio), (5.0, 5.1 * ratio)]
    return Outcome(round, workload, streams, guessing, plain, pairs, guesses, acceptance=0.5, tokens=2.0)


def test_medians_and_spread_of_rounds() -> None:
    (spot,) = condense([outcome(1.1), outcome(1.5, round=1), outcome(1.2, round=2)])
    assert (spot.ratio, spot.least, spot.most, spot.rounds) == pytest.approx((1.2, 1.1, 1.5, 3))
    each = [one.doubt for one in (outcome(1.1), outcome(1.5), outcome(1.2))]
    assert spot.doubt == pytest.approx(math.hypot(*each) / 3) and each[0] == pytest.approx(0.022)


def test_matches_of_a_round_count_by_their_length() -> None:
    """Together, a long match and a short one that chance decided are what one match of their length is."""
    short = dataclasses.replace(outcome(0.8), pairs=[(0.5, 0.4), (0.5, 0.4)])
    (spot,) = condense([outcome(1.0), short, outcome(1.1, round=1)])
    assert (spot.rounds, spot.least, spot.most) == (2, pytest.approx(10.8 / 11), pytest.approx(1.1))


def test_every_loser_is_named_and_the_worst_of_each_load() -> None:
    spots = condense([outcome(1.3), outcome(2.0, "copy"), outcome(0.97, streams=8), outcome(0.9, "copy", 8), outcome(1.0, streams=16)])
    found = {bar.name: bar.passed for bar in bars(spots, {"chat": 1.2, "copy": 2.2})}
    assert found == {
        "chat, 1 stream: speed over plain": True,
        "copy, 1 stream: speed over plain": False,
        "worst at 1 streams: chat": True,
        "worst at 8 streams: copy": False,
        "8 streams: chat": False,
        "worst at 16 streams: chat": True,
    }
    assert "0.900 ± 0.018 (2.0)" in table(spots) and "–" in table(spots)


def record(*ids: int, cut: bool = False) -> Record:
    return Record(0.0, ids=list(ids), cut=cut)


def test_answers_that_differ_are_found() -> None:
    asked = ["same", "other token", "other length", "cut", "cut but longer than the whole one"]
    left = [record(1, 2), record(1, 2, 3), record(1, 2), record(1, 2, cut=True), record(1, 2, 3, cut=True)]
    right = [record(1, 2), record(1, 5, 3), record(1, 2, 3), record(1, 2, 3), record(1, 2)]
    found = differing(asked, left, right)
    assert [text.partition(" of")[0] for text in found] == ["token 2", "token 3", "token 3"]
    assert differing(asked, right, left) == found
    one = outcome(1.0)
    assert describe([one]) == []


def test_rounds_can_be_added_to_a_result() -> None:
    kept = [outcome(1.0), outcome(1.0, round=1)]
    assert [one.round for one in numbered([outcome(1.1), outcome(1.2, round=1)], kept)] == [2, 3]
    assert numbered(kept, []) == kept


def test_a_result_can_be_read_again() -> None:
    kept = [outcome(1.25, "copy", 8)]
    result = json.loads(json.dumps(details(kept)))
    assert earlier(result) == kept
    del result["outcomes"][0]["pairs"]
    with pytest.raises(BenchError, match="another version's, give a new one with --out"):
        earlier(result)


@pytest.mark.parametrize("rules", [{"rules": "work of all of the match, turns of a second"}, {}])
def test_matches_that_were_judged_by_other_rules_are_not_added_to(rules: dict[str, str]) -> None:
    """All else is the same, so that nothing else would tell."""
    told = next(iter(rules.values()), "not told, it is older")
    with pytest.raises(BenchError, match=f"new file with --out .its rules: {told}; now: equal work"):
        earlier(rules | {"outcomes": details([outcome(1.25)])["outcomes"]})


def test_counts_of_a_server() -> None:
    page = {
        'forerun_drafted_tokens_total{source="a"}': 5.0,
        'forerun_drafted_tokens_total{source="b"}': 3.0,
        "forerun_accepted_tokens_total": 4.0,
        "forerun_committed_tokens_total": 20.0,
        'forerun_speculation_guard_state{rows="1"}': 1.0,
        "forerun_speculation_draft_seconds_total": 0.25,
    }
    counts = Counts.of(page)
    assert (counts.drafted, counts.accepted, counts.committed) == (8, 4, 20)
    gained = counts.since(counts)
    assert (gained.drafted, gained.accepted, gained.committed) == (0, 0, 0)
    assert gained.state == {'forerun_speculation_guard_state{rows="1"}': 1.0, "forerun_speculation_draft_seconds_total": 0.0}


def test_a_picture(tmp_path: Path) -> None:
    spots = condense([outcome(1.3), outcome(0.97, streams=8, guesses=0.1), outcome(2.0, "copy")])
    plots.speculation(spots, tmp_path / "x.png", 0.98)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
