"""The walk, against the sentence that defines it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.drafters.draft import Draft
from forerun.engine.verify import walk


def walk_slowly(draft: Draft, picks: list[int]) -> list[int]:
    path: list[int] = []
    at = -1
    while True:
        children = [i for i in range(draft.count) if draft.parent[i] == at and not draft.probe[i] and draft.token[i] == picks[at + 1]]
        if not children:
            return path
        at = children[0]
        path.append(at)


@given(st.data())
def test_walk(data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 14))
    parent = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
    token = [data.draw(st.integers(0, 2)) for _ in range(n)]
    probe = [data.draw(st.integers(0, 3)) == 0 for _ in range(n)]
    draft = Draft(token, parent, [1.0] * n, probe)
    picks = [data.draw(st.integers(-1, 2)) for _ in range(n + 1)]
    assert walk(draft, picks) == walk_slowly(draft, picks)


def test_a_chain_is_accepted_up_to_the_first_miss() -> None:
    assert walk(Draft.chain([4, 5, 6]), [4, 5, 6, 7]) == [0, 1, 2]
    assert walk(Draft.chain([4, 5, 6]), [4, 9, 6, 7]) == [0]
    assert walk(Draft.none(), [4]) == []
