"""What `ngram` and `suffix` propose, what they remember, and what they never do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.drafters import suffix
from forerun.engine.drafters.draft import Commit, Draft, Drafter
from forerun.engine.drafters.history import LONGEST
from forerun.engine.drafters.ngram import Ngram
from forerun.engine.drafters.suffix import Suffix

MAKERS: dict[str, Callable[[int], Drafter]] = {
    "ngram": Ngram,
    "suffix": Suffix,
    "chain": lambda most: Suffix(most, tree=False),
    "private": lambda most: Suffix(most, shared=False),
}


def tell(drafter: Drafter, row: int, prompt: list[int], answer: list[int], heard: int = 0, scope: str = "") -> None:
    """A lazy catch-up: all that is known of the row behind its first `heard` tokens, the newest as `next`."""
    known = prompt + answer
    drafter.absorb(Commit([row], [heard], [known[heard:-1]], [known[-1]], prompt=[len(prompt)], scope=[scope]))


def asked(drafter: Drafter, text: list[int], most: int = 8, scope: str = "") -> Draft:
    """The draft for a row with this text alone."""
    tell(drafter, 0, text, [], scope=scope)
    draft = drafter.propose([0], [most])[0]
    drafter.forget([0])
    return draft


@pytest.mark.parametrize("name", MAKERS)
class TestAll:
    def test_what_followed_before_is_guessed(self, name: str) -> None:
        assert asked(MAKERS[name](8), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 3]).token[:4] == [4, 5, 6, 7]

    def test_the_newest_of_equal_matches(self, name: str) -> None:
        assert asked(MAKERS[name](8), [1, 2, 3, 7, 9, 1, 2, 3, 8, 9, 5, 1, 2, 3], 1).token == [8]

    def test_the_longest_match(self, name: str) -> None:
        assert asked(MAKERS[name](8), [5, 1, 2, 3, 7, 9, 4, 1, 2, 3, 8, 9, 5, 1, 2, 3], 1).token == [7]

    def test_a_loop_goes_on(self, name: str) -> None:
        """The continuation of a match that ends in itself repeats."""
        assert asked(MAKERS[name](9), [7, 1, 2, 1, 2, 1, 2, 1], 9).token == [2, 1] * 4 + [2]
        assert asked(MAKERS[name](6), [4] * 40, 6).token == [4] * 6

    def test_nothing_known_nothing_guessed(self, name: str) -> None:
        drafter = MAKERS[name](8)
        assert asked(drafter, [1, 2, 3, 4]).count == asked(drafter, [9]).count == 0
        assert drafter.propose([5], [8])[0].count == 0, "a row never heard of"
        tell(drafter, 1, [3, 3], [])
        assert drafter.propose([1], [0])[0].count == 0

    def test_a_row_number_is_used_again(self, name: str) -> None:
        """Also when nobody said that the first sequence left."""
        drafter = MAKERS[name](8)
        tell(drafter, 0, [1, 2, 3, 4, 1, 2], [])
        tell(drafter, 0, [9, 8, 2], [])
        assert drafter.propose([0], [8])[0].count == 0

    def test_forgetting_is_idempotent_and_leaves_nothing(self, name: str) -> None:
        drafter = MAKERS[name](8)
        tell(drafter, 0, [1, 2, 1], [])
        drafter.propose([0], [4])
        drafter.forget([0, 3])
        drafter.forget([0])
        assert not drafter._rows and not drafter.calibration._proposed  # type: ignore[attr-defined]

    def test_guesses_are_never_taken_for_facts(self, name: str) -> None:
        """A drafter that proposes all the time and one that only listens, and that in other portions, know the same in the end."""
        dice = random.Random(3)
        text = [dice.randrange(6) for _ in range(200)]
        busy, quiet = MAKERS[name](8), MAKERS[name](8)
        read(busy, text, range(20, 201), guess=8)
        read(quiet, text, [20, 21, 57, 58, 130, 200], guess=0)
        quiet.calibration = busy.calibration  # type: ignore[attr-defined]
        first, second = busy.propose([0], [8]), quiet.propose([0], [8])
        assert first == second and first[0].count
        busy.forget([0])
        quiet.forget([0])
        assert asked(busy, text[:9]) == asked(quiet, text[:9]), "also what was shared"

    def test_confidence_is_learned(self, name: str) -> None:
        """Where the text goes its own way a guess is soon worth little, where it repeats itself much; and again when that changes."""
        dice = random.Random(5)
        drafter = MAKERS[name](4)
        noise = [dice.randrange(12) for _ in range(3000)]
        read(drafter, noise, range(2, 3001), guess=4)
        assert first_guess(drafter) == pytest.approx(1 / 12, abs=0.1)
        drafter.forget([0])
        chorus = [dice.randrange(1000) for _ in range(60)] * 20
        read(drafter, chorus, range(2, 1201), guess=4)
        assert first_guess(drafter) > 0.9
        drafter.forget([0])
        read(drafter, noise, range(2, 3001), guess=4)
        assert first_guess(drafter) == pytest.approx(1 / 12, abs=0.1)


def read(drafter: Drafter, text: list[int], known: Iterable[int], guess: int) -> None:
    """Row 0 hears of so many tokens of the text, one after the other, and drafts each time if it may."""
    heard = 0
    for count in known:
        tell(drafter, 0, text[:1], text[1:count], heard)
        heard = count - 1
        if guess:
            drafter.propose([0], [guess])


def first_guess(drafter: Drafter) -> float:
    return drafter.propose([0], [1])[0].confidence[0]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.integers(0, 12),
    st.sampled_from(sorted(MAKERS)),
    st.lists(st.integers(0, 4), max_size=40),
)
def test_a_draft_is_a_well_formed_tree(text: list[int], most: int, name: str, other: list[int]) -> None:
    drafter = MAKERS[name](16)
    tell(drafter, 1, [0], [*other, 0])
    drafter.forget([1])
    draft = asked(drafter, text, most)
    assert draft.count <= most and len(draft.parent) == len(draft.confidence) == len(draft.probe) == draft.count
    assert all(-1 <= parent < i for i, parent in enumerate(draft.parent)) and not any(draft.probe)
    assert len({tuple(path) for path in draft.paths()}) == draft.count, "no two siblings carry the same token"
    assert all(0 < confidence < 1 for confidence in draft.confidence)
    assert set(draft.token) <= {*text, *other, 0}, "also a gap is no token"
    if name in ("ngram", "chain"):
        assert draft.parent == list(range(-1, draft.count - 1))
    survival: list[float] = []
    for parent, confidence in zip(draft.parent, draft.confidence):
        survival.append(confidence * (survival[parent] if parent >= 0 else 1))
    assert survival == sorted(survival, reverse=True) or survival == pytest.approx(sorted(survival, reverse=True))


class TestSuffix:
    def test_siblings_best_first(self) -> None:
        draft = asked(Suffix(8), [1, 2, 3, 7, 9, 1, 2, 3, 7, 8, 1, 2, 3, 4, 6, 1, 2, 3])
        roots = [token for token, parent in zip(draft.token, draft.parent) if parent < 0]
        assert roots[:2] == [7, 4], "two of three, then one of three"
        assert sorted(token for token, parent in zip(draft.token, draft.parent) if parent == draft.token.index(7)) == [8, 9]

    def test_a_chain_follows_the_likeliest(self) -> None:
        assert asked(Suffix(2, tree=False), [1, 2, 3, 7, 9, 1, 2, 3, 7, 9, 1, 2, 3, 4, 6, 1, 2, 3], 2).token == [7, 9]

    def test_answers_are_shared_prompts_are_not(self) -> None:
        drafter = Suffix(8)
        tell(drafter, 1, [50, 51, 52, 53, 54], [60, 61, 62, 63, 64])
        assert asked(drafter, [9, 60, 61, 62]).count == 0, "not before it has ended"
        drafter.forget([1])
        assert asked(drafter, [9, 60, 61, 62]).token == [63, 64]
        assert asked(drafter, [9, 50, 51, 52]).count == 0
        assert asked(drafter, [9, 54]).count == 0, "nor what the answer began with"

    def test_private(self) -> None:
        drafter = Suffix(8, shared=False)
        tell(drafter, 1, [5], [60, 61, 62, 63, 64])
        drafter.forget([1])
        assert asked(drafter, [9, 60, 61, 62]).count == 0 and not drafter._shared

    def test_scopes_do_not_hear_each_other(self) -> None:
        drafter = Suffix(8)
        tell(drafter, 1, [5], [60, 61, 62, 63, 64], scope="a")
        drafter.forget([1])
        assert asked(drafter, [9, 60, 61, 62], scope="b").count == asked(drafter, [9, 60, 61, 62]).count == 0
        assert asked(drafter, [9, 60, 61, 62], scope="a").token == [63, 64]

    def test_the_scope_written_to_longest_ago_makes_room(self) -> None:
        drafter = Suffix(8)
        for i in [*range(suffix.MOST_SCOPES), 0, suffix.MOST_SCOPES]:
            tell(drafter, 1, [5], [60, 61, 62, 63], scope=str(i))
            drafter.forget([1])
        assert len(drafter._shared) == suffix.MOST_SCOPES
        assert {i for i in range(suffix.MOST_SCOPES + 1) if not asked(drafter, [60, 61], scope=str(i)).count} == {1}

    def test_old_answers_fall_out(self) -> None:
        drafter = Suffix(8, shared_tokens=200)
        for i in range(100):
            tell(drafter, 1, [5], [1000 + 10 * i + k for k in range(10)])
            drafter.forget([1])
            assert drafter._shared[""].held <= 2 * 200 + 11
            assert asked(drafter, [1000 + 10 * i, 1001 + 10 * i]).token[:2] == [1002 + 10 * i, 1003 + 10 * i]
        assert asked(drafter, [1000, 1001]).count == 0 and asked(drafter, [1800, 1801]).count > 0

    def test_two_answers_are_no_text(self) -> None:
        """Nothing is guessed across the end of an answer, and nothing matches across it."""
        drafter = Suffix(8)
        for answer in ([60, 61, 62], [70, 71, 72]):
            tell(drafter, 1, [5], answer)
            drafter.forget([1])
        assert asked(drafter, [9, 61]).token == [62]
        assert asked(drafter, [9, 62]).count == 0 and asked(drafter, [62, 70]).confidence == asked(drafter, [8, 70]).confidence

    def test_others_are_asked_when_the_text_itself_does_not_know(self) -> None:
        drafter = Suffix(8)
        tell(drafter, 1, [5], [1, 2, 3, 60, 61])
        drafter.forget([1])
        assert set(asked(drafter, [7, 3, 8, 9, 1, 2, 3]).token) == {8, 9, 1, 2, 3, 60, 61}
        assert 60 not in asked(drafter, [1, 2, 3, 8, 9, 1, 2, 3]).token

    def test_a_long_text_is_forgotten_at_its_start(self) -> None:
        drafter = Suffix(8, own_tokens=100)
        text = list(range(1000))
        read(drafter, text, [500, 1000], guess=4)
        assert drafter._rows[0].history.held <= 2 * 100 + 500
        drafter.forget([0])
        assert drafter._shared[""].held > 2

    def test_memory_of_a_row_is_bounded(self) -> None:
        drafter = Suffix(8)
        read(drafter, list(range(100)) * 800, range(1000, 80_001, 1000), guess=0)
        assert drafter._rows[0].history.held <= 2 * suffix.LOCAL_TOKENS + 1001
        assert drafter.propose([0], [8])[0].token == list(range(8))


def test_long_matches_count_as_long_as_the_longest() -> None:
    text = list(range(100)) * 3
    assert asked(Suffix(16), text, 16).token == list(range(16)) and LONGEST < 100
