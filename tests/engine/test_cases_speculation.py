"""Failures of speculation that other servers had (docs/failure-modes.md has the list), each as a test of its kind."""

from __future__ import annotations

import array
import collections
import gc
import itertools
import math
import threading
import types

import numpy as np
import pytest
import torch

from forerun.engine.drafters import suffix
from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Needs, Terms
from forerun.messages import SamplingParams
from tests.engine.test_identity import KINDS, Script, fresh, perfect, prompt_of, truth
from tests.engine.test_registered import ALL, open_any, opened
from tests.engine.tiny import LONGEST, NODES, ROWS, VOCAB, Front, Sequence_, alone, params_for, tiny_engine

SPARE = 250
"""entries by which what is held may differ from one time to another: buffers that have grown to their size, recorded forwards"""


class Stubborn:
    """Proposes the same chain for ever; `trouble`: raises when it is told of a row for the time of this number."""

    def __init__(self, tokens: list[int], trouble: int = 0) -> None:
        self.needs = Needs(most=NODES)
        self.rows: dict[int, int] = {}
        self._tokens = tokens
        self._trouble = trouble
        self._told = 0

    def absorb(self, commit: Commit) -> None:
        for row in commit.rows:
            self._told += 1
            self.rows[row] = self._told
            if self._told == self._trouble:
                raise RuntimeError("the tree is full")

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        return [Draft.chain(self._tokens[:most]) for most in budget]

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            self.rows.pop(row, None)


def test_a_draft_that_fails_every_time_costs_no_token() -> None:
    """47: a draft that never holds is proposed again and again: every step brings a token all the same."""
    answer = truth("greedy", 1, 21)
    absent = next(token for token in range(VOCAB) if token not in answer.tokens)
    front = Front(tiny_engine(Stubborn([absent] * 8)))
    sequence = fresh(answer)
    front.admit(sequence)
    while front.running:
        assert [len(emit.tokens) for emit in front.step(guess=8)] == [1]
    assert sequence.answer == answer.answer and sequence.accepted == 0


@pytest.mark.parametrize("trouble", [1, 2, 3])
def test_a_drafter_that_failed_in_the_middle_of_being_told_forgets_all_rows(trouble: int) -> None:
    """29: it knew some rows of a call when it raised; they are forgotten at their end like the others."""
    drafter = Stubborn([1, 2], trouble)
    front = Front(tiny_engine(drafter))
    answers = [truth("greedy", seed, 21) for seed in (1, 2, 3)]
    sequences = [fresh(answer) for answer in answers]
    for sequence in sequences:
        front.admit(sequence)
    front.run(guess=4)
    assert [sequence.answer for sequence in sequences] == [answer.answer for answer in answers]
    assert front.engine._speculator.failures.count == 1 and not drafter.rows


@pytest.mark.parametrize("guess", [1, 4, NODES])
def test_a_prompt_as_long_as_a_verification_is_a_prompt(guess: int) -> None:
    """33: the kind of a step is never told from its shape."""
    decoding = truth("greedy", 1, 21)
    for length in (guess, guess + 1, guess + 2):
        answers = [decoding, alone(prompt_of(7, length), params_for(prompt_of(7, length)))]
        front = Front(tiny_engine(Script(answers, perfect)))
        first, second = (fresh(answer) for answer in answers)
        front.admit(first)
        front.step()
        front.admit(second)
        front.run(guess=guess)
        assert (first.answer, second.answer) == (answers[0].answer, answers[1].answer)


@pytest.mark.parametrize("length", range(LONGEST - 30, LONGEST - 1, 7))
def test_up_to_the_last_position_of_the_model(length: int) -> None:
    """31, 32: guesses end where the answer or the context does, whoever asks for how many."""
    prompt = prompt_of(9, length)
    answer = alone(prompt, params_for(prompt, max_new_tokens=LONGEST - length))
    assert len(answer.tokens) == LONGEST - length
    front = Front(tiny_engine(Script([answer], perfect)))
    sequence = fresh(answer)
    front.admit(sequence)
    while front.running:
        for emit in front.step(guess=NODES):
            assert emit.drafted <= LONGEST - len(sequence.all) + len(emit.tokens) - 1
    assert sequence.answer == answer.answer
    assert sequence.accepted == sequence.drafted


@pytest.mark.parametrize("spec", ALL)
def test_what_is_accepted_does_not_depend_on_company(spec: str) -> None:
    """C19: the same prompts one by one, each with a drafter of its own, and all at once; a row's guesses are its own business."""
    if "suffix" in spec and "private" not in spec:
        pytest.skip("this one learns from the others' answers on purpose")
    answers = [truth(kind, seed, 21) for kind in ("greedy", "temperature") for seed in (1, 2, 3)]
    apart = []
    for answer in answers:
        front = Front(tiny_engine(opened(spec)))
        front.admit(apart_ := fresh(answer))
        front.run(guess=6)
        apart.append(apart_.tokens)
    front = Front(tiny_engine(opened(spec)))
    together = [fresh(answer) for answer in answers]
    for sequence in together:
        front.admit(sequence)
    front.run(guess=6)
    assert [sequence.tokens for sequence in together] == apart


@pytest.mark.parametrize("spec", ALL)
def test_every_registered_name_drafts(spec: str) -> None:
    """C17, C28: each name starts something that really guesses, and guesses well where the answer was seen before."""
    drafter = opened(spec)
    front = Front(tiny_engine(drafter))
    answer = truth("greedy", 1, 21)
    for _ in range(3):
        front.admit(sequence := fresh(answer))
        front.run(guess=8)
    assert sum(draft.count for draft in drafter.drafts) > 0
    assert sequence.accepted > 0


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_guesses_stay_inside_the_rows_own_pages(kind: str) -> None:
    """26: what is guessed is written to pages of the row alone, never into a prefix that others read."""
    answer = truth(kind, 1, 40)
    front = Front(tiny_engine(Script([answer], lambda future, most: Draft.chain([(t + 1) % VOCAB for t in future[:most]]))))
    front.admit(first := fresh(answer))
    front.step()
    front.step(guess=NODES)
    shared = first.pages[: first.computed // front.engine.ready.page_tokens]
    front.admit(second := fresh(answer), shared)
    front.run(guess=NODES)
    assert first.answer == second.answer == answer.answer and len(shared) >= 2


def test_seeds_side_by_side() -> None:
    """9, 10, 11, C26: requests with and without seeds of their own share a step; each has its own text."""
    prompt = prompt_of(1, 21)
    params = [params_for(prompt, seed=seed, sample=True) for seed in range(ROWS)]
    expected = [alone(prompt, each) for each in params]
    front = Front(tiny_engine(Script(expected, perfect)))
    sequences = [Sequence_(prompt, each) for each in params]
    for sequence in sequences:
        front.admit(sequence)
    front.run(guess=3)
    assert [sequence.answer for sequence in sequences] == [each.answer for each in expected]
    assert len({tuple(sequence.tokens) for sequence in sequences}) > ROWS // 2


def held(thing: object) -> int:
    """Entries of all containers and elements of all arrays that can be reached from it, through whatever objects and closures."""
    seen: dict[int, object] = {}
    todo, total = [thing], 0
    while todo:
        each = todo.pop()
        if id(each) in seen or type(each) in (type, types.ModuleType, threading.Thread):
            continue
        seen[id(each)] = each
        if type(each) is types.FunctionType:
            todo += each.__closure__ or ()  # not what its module holds
            continue
        if type(each) in (torch.Tensor, np.ndarray):
            total += math.prod(each.shape)
        elif type(each) in (list, tuple, dict, set, collections.deque, collections.OrderedDict, bytearray, array.array):
            total += len(each)  # type: ignore[arg-type]
        todo += gc.get_referents(each)
    return total


def live(drafter: Drafter, steps: int) -> tuple[Front, list[int]]:
    """A life of sampled requests of every kind, four at a time; what is held at each fifth of it, when no row is running."""
    front = Front(tiny_engine(drafter))
    kinds, numbers, sizes = itertools.cycle(KINDS), itertools.count(), []
    for step in range(1, steps + 1):
        while len(front.running) < 4:
            prompt = prompt_of(next(numbers), 15)
            fields = {**KINDS[next(kinds)], "seed": next(numbers), "max_new_tokens": 60}
            front.admit(Sequence_(prompt, SamplingParams(prompt_tokens=15, **fields)))  # type: ignore[arg-type]
        front.step(guess=4)
        if step % (steps // 5) == 0:
            front.run(guess=4)
            front.step()  # drops are heard of
            front.engine._backend.calls.clear()  # type: ignore[attr-defined]
            gc.collect()
            sizes.append(held(front.engine))
    return front, sizes


class Hoarder(Stubborn):
    """Remembers rows that are gone."""

    def forget(self, rows: list[int]) -> None:
        self._tokens += [0] * 100


def test_a_drafter_that_keeps_what_is_over_is_found() -> None:
    """The measure of the long life below: it sees growth where there is some, and none where there is none."""
    sizes = [live(kind([1, 2, 3]), 300)[1] for kind in (Stubborn, Hoarder)]
    assert all(after - before < SPARE for before, after in itertools.pairwise(sizes[0][1:]))
    assert sizes[1][-1] - sizes[1][-3] > SPARE


def test_nothing_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """C18: the short form of the next one, for the drafter that keeps answers that ended. A row that is kept is some forty tokens, and
    twenty rows come and go between the two looks."""
    lived("suffix", 500, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("spec", ALL)
def test_twenty_thousand_steps(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C18: a long life of sampled requests; nothing grows and nothing fails."""
    lived(spec, 20_000, monkeypatch)


def lived(spec: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "SHARED_TOKENS", 64)  # so that memories of answers that ended are full at once
    front, sizes = live(open_any(spec), steps)
    assert front.engine._speculator.failures.count == 0
    assert sizes[-1] - sizes[-3] < SPARE, f"entries: {sizes}"
