"""What is put off is told in the end: the same words, in the same order, whenever somebody wants to know."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forerun.engine.drafters import ear
from forerun.engine.drafters.draft import Commit
from forerun.engine.drafters.ear import Ear


class Book:
    """A listener that knows each row's text, features and newest token. `told`: how many commits it took."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[list[int], list[float], int | None]] = {}
        self.told = 0
        self.trouble = False
        """it raises, in the middle of what it is told"""

    def lose(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.rows.pop(row, None)

    def learn(self, commit: Commit) -> None:
        assert commit.features is not None and commit.prompt is not None
        self.told += 1
        for row, start, tokens, newest, features in zip(
            commit.rows, commit.start, commit.tokens, commit.next, commit.features, strict=True
        ):
            text, seen, _ = self.rows.get(row, ([], [], None)) if start else ([], [], None)
            assert len(text) == start, "nothing is left out and nothing comes twice"
            self.rows[row] = ([*text, *tokens], [*seen, *features[:, 0].tolist()], newest)
            if self.trouble:
                raise RuntimeError("the book is full")


def step(rows: dict[int, tuple[int, int]], beside: int = 0, width: int = 3) -> Commit:
    """row → (start, tokens): features are views of one step's, in which `beside` rows came to nothing."""
    whole = torch.zeros(sum(count for _, count in rows.values()) + beside, width)
    features: list[Tensor] = []
    at = 0
    for row, (start, count) in rows.items():
        whole[at : at + count] = torch.arange(start, start + count)[:, None] + 1000.0 * row
        features.append(whole[at : at + count])
        at += count
    tokens = [list(range(start, start + count)) for start, count in rows.values()]
    newest: list[int | None] = [start + count for start, count in rows.values()]
    return Commit(list(rows), [start for start, _ in rows.values()], tokens, newest, features, [1] * len(rows))


@pytest.mark.parametrize("seed", range(20))
def test_in_the_end_everything_is_known(seed: int) -> None:
    dice = random.Random(seed)
    book = Book()
    listener = Ear(book.learn, book.lose)
    known: dict[int, int] = {}
    for _ in range(300):
        some = dice.sample(range(4), dice.randrange(1, 5))
        rows = {row: (known.get(row, 0), dice.choice([1, 1, 1, 2, 5])) for row in some}
        listener.hear(step(rows, dice.choice([0, 0, 9])))
        known |= {row: start + count for row, (start, count) in rows.items()}
        if dice.random() < 0.05:
            listener.heed()
            assert {row: len(text) for row, (text, _, _) in book.rows.items()} == known
        if dice.random() < 0.02:
            listener.heed()
            gone = dice.choice(list(known))
            known.pop(gone)
            book.rows.pop(gone)
    listener.heed()
    for row, (text, seen, newest) in book.rows.items():
        assert text == list(range(len(text))) and seen == [1000.0 * row + place for place in text] and newest == len(text)


def test_steps_are_told_together_and_beginnings_at_once() -> None:
    book = Book()
    listener = Ear(book.learn, book.lose)
    listener.hear(step({0: (0, 40), 1: (0, 3)}))
    assert book.told == 1
    for place in range(ear.STEPS):
        listener.hear(step({0: (40 + place, 1), 1: (3 + place, 1)}))
    assert book.told == 1
    listener.hear(step({2: (0, 5)}))
    assert book.told == 3 and len(book.rows[0][0]) == 40 + ear.STEPS
    listener.heed()
    assert book.told == 3


def test_what_went_astray_is_lost_row_by_row_and_nobody_is_told_the_rest() -> None:
    """The failure is in telling of four rows, and whoever asked may have asked about one."""
    book = Book()
    listener = Ear(book.learn, book.lose)
    listener.hear(step(dict.fromkeys(range(6), (0, 3))))
    listener.hear(step(dict.fromkeys(range(4), (3, 1))))
    listener.hear(step(dict.fromkeys(range(1, 3), (4, 1))))
    book.trouble = True
    with pytest.raises(RuntimeError):
        listener.heed()
    book.trouble = False
    assert book.rows.keys() == {4, 5}
    listener.hear(step({0: (4, 1), 4: (3, 1)}))
    listener.hear(step({3: (4, 1)}))
    listener.heed()
    assert book.rows.keys() == {4, 5} and len(book.rows[4][0]) == 4
    listener.hear(step({0: (0, 2)}))
    listener.hear(step({0: (2, 1), 1: (5, 1)}))
    listener.heed()
    assert book.rows.keys() == {0, 4, 5} and len(book.rows[0][0]) == 3


def test_what_is_told_at_once_goes_astray_in_the_same_way() -> None:
    book = Book()
    listener = Ear(book.learn, book.lose)
    listener.hear(step({2: (0, 3)}))
    book.trouble = True
    with pytest.raises(RuntimeError):
        listener.hear(step({0: (0, 3), 1: (0, 2)}))
    book.trouble = False
    listener.hear(step({0: (3, 1), 2: (3, 1)}))
    listener.heed()
    assert book.rows.keys() == {2} and len(book.rows[2][0]) == 4
    listener.hear(step({0: (0, 2)}))
    assert book.rows.keys() == {0, 2}


def test_what_is_put_off_holds_little_memory() -> None:
    """Also where most of a step came to nothing; and a step that is large by itself is told at once."""
    book = Book()
    listener = Ear(book.learn, book.lose)
    listener.hear(step({0: (0, 1)}))
    for place in range(1, 40):
        listener.hear(step({0: (place, 1)}, beside=99))
        assert 100 * (place + 1 - len(book.rows[0][0])) <= ear.ROWS
    listener.hear(step({0: (40, 1)}, beside=ear.ROWS))
    assert len(book.rows[0][0]) == 41


def test_features_that_are_missing_are_no_reason_to_wait() -> None:
    """A commit that says less than a feature row for each token is not put off."""
    told: list[Commit] = []
    listener = Ear(told.append, [].extend)
    partial = dataclasses.replace(step({0: (5, 2)}), features=[torch.zeros(1, 3)])
    bare = dataclasses.replace(step({0: (7, 1)}), features=None)
    for commit in (partial, bare):
        listener.hear(commit)
    assert told == [partial, bare]
