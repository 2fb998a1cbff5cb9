"""Look-ups in C++ propose what those in Python propose, bit by bit; and there are look-ups where there is no compiler."""

from __future__ import annotations

import logging
import random
from array import array
from pathlib import Path

import numpy as np
import pytest

from forerun.engine.drafters import grams, lookups
from forerun.engine.drafters.dag import Dag
from forerun.engine.drafters.draft import Commit, Drafter, Terms
from forerun.engine.drafters.lookups import Lookups
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.drafters.suffix import Suffix, Texts
from forerun.kernels.cpu.build import BuildError
from forerun.kernels.lookup.build import build, built


def some_table(dice: random.Random, vocab: int) -> grams.Table:
    keys: set[int] = set()
    for _ in range(dice.randrange(1, 200)):
        key = 0
        for _ in range(dice.randrange(1, grams.ORDER + 1)):
            key = grams.extended(key, dice.randrange(vocab))
        keys.add(key)
    tokens = np.full((len(keys), grams.FOLLOWERS), -1, np.int32)
    chances = np.zeros((len(keys), grams.FOLLOWERS), np.uint8)
    for place in range(len(keys)):
        count = dice.randrange(1, min(grams.FOLLOWERS, vocab) + 1)
        tokens[place, :count] = dice.sample(range(vocab), count)
        chances[place, :count] = sorted((dice.choice([1, 5, 40, 80, 85, 128, 255]) for _ in range(count)), reverse=True)
    return grams.Table(np.array(sorted(keys), np.int64), tokens, chances, vocab)


class Life:
    """Rows that begin, go on (often as they did before), begin anew and end; two drafters that hear and are asked the same."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.vocab, self.most = dice.choice([2, 3, 5, 12, 40]), dice.choice([1, 3, 8, 16])
        tree, shared = dice.random() < 0.8, dice.random() < 0.8
        texts = Texts(self.most, tree, shared, dice.choice([16, 64, 1 << 17]), dice.choice([16, 100, 1 << 15]))
        table = some_table(dice, self.vocab) if dice.random() < 0.7 else None
        most = min(self.most, grams.MOST)
        python: Drafter = Suffix(*texts)
        if table is not None:
            python = Dag([python, grams.Grams(table, most, tree)], self.most, tree)
        self.both = python, Lookups(build(), texts, table, most)
        self.texts: dict[int, list[int]] = {}
        self.scopes: dict[int, str] = {}
        self.heard: dict[int, int] = {}
        self.nodes = 0

    def step(self) -> None:
        dice = self.dice
        if dice.random() < 0.1 or not self.texts:
            number = dice.randrange(5)
            self.texts[number] = [dice.randrange(self.vocab) for _ in range(dice.choice([2, 10, 300]))]
            self.scopes[number], self.heard[number] = dice.choice(["", "x", "ä"]), 0
        if dice.random() < 0.05:
            self.end(dice.sample(sorted(self.texts), dice.randrange(1, len(self.texts) + 1)))
            return
        rows = dice.sample(sorted(self.texts), dice.randrange(1, len(self.texts) + 1))
        self.tell(rows)
        if dice.random() < 0.8:
            self.ask(dice.sample(rows, dice.randrange(1, len(rows) + 1)))

    def tell(self, rows: list[int]) -> None:
        start = [self.heard[number] for number in rows]
        for number in rows:
            text = self.texts[number]
            for _ in range(self.dice.randrange(1, 4) if self.heard[number] else 0):
                again = self.dice.random() < 0.6
                text.append(text[-self.dice.randrange(1, min(len(text), 6) + 1)] if again else self.dice.randrange(self.vocab))
            self.heard[number] = len(text) - 1
        tokens = [self.texts[number][first:-1] for number, first in zip(rows, start)]
        prompt = [self.dice.randrange(1, 9) for _ in rows]
        newest: list[int | None] = [self.texts[number][-1] for number in rows]
        for drafter in self.both:
            drafter.absorb(Commit(rows, start, tokens, newest, None, prompt, [self.scopes[number] for number in rows]))

    def ask(self, rows: list[int]) -> None:
        budget = [self.dice.randrange(1, self.most + 1) for _ in rows]
        terms = Terms(price=self.dice.choice([0.0, 0.1, 0.5, 1.2]))
        for ours, theirs in zip(*(drafter.propose(rows, budget, terms) for drafter in self.both), strict=True):
            assert (ours.token, ours.parent, ours.probe) == (theirs.token, theirs.parent, theirs.probe)
            assert ours.confidence == theirs.confidence and list(ours.source) == list(theirs.source)
            self.nodes += ours.count

    def end(self, rows: list[int]) -> None:
        for drafter in self.both:
            drafter.forget(rows)
        for number in rows:
            del self.texts[number], self.scopes[number], self.heard[number]


@pytest.mark.parametrize("seed", range(24))
def test_both_forms_propose_the_same(seed: int) -> None:
    life = Life(seed)
    for _ in range(200):
        life.step()
    assert life.nodes > 100


def test_a_row_with_a_hole_is_refused_and_others_go_on() -> None:
    drafter = Lookups(build(), Texts())
    drafter.absorb(Commit([0], [0], [[1, 2, 3, 1, 2]], [3]))
    with pytest.raises(ValueError, match="row 1 goes on at position 4"):
        drafter.absorb(Commit([1], [4], [[1]], [2]))
    assert drafter.propose([0], [1])[0].token == [1]


def test_what_is_told_waits_for_a_question_but_not_for_ever() -> None:
    drafter = Lookups(build(), Texts())
    for _ in range(8):
        drafter.absorb(Commit([0], [0], [[1, 2] * 2000], [1]))
        assert len(drafter._tape) <= lookups._LONGEST_TAPE


def test_a_tape_that_makes_no_sense_is_a_failure() -> None:
    drafter = Lookups(build(), Texts())
    drafter.absorb(Commit([0], [0], [[1, 2, 3, 1, 2]], [3]))
    for tape in (
        [9, 0],
        [lookups._TELL, 0, 4, 1],
        [lookups._TELL, 0, -1],
        [lookups._TELL, 7, 0],
        [lookups._PROPOSE, 0],
        [lookups._BEGIN, 0, 1],
    ):
        drafter._tape = array("i", tape)
        with pytest.raises(RuntimeError, match="makes no sense"):
            drafter._play([], 0.0)
        assert not drafter._tape


@pytest.mark.parametrize("spec", ["suffix", "suffix=private", "auto"])
def test_without_a_compiler_look_ups_are_python(spec: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert open_drafter(spec, Setting()).__class__ is Lookups
    assert open_drafter(spec, Setting(native=False)).__class__ is Suffix

    def nobody() -> Path:
        raise BuildError("no C++ compiler found; install g++")

    monkeypatch.setattr(lookups, "build", nobody)
    with caplog.at_level(logging.WARNING):
        assert open_drafter(spec, Setting()).__class__ is Suffix
    assert "look-ups go on in Python" in caplog.text and "install g++" in caplog.text


def test_what_is_built_is_found() -> None:
    assert build() == built()


def test_there_is_room_for_answers_whatever_a_failure_left() -> None:
    drafter = Lookups(build(), Texts())
    drafter.absorb(Commit([0], [0], [[1, 2, 3, 1, 2]], [3]))
    drafter._confidences = array("d", [0.0] * 100)  # as if making room for the rest had failed
    assert drafter.propose([0], [16])[0].count and len(drafter._nodes) >= 3 * 16 + 1
