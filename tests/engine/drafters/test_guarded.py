"""A drafter among others that fails: those beside it go on, for the same rows and in the same step."""

from __future__ import annotations

import dataclasses
import math

import pytest

from forerun.engine.drafters.dag import Dag
from forerun.engine.drafters.draft import Commit, Draft
from forerun.engine.drafters.failures import MOST_FAILURES
from forerun.engine.drafters.guarded import Guarded
from tests.engine.drafters.test_speculator import EXPECTED, PROMPTS, Faulty, Malformed
from tests.engine.tiny import Front, Sequence_, params_for, tiny_engine


class Heard(Faulty):
    """Never raises, and remembers what it was told."""

    def __init__(self) -> None:
        super().__init__("")
        self.rows: list[int] = []

    def absorb(self, commit: Commit) -> None:
        self.rows += commit.rows

    def forget(self, rows: list[int]) -> None:
        return None


def told(*rows: int, start: int = 0) -> Commit:
    return Commit(list(rows), [start] * len(rows), [[7, 8]] * len(rows), [9] * len(rows))


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("verb", ["absorb", "propose", "forget"])
def test_the_others_go_on_and_every_request_is_answered(verb: str, lazy: bool, caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Faulty(verb, lazy), Faulty("", lazy)
    engine = tiny_engine(Dag([broken, sound], 8, names=["broken", "sound"]))
    front, news = Front(engine), []
    step = engine.step
    engine.step = lambda plan: (result := step(plan), news.extend(result.draft_failures))[0]  # type: ignore[method-assign]
    sequences = []
    for _ in range(6):
        for prompt in PROMPTS:
            sequences.append(Sequence_(prompt, params_for(prompt, max_new_tokens=6)))
            front.admit(sequences[-1])
        front.run(guess=3)
    assert [s.answer for s in sequences] == EXPECTED * 6
    assert broken.calls.count(verb) == MOST_FAILURES
    assert all(s.drafted for s in sequences), "the source that did not fail guessed for every request"
    lines = [record.getMessage() for record in caplog.records if "failed in" in record.getMessage()]
    assert len(lines) == len(news) == MOST_FAILURES and all("broken" in line for line in [*lines, *news])
    assert "is not asked again" in news[-1]


@pytest.mark.parametrize(
    "drafts",
    [[], [Draft.chain([1])] * 3, [Draft([1, 2], [1, -1], [1.0] * 2, [False] * 2)] * 2, [Draft.chain([1], [math.nan])] * 2, None],
)
def test_what_is_no_draft_is_a_failure_of_its_source_alone(drafts: list[Draft]) -> None:
    dag = Dag([Malformed(drafts), Faulty("")], 8)
    dag.absorb(told(1, 2))
    for _ in range(2 * MOST_FAILURES):
        assert [draft.token for draft in dag.propose([1, 2], [3, 2])] == [[1] * 3, [1] * 2]
    assert sum("it is not asked again" in line for line in dag.needs.news()) <= 1


def test_a_row_that_it_failed_at_is_cold_until_it_begins_anew() -> None:
    drafter = Heard()
    guarded = Guarded(drafter, "a drafter")
    drafter.verb, drafter.times = "propose", 1
    assert [draft.count for draft in guarded.propose([1], [2])] == [0] and guarded.failures.count == 1
    assert [draft.count for draft in guarded.propose([1, 2], [2, 2])] == [0, 2]
    guarded.absorb(told(1, 2, start=3))
    assert drafter.rows == [2], "what a cold row became is not told"
    guarded.absorb(told(1, start=3))
    assert drafter.rows == [2] and guarded.propose([1], [2]) == [Draft.none()]
    guarded.absorb(told(1))
    assert drafter.rows == [2, 1] and guarded.propose([1], [2])[0].count == 2
    drafter.times = 1
    guarded.propose([1], [2])
    guarded.forget([1])
    assert guarded.propose([1], [2])[0].count == 2 and guarded.failures.count == 2


def test_how_far_it_is_behind_is_nothing_where_it_failed() -> None:
    drafter = Faulty("propose", times=1)
    drafter.needs = dataclasses.replace(drafter.needs, behind={1: 5, 2: 7}.__getitem__)
    guarded = Guarded(drafter, "a drafter")
    assert guarded.behind([2, 1]) == [7, 5]
    guarded.propose([1], [2])
    assert guarded.behind([2, 1]) == [7, 0] and guarded.failures.count == 1
    assert guarded.behind([3, 2]) == [0, 0] and guarded.failures.count == 2, "a failure to say is one as well"
    assert guarded.behind([2, 1]) == [0, 0]


def test_news_are_told_once() -> None:
    guarded = Guarded(Faulty("absorb", times=1), "a drafter")
    guarded.absorb(told(4))
    assert len(guarded.news()) == 1 and not guarded.news()
