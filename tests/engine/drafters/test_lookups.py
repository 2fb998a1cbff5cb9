"""Look-ups in C++ propose what those in Python propose, bit by bit; and there are look-ups where there is no compiler."""

from __future__ import annotations

import logging
import random
import re
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forerun.engine.drafters import grams, lookups
from forerun.engine.drafters.dag import Dag
from forerun.engine.drafters.draft import Bids, Commit, Draft, Drafter, Terms
from forerun.engine.drafters.lookups import Lookups
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.drafters.speculator import Speculator
from forerun.engine.drafters.suffix import Suffix, Texts
from forerun.engine.kv import Table
from forerun.engine.rows import Row, Share
from forerun.kernels.build import BuildError
from forerun.kernels.lookup.build import build, built
from forerun.messages import SamplingParams, StepPlan

FREELY = 0.0, 0.0, 1.0
"""terms of a question about nothing"""


def some_table(dice: random.Random, vocab: int) -> grams.Table:
    keys: set[int] = set()
    for _ in range(dice.choice([0, 1, 20, 200])):
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


class Competing:
    """Rows of a worker that repeat themselves come and go; two speculators draft for them under the same plans, and what one of them
    keeps, and expects of it, is what the other one does."""

    rows = 6

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.vocab, self.most = dice.choice([3, 5, 12, 40]), dice.choice([1, 3, 8, 16])
        self.longest = dice.choice([60, 400])
        tree = dice.random() < 0.8
        texts = Texts(self.most, tree, dice.random() < 0.8)
        table = some_table(dice, self.vocab) if dice.random() < 0.7 else None
        most = min(self.most, grams.MOST)
        python: Drafter = Suffix(*texts)
        if table is not None:
            python = Dag([python, grams.Grams(table, most, tree)], self.most, tree)
        below, together = self.vocab - dice.randrange(2), dice.choice([4, 64])
        both = python, Lookups(build(), texts, table, most)
        self.both = [Speculator(drafter, below, self.longest, self.most, together) for drafter in both]
        self.table = Table(self.rows, self.longest + self.most, 8)
        for number in range(self.rows):
            self.table.grant(number, range(self.table.pages.shape[1]))
        self.running: list[list[Row] | None] = [None] * self.rows
        self.kept = self.left = 0

    def step(self) -> None:
        dice = self.dice
        for number, pair in enumerate(self.running):
            if pair is None and dice.random() < 0.3:
                self.open(number)
            elif pair is not None and (len(pair[0].tokens) >= self.longest - 2 or dice.random() < 0.03):
                for speculator, row in zip(self.both, pair):
                    speculator.forget([row])
                self.running[number] = None
        fed = [pair for pair in self.running if pair is not None and dice.random() < 0.9]
        guess = [dice.choice([0, 1, 4, 16]) for _ in fed]
        plan = self.plan(len(fed))
        shares = [[Share(pair[which], 1, most, Draft.none(), []) for pair, most in zip(fed, guess)] for which in (0, 1)]
        for speculator, part in zip(self.both, shares):
            speculator.draft(part, self.table, plan)
            assert not speculator.news()
        for ours, theirs in zip(*shares, strict=True):
            self.compare(ours, theirs)
        for pair in fed:
            self.go_on(pair)

    def plan(self, fed: int) -> StepPlan:
        dice = self.dice
        step = dice.choice([0.0, 0.02, 0.1, 0.4])
        toll = [step * (n + 1) + dice.choice([0.0, 0.3]) * (n >= 4) for n in range(dice.choice([1, 8, 40]))]
        weights = {number: dice.choice([0.25, 1.0, 4.0]) for number in range(self.rows)} if dice.random() < 0.3 else {}
        price, entry = dice.choice([0.0, 0.05, 0.5]), dice.choice([0.0, 0.0, 1e-4])
        return StepPlan(0, [], [], [], dice.choice([2, 16, 64]), price, toll, entry, dice.choice([1.0, 0.5]), 100.0, weights)

    def open(self, number: int) -> None:
        prompt = [self.dice.randrange(self.vocab) for _ in range(self.dice.choice([2, 10, 40]))]
        params = SamplingParams(seed=0, prompt_tokens=len(prompt), max_new_tokens=self.dice.choice([8, 1000]))
        scope = self.dice.choice(["", "x"])
        self.running[number] = [Row.open(number, params, list(prompt), len(prompt) - 1, scope) for _ in range(2)]

    def go_on(self, pair: list[Row]) -> None:
        tokens = pair[0].tokens
        new = [
            tokens[-self.dice.randrange(1, min(len(tokens), 6) + 1)] if self.dice.random() < 0.7 else self.dice.randrange(self.vocab)
            for _ in range(self.dice.randrange(1, 4))
        ]
        for row in pair:
            row.commit(list(new), len(row.tokens) + len(new) - 1)

    def compare(self, ours: Share, theirs: Share) -> None:
        mine, other = ours.draft, theirs.draft
        assert (mine.token, mine.parent, mine.probe) == (other.token, other.parent, other.probe)
        assert mine.confidence == other.confidence and list(mine.source) == list(other.source)
        assert ours.expected == theirs.expected
        self.kept += mine.count
        self.left += mine.count == 0


@pytest.mark.parametrize("seed", range(24))
def test_both_forms_keep_the_same(seed: int) -> None:
    """Trust and choice in C++ are those in Python."""
    life = Competing(seed)
    for _ in range(300):
        life.step()
    assert life.kept > 100 and life.left > 100


def test_a_step_of_drafts_that_are_not_chosen_here_is_chosen_in_python() -> None:
    """Where tolls are not known, and where a grammar has its say, drafts come whole."""
    drafter = Lookups(build(), Texts())
    drafter.absorb(Commit([0], [0], [[1, 2, 3, 1, 2]], [3]))
    (whole,) = drafter.propose([0], [4], Terms(toll=[9.0] * 4))
    assert whole.count and not whole.expected
    (none,) = drafter.propose([0], [4], Terms(toll=[9.0] * 4, bids=Bids([9], 9, 4, [], 0.0, 1.0)))
    (some,) = drafter.propose([0], [4], Terms(toll=[0.0] * 4, bids=Bids([9], 9, 4, [], 0.0, 1.0)))
    assert none == Draft.none() and some.token == whole.token and some.expected > 0.0


def test_a_row_with_a_hole_is_refused_and_others_go_on() -> None:
    drafter = Lookups(build(), Texts())
    drafter.absorb(Commit([0], [0], [[1, 2, 3, 1, 2]], [3]))
    with pytest.raises(ValueError, match="row 1 goes on at position 4"):
        drafter.absorb(Commit([1], [4], [[1]], [2]))
    assert drafter.propose([0], [1])[0].token == [1]


@pytest.mark.parametrize("prompt, token", [(1 << 40, 1), (-1, 1), (4, 1 << 40), (4, -1)])
def test_what_is_no_word_is_refused_and_nothing_of_it_is_told(prompt: int, token: int) -> None:
    """It may come from a stranger. A part of it would be read as something else: here as a question for which there is no room."""
    drafter = Lookups(build(), Texts())
    drafter.absorb(Commit([0], [0], [[1, 2, 3, 1, 2]], [3]))
    with pytest.raises((OverflowError, ValueError)):
        drafter.absorb(Commit([1], [0], [[lookups._PROPOSE, 0, 1 << 20, token]], [1], None, [prompt]))
    drafter.absorb(Commit([2], [0], [[7, 8, 7]], [8]))
    assert [draft.token for draft in drafter.propose([0, 1, 2], [1, 1, 1])] == [[1], [], [7]]


def test_a_question_without_room_is_refused() -> None:
    drafter = Lookups(build(), Texts())
    drafter.absorb(Commit([0], [0], [[1, 2, 3, 1, 2]], [3]))
    drafter._nodes, drafter._confidences = array("i", bytes(4 * 6)), array("d", bytes(8 * 2))
    with pytest.raises(RuntimeError, match="makes no sense"):
        drafter._play([lookups._PROPOSE, 0, 2], FREELY)
    assert not any(drafter._nodes) and not any(drafter._confidences)


def forget_too_much(drafter: Lookups) -> None:
    drafter.forget([0])


def tell_nonsense(drafter: Lookups) -> None:
    drafter._tape.extend([9, 9])


@pytest.mark.parametrize("fail, shared", [(tell_nonsense, 1 << 10), (forget_too_much, 1 << 57), (forget_too_much, 1 << 62)])
def test_nothing_follows_from_a_failure(fail: Callable[[Lookups], None], shared: int) -> None:
    """Rows that it costs their guesses go on without, and have some again when they begin anew. `shared`: tables of others' answers that
    no machine has, or that cannot be asked for."""
    drafter = Lookups(build(), Texts(shared_tokens=shared))
    for row in range(3):
        drafter.absorb(Commit([row], [0], [[1, 2, 3, 1, 2]], [3], None, [1], [""]))
    assert all(draft.count for draft in drafter.propose([0, 1, 2], [1] * 3))
    fail(drafter)
    with pytest.raises(RuntimeError):
        drafter.propose([1], [1])
    drafter.absorb(Commit([2], [6], [[1, 2]], [3]))
    assert not drafter.propose([2], [1])[0].count, "a text with a hole in it"
    drafter.absorb(Commit([1], [0], [[1, 2, 3, 1, 2]], [3]))
    assert drafter.propose([1], [1])[0].token == [1]


def test_what_was_played_is_not_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may raise when the call is over."""
    drafter = Lookups(build(), Texts())
    drafter.absorb(Commit([0], [0], [[1, 2, 3, 1, 2]], [3]))
    run = drafter._run

    def interrupted(*arguments: object) -> None:
        run(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(drafter, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafter.propose([0], [1])
    assert not drafter._tape and drafter.propose([0], [1])[0].token == [1]


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
        [lookups._TELL, 0, 1, -1],
        [lookups._PROPOSE, 0],
        [lookups._PROPOSE, 0, 1 << 30],
        [lookups._BEGIN, 0, 1],
        [lookups._BEGIN, 0, -1, 4, 0],
        [lookups._BEGIN, 0, 1, -4, 0],
        [lookups._COMPETE, 1, 9],
        [lookups._COMPETE, 1, 9, 0, 0, 1],
        [lookups._COMPETE, -1, 9, 0],
        [lookups._COMPETE, 1, 9, 1, 0, 1, 1],
        [lookups._COMPETE, 2, 9, 0, 0, 1, 1, 0, 1, 1],
        [lookups._COMPETE, 0, 9, 0, lookups._FORGET, 0],
        [lookups._COMPETE, 1 << 30, 9, 0],
    ):
        drafter._tape = array("i", tape)
        with pytest.raises(RuntimeError, match="makes no sense"):
            drafter._play([], FREELY)
        assert not drafter._tape


def no_compiler() -> Path:
    raise BuildError("no C++ compiler found; install g++\nand a second line")


def no_library() -> Path:
    return Path(__file__)


@pytest.mark.parametrize("library, said", [(no_compiler, "install g++"), (no_library, "invalid ELF header|not a mach-o|test_lookups")])
@pytest.mark.parametrize("spec", ["suffix", "suffix=private", "auto"])
def test_without_a_library_look_ups_are_python(
    spec: str, library: Callable[[], Path], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_drafter(spec, Setting()).__class__ is Lookups
    assert open_drafter(spec, Setting(native=False)).__class__ is Suffix
    monkeypatch.setattr(lookups, "build", library)
    with caplog.at_level(logging.WARNING):
        assert open_drafter(spec, Setting()).__class__ is Suffix
    (line,) = caplog.messages
    assert line.startswith("look-ups go on in Python") and re.search(said, line) and "second line" not in line


def test_what_is_built_is_found() -> None:
    assert build() == built()


def test_there_is_room_for_answers_whatever_a_failure_left() -> None:
    drafter = Lookups(build(), Texts())
    drafter.absorb(Commit([0], [0], [[1, 2, 3, 1, 2]], [3]))
    drafter._confidences = array("d", [0.0] * 100)  # as if making room for the rest had failed
    assert drafter.propose([0], [16])[0].count and len(drafter._nodes) >= 3 * 16 + 1
