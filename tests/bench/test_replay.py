"""Recorded answers before a real drafter: what holds is what the answer says, and the controller keeps its bars on them too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from forerun.bench import replay
from forerun.bench.compare import fixed, main, ours, run
from forerun.bench.policies import Always
from forerun.bench.replay import Answer, Shelf
from forerun.bench.scenarios import fresh, replayed
from forerun.bench.simulate import simulate


def written(dice: random.Random, kind: str, repeats: float) -> Answer:
    """Of a text that goes on with what stood before, or with anything."""
    prompt = [dice.randrange(300) for _ in range(80)]
    output: list[int] = []
    place = dice.randrange(40)
    while len(output) < 100:
        if dice.random() > repeats:
            place = dice.randrange(40)
            output.append(dice.randrange(300))
        else:
            output.append(prompt[place])
            place = (place + 1) % len(prompt)
    return Answer(kind, prompt, output)


ANSWERS = [written(random.Random(i), kind, repeats) for i in range(5) for kind, repeats in (("copy", 0.95), ("chat", 0.4))]


def test_a_guess_holds_if_the_answer_goes_on_like_it() -> None:
    """The answer repeats its prompt: behind `1 2` came `3 4 5`, so that is what a look-up offers, and it holds until the answer differs."""
    answer = Answer("copy", [1, 2, 3, 4, 5, 9, 8], [1, 2, 3, 4, 7, 7])
    (track,) = Shelf("ngram", 8).tracks([answer])
    offer = track.offer(2, 8)
    assert offer.held[:3] == [True, True, False] and len(offer.parent) == len(offer.confidence) == len(offer.held)
    track.close()


def test_no_policy_changes_what_is_written() -> None:
    (scenario, *_) = [one for one in replayed(ANSWERS, "suffix", loads=(4,)) if "all" in one.name]
    outcomes = [simulate(scenario, policy) for policy in (Always(0), Always(5), ours(scenario))]
    assert {outcome.tokens for outcome in outcomes} == {sum(len(answer.output) for answer in ANSWERS)}


@pytest.mark.parametrize("load", [1, 4, 16])
def test_the_bars_hold_before_a_real_drafter(load: int) -> None:
    (scenario, *_) = [one for one in replayed(ANSWERS, "suffix", loads=(load,)) if "all" in one.name]
    (result,) = run([scenario], [fixed])
    assert result.over_plain("price") >= 0.99 and result.over_best("price") >= 0.95


RECORDED = replay.load(Path(__file__).with_name("answers.jsonl"))
"""What the demo model answered to four prompts of each kind of our own: `forerun bench simulate --record FILE --count 4 --tokens 100`"""


@pytest.mark.parametrize("load", [1, 4, 16])
@pytest.mark.parametrize("kind", ["chat", "code", "maths", "repair", "copy", "all"])
def test_the_bars_hold_on_what_a_model_wrote(kind: str, load: int) -> None:
    """The controller was not tuned on these."""
    (scenario,) = [one for one in replayed(RECORDED, "suffix", loads=(load,)) if f"on {kind}," in one.name]
    (result,) = run([scenario], [fixed])
    assert result.over_plain("price") >= 0.99 and result.over_best("price") >= 0.95


def test_answers_are_kept_as_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "some" / "answers.jsonl"
    replay.save(file, ANSWERS[:2])
    assert replay.load(file) == ANSWERS[:2]
    assert main(["--answers", str(file), "--only", "all, 1"]) == 0
    assert "suffix on all" in capsys.readouterr().out


def test_a_fresh_drafter_for_a_few_answers_knows_nothing_of_the_others() -> None:
    """An answer that a drafter has seen it guesses whole; one that comes again before another drafter it does not."""
    twice = [*[one for one in ANSWERS if one.workload == "chat"][:1]] * 2
    together, apart = (list(fresh(twice, "suffix", each)) for each in (2, 1))
    assert [len(scenario.anew()) for scenario in [*together, *apart] if scenario.anew] == [2, 1, 1]
    first, second = (simulate(scenario, Always(8)).accepted for scenario in apart)
    assert first == second < simulate(together[0], Always(8)).accepted - first
