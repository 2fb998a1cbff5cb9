"""Rows and pages that change hands at once: what left a moment ago is the next one's, in the same plan, with whatever guesses were under
way, and there is not always room for guesses. By registration, as `test_registered.py`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.messages import Emit, Feed
from tests.engine.test_identity import ALL as KINDS
from tests.engine.test_identity import fresh, shared_prefix, truth
from tests.engine.test_registered import ALL, open_any
from tests.engine.tiny import Front, Sequence_, tiny_engine

QUICK = [
    "suffix",
    "lookahead",
    "model={itself}",
    "eagle={eagle3},beams=3",
    "suffix+dspark={dspark}",
    next(spec for spec in ALL if "{modules}" in spec),
]


class Greedy(Front):
    """The newest free row and the newest free pages are taken first. `step_with`: pages for guesses only where there is room, or where the
    test wants them."""

    def __init__(self, spec: str, rows: int = 3) -> None:
        super().__init__(tiny_engine(open_any(spec)))
        self.free_rows = list(range(rows))

    def admit(self, sequence: Sequence_, shared: list[int] | tuple[int, ...] = ()) -> None:  # type: ignore[override]
        self.free_rows.insert(0, self.free_rows.pop())
        super().admit(sequence, shared)

    def step_with(self, data: st.DataObject) -> list[Emit]:
        """A plan in which every row has its own share of known tokens and of guesses, and pages for some of these."""
        size, feeds, fed = self.engine.ready.page_tokens, [], []
        for sequence in self.running:
            left = len(sequence.all) - sequence.computed
            known = min(left, data.draw(st.sampled_from([0, 1, 5, 64, 64])))
            if not known:
                continue
            most = data.draw(st.sampled_from([0, 1, 6])) if known == left else 0
            room = data.draw(st.sampled_from([0, 1, most]))
            need = -(-(sequence.computed + known + min(room, most)) // size) - len(sequence.pages)
            granted = [self.free_pages.pop() for _ in range(max(0, need))]
            for page in granted:
                self.users[page] += 1
            sequence.pages += granted
            feeds.append(Feed(sequence.row, known, most, granted))
            fed.append((sequence, known))
        toll = data.draw(st.sampled_from([[], [0.01 * n for n in range(1, 20)]]))
        budget = data.draw(st.sampled_from([3, 40]))
        return self._send(feeds, fed, budget=budget, price=0.02, toll=toll)


def change_hands(spec: str, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=5))
    answers = [truth(name, 20 + i % 2, 34) for i, name in enumerate(names)]
    front = Greedy(spec)
    kept = [fresh(answer) for answer in answers]
    told = {id(sequence): answer for sequence, answer in zip(kept, answers)}
    queue, gone = list(kept), list[Sequence_]()
    for _ in range(40):
        for sequence in list(front.running):
            fate = data.draw(st.integers(0, 11))
            if fate == 0:  # preempted, to come back
                front.leave(sequence)
                queue.append(sequence)
            elif fate == 1:  # given up; another with the same prompt begins in its place
                front.leave(sequence)
                kept.remove(sequence)
                gone.append(sequence)  # and its id with it
                again = fresh(told[id(sequence)])
                told[id(again)] = told[id(sequence)]
                kept.append(again)
                queue.insert(0, again)
        while queue and front.free_rows and data.draw(st.booleans()):
            sequence = queue.pop(0)
            front.admit(sequence, shared_prefix(front, sequence, data))
        front.step_with(data)
    for sequence in queue:
        while not front.free_rows:
            front.step(guess=4)
        front.admit(sequence)
    front.run(guess=4)
    for sequence in kept:
        assert sequence.answer == told[id(sequence)].answer
    front.step()
    assert len(front.free_pages) == front.engine.ready.pages and front.engine._speculator.failures.count == 0


@pytest.mark.parametrize("spec", QUICK)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_rows_and_pages_change_hands_at_once(spec: str, data: st.DataObject) -> None:
    change_hands(spec, data)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ALL)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_rows_and_pages_change_hands_at_once_for_long(spec: str, data: st.DataObject) -> None:
    change_hands(spec, data)
