"""Who waits for a grammar that is not ready, what becomes of jobs nobody waits for, and where long ones are done."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from forerun.engine import grammar
from forerun.engine.grammar import Grammars, Threads
from tests.engine.test_grammar import PROMPT, SHAPE, Chain, params, regex
from tests.engine.tiny import AtOnce, Front, Sequence_, alone, params_for, tables, tiny_engine


class Held(Executor):
    """Jobs wait until they are let go."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.open = False

    def submit(self, job: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(job(*args, **named))
            except Exception as error:
                done.set_exception(error)

        if self.open:
            run()
        else:
            self.jobs.append(run)
        return done

    def release(self) -> None:
        self.open = True
        while self.jobs:
            self.jobs.pop(0)()


class TestWaiting:
    def test_nobody_waits_for_a_grammar_that_is_not_ready(self) -> None:
        held = Held()
        front = Front(tiny_engine(grammars=Grammars(tables, Threads(held, held))))
        row, other = Sequence_(PROMPT, params()), Sequence_(PROMPT, params_for(PROMPT))
        front.admit(row)
        front.admit(other)
        for _ in range(6):
            front.step()
        assert len(other.tokens) == 6 and not row.tokens and not row.error
        assert front.engine._backend.calls[0] == (9, 1), "its prompt is computed meanwhile, up to the last token"
        assert front.engine._backend.calls[1:] == [(1, 1)] * 5
        held.release()
        front.run()
        assert row.answer == alone(PROMPT, params()).answer and other.answer == alone(PROMPT, params_for(PROMPT)).answer

    def test_a_step_of_waiting_rows_alone_computes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammar, "ALONE_SECONDS", 0.0)
        held = Held()
        front = Front(tiny_engine(grammars=Grammars(tables, Threads(held, held))))
        row = Sequence_(PROMPT, params(prompt_logprobs=True))
        front.admit(row)
        for _ in range(3):
            front.step()
        assert front.engine._backend.calls == [(4, 4)]
        held.release()
        front.run()
        whole = alone(PROMPT, params(prompt_logprobs=True))
        assert row.answer == whole.answer and row.prompt_logprobs == whole.prompt_logprobs

    def test_a_row_that_leaves_while_it_waits(self) -> None:
        held = Held()
        front = Front(tiny_engine(grammars=Grammars(tables, Threads(held, held))))
        row = Sequence_(PROMPT, params())
        front.admit(row)
        front.step()
        front.leave(row)
        front.admit(row)
        front.step()
        held.release()
        front.run()
        assert row.answer == alone(PROMPT, params()).answer

    def test_what_was_not_begun_for_a_row_that_left_is_not_done(self) -> None:
        held = Held()
        grammars = Grammars(tables, Threads(AtOnce(), held))
        front = Front(tiny_engine(grammars=grammars))
        row, other, same = Sequence_(PROMPT, params("[ab]+")), Sequence_(PROMPT, params()), Sequence_(PROMPT, params())
        for one in (row, other, same):
            front.admit(one)
        front.step()
        front.leave(row)
        front.leave(other)
        front.step()
        assert list(grammars._compiled) == [regex(SHAPE)], "somebody still waits for this one"
        compiled: list[str] = []
        count = grammars._compiled_now
        grammars._compiled_now = lambda text: (compiled.append(text), count(text))[1]  # type: ignore[method-assign]
        held.release()
        front.run()
        assert same.answer == alone(PROMPT, params()).answer
        again = Sequence_(PROMPT, params("[ab]+", max_new_tokens=5))
        front.admit(again)
        front.run()
        assert again.answer == alone(PROMPT, params("[ab]+", max_new_tokens=5)).answer and compiled == [regex("[ab]+")]

    def test_long_jobs_have_threads_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammar, "LONG_SECONDS", 60.0)
        first, later = Held(), Held()
        front = Front(tiny_engine(grammars=Grammars(tables, Threads(later, first))))
        later.release()
        row = Sequence_(PROMPT, params())
        front.admit(row)
        front.step()
        assert len(first.jobs) == 2 and not later.jobs, "it is compiled, and its first mask is made, where nobody suffers"
        first.release()
        first.open, later.open = False, False
        front.step()
        assert (len(first.jobs), len(later.jobs)) == (0, 1), "what is soon done is done at once"
        monkeypatch.setattr(grammar, "LONG_SECONDS", -1.0)
        later.release()
        later.open = False
        front.step()
        assert (len(first.jobs), len(later.jobs)) == (1, 0)
        first.release()
        later.release()
        front.run()
        assert row.answer == alone(PROMPT, params()).answer

    def test_a_draft_whose_masks_are_late_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammar, "DRAFT_SECONDS", 0.0)
        held = Held()
        held.release()
        front = Front(tiny_engine(Chain(), grammars=Grammars(tables, Threads(held, held))))
        row = Sequence_(PROMPT, params(max_new_tokens=9))
        front.admit(row)
        front.step()
        held.open = False
        front.step(guess=4)
        assert len(row.tokens) == 2 and row.drafted == 0, "what is known of the root is enough for a token"
        held.release()
        front.run(guess=4)
        assert row.answer == alone(PROMPT, params(max_new_tokens=9)).answer and row.drafted > 0


def test_the_threads_of_long_jobs_give_way_to_others() -> None:
    def mine() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    threads = Threads.started()
    before = mine()
    assert threads.quick.submit(mine).result() == before
    assert threads.patient.submit(mine).result() == min(before + grammar.NICER, 19)
    assert mine() == before


def test_answers_are_the_same_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does the jobs; here steps wait for them however long they take."""
    for name in ("PATIENCE_SECONDS", "ALONE_SECONDS", "DRAFT_SECONDS"):
        monkeypatch.setattr(grammar, name, 60.0)
    front = Front(tiny_engine(Chain(), grammars=Grammars(tables)))
    patterns = [SHAPE, "[ab]+", SHAPE, "(ab|cd){9}"]
    rows = [Sequence_(PROMPT, params(pattern, max_new_tokens=12)) for pattern in patterns]
    for row in rows:
        front.admit(row)
    front.run(guess=4)
    assert [row.answer for row in rows] == [alone(PROMPT, params(pattern, max_new_tokens=12)).answer for pattern in patterns]
