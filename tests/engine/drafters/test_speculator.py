"""A drafter that fails never fails a request: its rows go cold, then it is left alone."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from forerun.engine.drafters.asking import USUAL
from forerun.engine.drafters.dag import Dag
from forerun.engine.drafters.draft import FREE, Commit, Draft, Late, Needs, Silent, Terms
from forerun.engine.drafters.failures import MOST_FAILURES
from forerun.engine.drafters.speculator import Speculator
from forerun.engine.kv import Table
from forerun.engine.rows import Row, Share
from forerun.messages import Admit, Feed, SamplingParams, StepPlan
from tests.engine.tiny import LONGEST, VOCAB, Front, Sequence_, alone, params_for, tiny_engine

PROMPTS = [[1, 2, 3, 4, 5] * 4, [9, 8, 7] * 6]


class Faulty:
    """Guesses token 1 for ever, and raises in one of its verbs from the given call on."""

    def __init__(self, verb: str, lazy: bool = True, after: int = 0, times: int = 10**9) -> None:
        self.needs = Needs(most=8, lazy=lazy)
        self.verb, self.after, self.times = verb, after, times
        self.calls: list[str] = []

    def _call(self, verb: str) -> None:
        self.calls.append(verb)
        if verb == self.verb and self.calls.count(verb) > self.after and self.times > 0:
            self.times -= 1
            raise RuntimeError("the drafter broke")

    def absorb(self, commit: Commit) -> None:
        self._call("absorb")

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self._call("propose")
        return [Draft.chain([1] * most) for most in budget]

    def forget(self, rows: list[int]) -> None:
        self._call("forget")


def serve(drafter: object, rounds: int = 1, guess: int = 3) -> list[Sequence_]:
    front = Front(tiny_engine(drafter))  # type: ignore[arg-type]
    sequences = []
    for _ in range(rounds):
        for prompt in PROMPTS:
            sequences.append(Sequence_(prompt, params_for(prompt, max_new_tokens=6)))
            front.admit(sequences[-1])
        front.run(guess=guess)
    return sequences


EXPECTED = [alone(prompt, params_for(prompt, max_new_tokens=6)).answer for prompt in PROMPTS]


def test_what_a_drafter_had_to_do_without_is_told_once() -> None:
    """Each step's share of what it counts, joined or alone, and nothing of one that was silenced."""
    counts = [Late(3, 1, 7), Late(3, 1, 7), Late(50, 4, 9)]
    drafter = Silent()
    drafter.needs = Needs(most=4, late=lambda: counts.pop(0))
    speculator = Speculator(drafter, VOCAB, LONGEST, 4, 4)
    assert [speculator.late() for _ in range(3)] == [(3, 1, 7), (0, 0, 0), (47, 3, 2)]
    speculator._drafter = Silent()
    assert speculator.late() == Late()
    drafter.needs = Needs(most=4, late=lambda: Late(5, 2))
    assert Dag([drafter, drafter, Silent()], 4).needs.late() == Late(10, 4)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("verb", ["absorb", "propose", "forget"])
def test_every_request_is_answered(verb: str, after: int, lazy: bool, caplog: pytest.LogCaptureFixture) -> None:
    drafter = Faulty(verb, lazy, after)
    assert [s.answer for s in serve(drafter, rounds=6)] == EXPECTED * 6
    failures = [record for record in caplog.records if "the drafter failed" in record.message]
    assert len(failures) == MOST_FAILURES, "each failure is logged once; then it is not called any more"
    assert drafter.calls.count(verb) == after + MOST_FAILURES


def test_the_front_hears_of_each_failure_once() -> None:
    engine = tiny_engine(Faulty("propose", after=1, times=1))
    front = Front(engine)
    told: list[list[str]] = []
    step = engine.step
    engine.step = lambda plan: (result := step(plan), told.append(result.draft_failures))[0]  # type: ignore[method-assign]
    for prompt in PROMPTS:
        front.admit(Sequence_(prompt, params_for(prompt, max_new_tokens=6)))
    front.run(guess=3)
    assert [len(failures) for failures in told].count(1) == 1 and sum(map(len, told)) == 1
    assert "RuntimeError in propose: the drafter broke" in next(filter(None, told))[0]


def test_one_failure_makes_its_rows_cold_and_no_others() -> None:
    drafter = Faulty("propose", after=1, times=1)
    first = serve(drafter, rounds=2)
    assert [s.answer for s in first] == EXPECTED * 2
    assert sum(s.drafted for s in first[:2]) == 6, "one step of guesses before the failure"
    assert sum(s.drafted for s in first[2:]) > 6, "rows admitted later are guessed for again"


class Malformed(Faulty):
    def __init__(self, drafts: list[Draft]) -> None:
        super().__init__("")
        self.drafts = drafts

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self._call("propose")
        return self.drafts


@pytest.mark.parametrize(
    "drafts",
    [
        [],
        [Draft.chain([1])] * 3,
        [Draft([1, 2], [1, -1], [1.0] * 2, [False] * 2)] * 2,
        [Draft([1], [-1], [], [False])] * 2,
        [Draft.chain([1], [math.nan])] * 2,
        None,
    ],
)
def test_a_malformed_proposal_is_a_failure(drafts: list[Draft], caplog: pytest.LogCaptureFixture) -> None:
    assert [s.answer for s in serve(Malformed(drafts))] == EXPECTED
    assert "the drafter failed in propose" in caplog.text


def test_illegal_ids_and_too_many_nodes_are_cut_quietly(caplog: pytest.LogCaptureFixture) -> None:
    greedy = Malformed([Draft.chain([VOCAB, 1, 2]), Draft.chain([5] * 500)])
    sequences = serve(greedy)
    assert [s.answer for s in sequences] == EXPECTED
    assert sequences[0].drafted == 0 and 0 < sequences[1].drafted <= 3 * 6
    assert not caplog.records


def test_budget_and_price_bound_the_nodes() -> None:
    class Doubtful(Faulty):
        def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
            return [Draft.chain([1] * most, [0.5] * most) for most in budget]

    for price, depth in ((0.0, 8), (0.3, 1), (0.1, 3), (0.6, 0)):
        front = Front(tiny_engine(Doubtful("")))
        prompt = PROMPTS[0]
        sequence = Sequence_(prompt, params_for(prompt, max_new_tokens=20))
        front.admit(sequence)
        front.step()
        front.step(guess=8, price=price)
        assert sequence.drafted == depth


def chosen(weights: dict[int, float], toll: list[float], budget: int = 8, rejects: bool = False) -> list[int]:
    """How many nodes two rows with the same draft keep, of a chain in which each guess holds half of the time."""

    class Even(Faulty):
        def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
            drafts = [Draft.chain([1] * most, [0.5] * most) for most in budget]
            return [dataclasses.replace(draft, law=[np.full(VOCAB, 1 / VOCAB)] * draft.count) if rejects else draft for draft in drafts]

    params = params_for([1, 2, 3], max_new_tokens=50)
    table = Table(2, 64, 16)
    shares = []
    for number in range(2):
        table.grant(number, range(4 * number, 4 * number + 4))
        shares.append(Share(Row.open(number, params, [1, 2, 3], 2), 1, 4, Draft.none(), []))
    speculator = Speculator(Even(""), VOCAB, 64, 8, 16, rejects)
    speculator.draft(shares, table, StepPlan(1, budget=budget, toll=toll, weights=weights))
    return [share.draft.count for share in shares]


def test_where_weights_differ_the_urgent_row_gets_the_guesses() -> None:
    """A node is kept if weight times survival is worth its toll; without weights equal rows are served alike."""
    dear = [0.2 * (n + 1) for n in range(8)]
    alike = chosen({}, dear)
    assert alike[0] == alike[1]
    first, second = chosen({0: 4.0, 1: 0.25}, dear)
    assert first > alike[0] > second or (first > second == 0 and alike[0] <= 1)
    assert chosen({0: 0.25, 1: 4.0}, dear) == [second, first]
    assert chosen({0: 4.0}, dear)[1] == alike[1], "a row that has none weighs one"


def test_a_budget_bounds_also_what_is_worth_its_toll() -> None:
    """Beside prompts a step has room for few guesses, whatever they would bring."""
    cheap = [0.001 * (n + 1) for n in range(8)]
    assert chosen({}, cheap) == [4, 4]
    assert [sum(chosen({}, cheap, budget)) for budget in (5, 1, 0)] == [5, 1, 0]
    assert chosen({}, cheap, 5, rejects=True) == [4, 1], "drawn drafts take of it in turn"


def test_a_step_tells_the_front_what_its_drafter_caught_up_with() -> None:
    """Where the drafter says how far it is; the front knows of the others that they read all at once."""
    drafter = Faulty("")
    left = [300]

    def propose(rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        left[0] -= min(left[0], 128)
        return [Draft.none()] * len(rows)

    drafter.propose = propose  # type: ignore[method-assign]
    params = SamplingParams(seed=0, prompt_tokens=5, max_new_tokens=9)

    def told() -> list[int]:
        engine = tiny_engine(drafter)
        first = engine.step(StepPlan(1, [Admit(0, [1, 2, 3, 4, 5], 0, [0, 1], params)], [Feed(0, 5)]))
        return [first.caught_up, *(engine.step(StepPlan(step, feed=[Feed(0, 1, 4)], budget=4)).caught_up for step in range(2, 6))]

    assert told() == [-1] * 5
    left[0] = 300
    drafter.needs = dataclasses.replace(drafter.needs, behind=lambda row: left[0])
    assert told() == [0, 128 - USUAL, 128 - USUAL, 44 - USUAL, 0]
