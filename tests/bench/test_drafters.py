"""Drafters side by side: who is found, what a match says of them, and what is said of mixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from forerun.bench import drafters, plots
from forerun.bench.drafters import Field, Settings, found, table, verdicts
from forerun.bench.records import Record
from forerun.bench.speculation import Counts, Taken, outcome
from forerun.bench.sweep import Match, Spot
from forerun.bench.workloads import Workload


def test_what_lies_there_is_found_and_mixed(tmp_path: Path) -> None:
    assert found(tmp_path, "tiny") == ["auto", "suffix"]
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").touch()
    assert found(tmp_path, "tiny")[2:] == [f"model={tmp_path / 'tiny'}", f"suffix+model={tmp_path / 'tiny'}"]
    for kind in ("medusa", "eagle3", "dflash", "grams"):
        (tmp_path / f"tiny-{kind}").mkdir()
    names = found(tmp_path, "tiny")
    eagle, medusa, dflash = (
        f"{name}={tmp_path / f'tiny-{kind}'}" for name, kind in (("eagle", "eagle3"), ("medusa", "medusa"), ("dflash", "dflash"))
    )
    assert names[:5] == ["auto", "suffix", f"model={tmp_path / 'tiny'}", eagle, medusa]
    assert names[5:] == [dflash, f"suffix+{eagle}", f"suffix+{medusa}", f"suffix+grams={tmp_path / 'tiny-grams'}"]


def record(ids: list[int], begin: float, step: float) -> Record:
    arrivals = [begin + step * (i + 1) for i in range(len(ids))]
    return Record(due=begin, sent=begin, arrivals=arrivals, tokens=len(ids), ended=arrivals[-1], ids=ids)


def counts(drafted: float, accepted: float, committed: float) -> Counts:
    return Counts(drafted, accepted, committed, {})


def test_a_match_says_how_fast_and_how_much_a_step_brings() -> None:
    match = Match(0, "chat", 1, ["a", "b"], True)
    slow = [record([1, 2, 3, 4], 0.0, 0.2), record([5, 6, 7, 8], 0.8, 0.2)]
    fast = [record([1, 2, 3, 4], 0.0, 0.1), record([5, 6, 7, 8], 0.4, 0.1)]
    one = outcome(match, fast, counts(6, 3, 8), slow)
    assert one.ratio == pytest.approx(2.0) and one.tokens == pytest.approx(8 / 5)
    assert one.acceptance == 0.5 and one.guesses == pytest.approx(6 / 5) and not one.differing
    other = outcome(match, [record([1, 2, 9, 4], 0.0, 0.1), fast[1]], counts(6, 3, 8), slow)
    assert len(other.differing) == 1 and "token 3" in other.differing[0]


def spot(workload: str, streams: int, ratio: float, tokens: float = 1.5) -> Spot:
    return Spot(workload, streams, 1, ratio, ratio, ratio, 0.01, 100 * ratio, 100.0, 2.0, 0.3, tokens)


SPOTS = {
    "suffix": [spot("chat", 1, 1.2), spot("copy", 1, 2.0), spot("chat", 4, 1.1)],
    "eagle=DIR": [spot("chat", 1, 1.0), spot("copy", 1, 1.1), spot("chat", 4, 0.9)],
    "suffix+eagle=DIR": [spot("chat", 1, 1.3), spot("copy", 1, 1.9), spot("chat", 4, 1.1)],
}


def test_the_table_has_a_row_for_each_drafter_and_their_means() -> None:
    lines = table(SPOTS, 1).splitlines()
    assert lines[0] == "| 1 stream | chat | copy | mean |" and len(lines) == 5
    assert lines[2] == "| `suffix` | 1.20 (1.50) | 2.00 (1.50) | 1.60 (1.50) |"
    # A load that was not run leaves its place empty.
    assert table(SPOTS, 4).splitlines()[2] == "| `suffix` | 1.10 (1.50) | – | 1.10 (1.50) |"


def test_mixtures_are_held_against_their_parts() -> None:
    assert list(verdicts({"auto": [spot("chat", 1, 1.1)], "suffix": SPOTS["suffix"]})) == [
        "auto against suffix: faster at 0 of 1 loads; slower at chat at 1"
    ]
    assert list(verdicts(SPOTS)) == [
        "suffix+eagle=DIR against suffix: faster at 2 of 3 loads; slower at copy at 1",
        "suffix+eagle=DIR against eagle=DIR: faster at 3 of 3 loads",
    ]


def test_a_picture(tmp_path: Path) -> None:
    plots.drafters(SPOTS, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


async def test_servers_take_turns_and_nobody_reads_a_prompt_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, tuple[str, ...]]] = []

    class Fake:
        def __init__(self, program: object) -> None:
            words = program.words  # type: ignore[attr-defined]
            self.name = words[words.index("--speculator") + 1]

    async def take(servers: list[Fake], match: Match, ask: object, form: object) -> list[Taken]:
        asked.extend((server.name, match.workload, tuple(match.prompts)) for server in servers)
        return [([record([1, 2, 3, 4], 0.0, 0.1) for _ in match.prompts], counts(0, 0, 8)) for _ in servers]

    async def start(stack: object, programs: Iterable[object], streams: int) -> list[Fake]:
        return [Fake(program) for program in programs]

    monkeypatch.setattr(drafters, "start", start)
    monkeypatch.setattr(drafters, "take", take)
    said: list[str] = []
    say: Callable[[str], None] = said.append
    field = Field("m", ["suffix", "ngram"], [], Settings((1, 2), 2, 8), str, say)
    await field.run([Workload("a", [f"a{i}" for i in range(40)]), Workload("b", [f"b{i}" for i in range(40)])])
    assert {name: len(outcomes) for name, outcomes in field.outcomes.items()} == {"suffix": 8, "ngram": 8}
    firsts = [asked[i][0] for i in range(0, len(asked), 3)]
    assert set(firsts) == {"none", "suffix", "ngram"}
    first_round = [prompt for name, _, prompts in asked[:12] if name == "suffix" for prompt in prompts]
    assert len(set(first_round)) == len(first_round)
    assert all(asked[i][2] == asked[i + 1][2] == asked[i + 2][2] for i in range(0, len(asked), 3))


async def test_a_bounded_run_ends_with_whole_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """By requests, and by a clock that jumps half a minute at each load."""
    now = [0.0]

    async def start(stack: object, programs: Iterable[object], streams: int) -> list[str]:
        return ["server" for _ in programs]

    async def take(servers: list[str], match: Match, ask: object, form: object) -> list[Taken]:
        assert len(match.prompts) == max(2, 2 * match.streams)
        now[0] += 15.0 * len(servers)
        return [([record([1, 2, 3, 4], 0.0, 0.1) for _ in match.prompts], counts(0, 0, 8)) for _ in servers]

    monkeypatch.setattr(drafters, "start", start)
    monkeypatch.setattr(drafters, "take", take)
    field = Field("m", ["suffix"], [], Settings((1, 4), 1, 8, requests=2, minutes=1.0), str, lambda text: None, lambda: now[0])
    await field.run([Workload(name, [f"{name}{i}" for i in range(40)]) for name in "ab"])
    assert [one.streams for one in field.outcomes["suffix"]] == [1, 1, 4] and "3 of 4 loads" in field.remarks[0]
