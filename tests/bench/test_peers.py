"""The contest against scripted servers, its ratios and bars, and who takes part."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from forerun.bench import plots
from forerun.bench.entrants import Entrant, entrants
from forerun.bench.errors import BenchError
from forerun.bench.launched import Program
from forerun.bench.peers import Contest, Facts, Settings, Turn, bars, ratio, rotated, table
from forerun.bench.turns import Turns

TOKENS = 6
SMALL = Settings(streams=(1, 3), rounds=2, tokens=TOKENS)


def fake(server: str, kind: str, weights: str, api: str, gap: float = 0.0, tokens: int = TOKENS) -> Entrant:
    words = [sys.executable, "-m", "tests.bench.fake", "PORT", str(tokens), str(gap)]
    return Entrant(server, kind, weights, Program(words), api, ends=api == "tgi")


async def test_servers_run_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[object, ...]] = []

    async def finish(*given: object) -> None:
        waited.append(given)

    monkeypatch.setattr(Turns, "_finish", finish)
    both = [fake("forerun", "bf16", "bf16", "tgi", gap=0.002), fake("llama.cpp", "bf16", "bf16", "llama", gap=0.02)]
    said: list[str] = []
    contest = Contest(both, SMALL, said.append)
    await contest.run()
    order = [(turn.round, turn.streams, turn.entrant) for turn in contest.turns]
    names = [one.name for one in both]
    assert order == [(number, streams, name) for number in (0, 1) for streams in (1, 3) for name in (names if number == 0 else names[::-1])]
    assert all(turn.tokens == max(2, turn.streams) * TOKENS for turn in contest.turns)
    assert all(one.start_seconds > 0 and one.memory_mb > 5 for one in contest.facts)
    assert {bar.name: bar.passed for bar in bars(contest.turns, both)} == {
        "1 stream, bf16: ours / best peer": True,
        "3 streams, bf16: ours / best peer": True,
    }
    assert any("round 2 of 2" in line for line in said)
    assert not waited, "a server is stopped whole: some of them have workers that go on without their front"


async def test_answers_that_end_early_are_no_measurement() -> None:
    contest = Contest([fake("forerun", "bf16", "bf16", "tgi", tokens=TOKENS - 1)], SMALL, lambda line: None)
    with pytest.raises(BenchError, match=r"forerun bf16: of .* only 0 have 6"):
        await contest.run()


def turn(entrant: str, rate: float, round: int = 0, streams: int = 8) -> Turn:
    return Turn(entrant, round, streams, rate, rate / 128, 128, 10, 20, 5)


def test_a_ratio_is_taken_within_a_round() -> None:
    """The second round ran on a machine half as fast: 2, 2 and 4 times as fast as the best of the others."""
    turns = [
        *(turn("a", 200), turn("b", 100), turn("c", 90)),
        *(turn("a", 100, 1), turn("b", 40, 1), turn("c", 50, 1)),
        *(turn("a", 400, 2), turn("b", 100, 2), turn("c", 1, 2)),
    ]
    assert ratio(turns, 8, ["a"], ["b", "c"]) == 2
    assert "a" in table(turns, [Facts("a", 1.0, 100.0)])


def test_peers_of_all_weights_and_of_the_same() -> None:
    three = [fake("forerun", "bf16", "bf16", "tgi"), fake("vLLM", "bf16", "bf16", "openai"), fake("llama.cpp", "q4_0", "4 bits", "llama")]
    turns = [turn("forerun bf16", 500), turn("vLLM bf16", 400), turn("llama.cpp q4_0", 500)]
    found = {bar.name: (bar.measured, bar.passed) for bar in bars(turns, three)}
    assert found == {
        "8 streams, bf16: ours / best peer": (1.25, True),
        "8 streams, any weights: ours / best peer": (1.0, False),
    }


def test_another_begins_each_round() -> None:
    three = [fake(name, "x", "bf16", "tgi") for name in "abc"]
    assert [rotated(three, number)[0].server for number in range(4)] == ["a", "b", "c", "a"]


def test_peers_that_are_not_there_are_skipped_with_the_cure(tmp_path: Path) -> None:
    found, skipped = entrants("model", tmp_path)
    assert [one.name for one in found] == ["forerun bf16", "forerun int8", "forerun int4"]
    assert all("none" in one.program.words for one in found), "no guesses"
    assert len(skipped) == 4 and all("tools/peers.sh" in line for line in skipped)


def test_peers_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp with a thread for each core, and with one less where there are several."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    for file in ("llama.cpp/build/bin/llama-server", "llama.cpp/models/q8_0.gguf", "vllm/venv/bin/python"):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert "vLLM" not in {one.server for one in entrants("model", tmp_path)[0]}, "an environment without what belongs into it"
    (tmp_path / "vllm/ready").touch()
    found, skipped = entrants("model", tmp_path, ["--threads", "2"])
    assert [one.name for one in found[3:]] == ["llama.cpp q8_0 t3", "llama.cpp q8_0 t2", "vLLM bf16"]
    assert all("PORT" in one.program.words for one in found)
    assert list(found[3].program.words[-2:]) == ["-lm", "none"], "weights in memory, not mapped"
    assert found[0].program.words[-2:] == ["--threads", "2"]
    assert [line.split()[2] for line in skipped] == ["bf16", "q4_0"]


def test_a_picture(tmp_path: Path) -> None:
    turns = [turn(name, rate, number, streams) for name, rate in (("a", 3), ("b", 4)) for number in (0, 1) for streams in (1, 8)]
    plots.peers(turns, [Facts("a", 1, 2), Facts("b", 3, 4)], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert dataclasses.asdict(turns[0])["entrant"] == "a"
