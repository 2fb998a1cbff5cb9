"""Every registered drafter, by being registered: the answers are bitwise those of no speculation, and nothing of a row stays behind."""

from __future__ import annotations

import dataclasses
import functools
import logging
import tempfile
from itertools import cycle, islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Terms
from forerun.engine.drafters.registry import DRAFTERS, open_drafter
from tests.engine.drafters import fitted
from tests.engine.drafters.companions import setting, write_tiny
from tests.engine.drafters.services import Running, honest
from tests.engine.test_identity import KINDS, fresh, live, prompt_of, truth
from tests.engine.tiny import ROWS, VOCAB, Front, Sequence_, params_for, tiny_engine

SPECS = {name: [name] for name in DRAFTERS} | {
    "suffix": ["suffix", "suffix=chain", "suffix=private", "ngram+suffix"],
    "lookahead": ["lookahead", "suffix+lookahead=window=2,ngram=3,guesses=3"],
    "model": ["model={itself}", "suffix+model={stranger}+model={itself}"],
    "medusa": ["medusa={medusa}"],
    "grams": ["grams={grams}", "suffix+grams={grams}"],
    "mlp": ["mlp={mlp}"],
    "remote": ["remote={service},wait=60000"],
    "dflash": ["dflash={dflash}"],
    "dspark": ["suffix+dspark={dspark}"],
    "mtp": ["suffix+mtp={mtp}", "suffix+mtp={modules},first=post,order=eh,carry=raw,reads=module"],
    "eagle": ["eagle={eagle3},beams=3", "suffix+eagle={eagle1}", "eagle={peagle}"],
}
"""What to open of each drafter: its name, unless it needs a value or has variants. In braces: the tiny target as a draft model, another
one, and heads that have learned some of its answers."""
PYTHON = "in Python: "
"""before what is opened where there is no compiler, and is native otherwise"""
ALL = [spec for specs in SPECS.values() for spec in specs] + [f"{PYTHON}suffix", f"{PYTHON}suffix+grams={{grams}}"]
LOOPING = ("greedy", "greedy, alternatives", "temperature", "top-k")


class Watched:
    """A drafter that is looked at: which rows it holds, what it proposed."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.needs = drafter.needs
        self.rows: set[int] = set()
        self.drafts: list[Draft] = []

    def absorb(self, commit: Commit) -> None:
        self._drafter.absorb(commit)
        self.rows |= set(commit.rows)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        assert set(rows) <= self.rows and all(0 < most <= self.needs.most for most in budget)
        drafts = self._drafter.propose(rows, budget, terms)
        for draft, most in zip(drafts, budget, strict=True):
            assert draft.count <= most
        self.drafts += drafts
        return drafts

    def forget(self, rows: list[int]) -> None:
        self.rows -= set(rows)  # if it fails at that, what it kept goes when the number begins anew
        self._drafter.forget(rows)


@functools.cache
def folders() -> tuple[tempfile.TemporaryDirectory[str], dict[str, Path]]:
    """Written once, gone with the process."""
    home = tempfile.TemporaryDirectory()
    place = Path(home.name)
    models = {"itself": write_tiny(place / "itself"), "stranger": write_tiny(place / "stranger", 7)}
    models["service"] = Running(honest()).url  # type: ignore[assignment]
    return home, models | {name: make(place / name) for name, make in fitted.FOLDERS.items()}


def open_any(spec: str, nodes: int = 8) -> Drafter:
    models = folders()[1]
    around = dataclasses.replace(setting(models["itself"], nodes), native=not spec.startswith(PYTHON))
    return open_drafter(spec.removeprefix(PYTHON).format(**models), around)


def opened(spec: str, nodes: int = 8) -> Watched:
    return Watched(open_any(spec, nodes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ALL)
def test_speculation_changes_nothing(spec: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A full table of one kind of request, and then some once more, when the drafter has seen such answers already."""
    answers = [truth(kind, seed, length) for seed, length in ((1, 21), (2, 5), (3, 40), (4, 1))]
    drafter = opened(spec)
    front = Front(tiny_engine(drafter))
    for count in (ROWS, 2):
        expected = list(islice(cycle(answers), count))
        sequences = [fresh(answer) for answer in expected]
        for sequence in sequences:
            front.admit(sequence)
        front.run(guess=8)
        assert [s.answer for s in sequences] == [e.answer for e in expected]
    assert drafter.drafts and not drafter.rows
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "it did not fail"
    if kind in LOOPING:
        assert sum(s.accepted for s in sequences) > 0, "it is of some use"


@pytest.mark.parametrize("spec", ALL)
def test_all_kinds_together(spec: str) -> None:
    """Requests of every kind share a table, come and go, and have their own limits and stops."""
    waiting = [truth(kind, seed, length) for seed, length in ((1, 21), (2, 9)) for kind in KINDS]
    expected = list(waiting)
    drafter = opened(spec)
    front = Front(tiny_engine(drafter))
    sequences: list[Sequence_] = []
    while waiting or front.running:
        while waiting and len(front.running) < ROWS:
            sequences.append(fresh(waiting.pop(0)))
            front.admit(sequences[-1])
        front.step(dict.fromkeys(range(ROWS), 7), guess=5, price=0.05)
    assert [s.answer for s in sequences] == [e.answer for e in expected]
    assert not drafter.rows


@pytest.mark.parametrize("spec", ALL)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_batch_chunks_preemption_prefix_and_restart(spec: str, data: st.DataObject) -> None:
    live(data, lambda _: open_any(spec))


@pytest.mark.parametrize("spec", ALL)
def test_stops_inside_an_accepted_run(spec: str) -> None:
    """The drafter has seen the whole answer before, and guesses beyond the stop."""
    free = truth("greedy", 1, 21)
    for place in range(0, 12, 3):
        answer = truth("greedy", 1, 21, stop=(free.tokens[place],))
        front = Front(tiny_engine(opened(spec)))
        for expected in (free, answer, answer):
            sequence = fresh(expected)
            front.admit(sequence)
            front.run(guess=8)
            assert sequence.answer == expected.answer


@pytest.mark.parametrize("limit", [1, 2, 5, 9])
@pytest.mark.parametrize("spec", ALL)
def test_limits_inside_an_accepted_run(spec: str, limit: int) -> None:
    prompt = prompt_of(1, 21)
    whole = truth("greedy", 1, 21)
    front = Front(tiny_engine(opened(spec)))
    for most in (24, limit):
        sequence = Sequence_(prompt, params_for(prompt, max_new_tokens=most))
        front.admit(sequence)
        front.run(guess=8)
        assert sequence.tokens == whole.tokens[:most] and sequence.finish == "length"


@pytest.mark.parametrize("kind", ["greedy", "everything"])
@pytest.mark.parametrize("spec", ALL)
def test_a_poisoned_memory(spec: str, kind: str) -> None:
    """Whatever others made the drafter believe: texts that go as this one does and then wrongly, at every place, or into its stop."""
    answer = truth(kind, 1, 21, stop=(VOCAB - 1,))
    drafter = opened(spec)
    front = Front(tiny_engine(drafter))
    for place in range(1, len(answer.tokens)):
        for wrong in ((answer.tokens[place] + 1) % VOCAB, VOCAB - 1):
            text = [*answer.tokens[:place], wrong, wrong]
            drafter.absorb(Commit([0], [0], [text], [wrong], None, [0], [""]))
            drafter.propose([0], [min(8, drafter.needs.most)])
            drafter.forget([0])
    for _ in range(2):
        sequence = fresh(answer)
        front.admit(sequence)
        front.run(guess=8)
        assert sequence.answer == answer.answer


@pytest.mark.parametrize("spec", ALL)
def test_on_and_off_from_step_to_step(spec: str) -> None:
    """Rounds without guesses leave no hole in what the drafter knows."""
    answers = [truth("greedy", 1, 21), truth("everything", 3, 40)]
    front = Front(tiny_engine(opened(spec)))
    for _ in range(2):
        sequences = [fresh(answer) for answer in answers]
        for sequence in sequences:
            front.admit(sequence)
        while front.running:
            front.step(guess=8 if next(front.steps) % 3 == 0 else 0)
        assert [s.answer for s in sequences] == [a.answer for a in answers]


@pytest.mark.parametrize("spec", ALL)
def test_an_abort_at_any_time(spec: str) -> None:
    drafter = opened(spec)
    front = Front(tiny_engine(drafter))
    answer = truth("greedy", 1, 21)
    for steps in range(1, 8):
        doomed, kept = fresh(answer), fresh(answer)
        front.admit(doomed)
        front.admit(kept)
        for _ in range(steps):
            if doomed in front.running:
                front.step(guess=4)
        if doomed in front.running:
            front.leave(doomed)
        front.run(guess=4)
        assert kept.answer == answer.answer
    front.step()
    assert not drafter.rows and len(front.free_rows) == ROWS and len(front.free_pages) == front.engine.ready.pages
