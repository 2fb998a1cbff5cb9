from __future__ import annotations

import pytest

from forerun.router.controller.journal import Journal, sources_of
from forerun.router.guesses import Round


@pytest.mark.parametrize(
    ("drafter", "names"),
    [
        ("none", []),
        ("suffix", ["suffix"]),
        ("ngram+suffix=chain", ["ngram", "suffix=chain"]),
        ("suffix+model=/models/a+B/small/", ["suffix", "model=small"]),
        ("model=/x/chat+model=/y/chat", ["model=chat", "model=chat#1"]),
    ],
)
def test_sources_are_named_as_they_were_asked_for(drafter: str, names: list[str]) -> None:
    assert sources_of(drafter) == names


def test_a_curve_says_what_a_draft_brings_and_follows_what_changes() -> None:
    journal = Journal(["suffix"])
    for _ in range(50):
        journal.heard(Round(1, 4, 3, 1, 10, 3, 0.01, 0.0, drafts=1), [([1, 1, 1], [1, 1, 0])])
    assert journal.curves()["suffix"].survival == [1.0, 1.0, 0.0]
    for _ in range(2000):
        journal.heard(Round(1, 3, 2, 1, 10, 1, 0.01, 0.0, drafts=1), [([1, 1], [0, 0])])
        journal.heard(Round(1, 1, 0, 0, 10, 1, 0.01, 0.0), [([], [])])
    curve = journal.curves()["suffix"]
    assert curve.survival == [0.0, 0.0, 0.0] and curve.drafted[:2] == [pytest.approx(200.0, rel=0.02)] * 2
    assert len(journal.rounds) == 64


def test_what_is_counted_belongs_to_its_source() -> None:
    journal = Journal(["a", "b"])
    journal.heard(Round(2, 5, 3, 2, 10, 4, 0.01, 0.0, drafts=2), [([1], [0]), ([1, 1], [1, 1])])
    assert journal.curves()["a"].accepted == [0.0] and journal.curves()["b"].survival == [0.5, 0.5]
