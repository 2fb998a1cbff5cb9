"""What a step reports and what happens when something goes wrong in it: an error belongs to one row."""

from __future__ import annotations

import pytest
import torch

from forerun.engine.batch import Batch
from forerun.messages import Admit, Feed, Inject, SamplingParams, StepPlan
from tests.engine.tiny import Front, Sequence_, TinyHead, alone, params_for, tiny_engine

PROMPTS = [[1, 2, 3, 4, 5] * 4, [9, 8, 7] * 6, [50, 60] * 5]
WAYS = [{}, {"sample": True, "top_p": 0.9}, {"sample": True}]


def admitted(front: Front) -> list[Sequence_]:
    sequences = [Sequence_(prompt, params_for(prompt, max_new_tokens=8, **way)) for prompt, way in zip(PROMPTS, WAYS)]
    for sequence in sequences:
        front.admit(sequence)
    return sequences


EXPECTED = [alone(prompt, params_for(prompt, max_new_tokens=8, **way)).answer for prompt, way in zip(PROMPTS, WAYS)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("victim", range(3))
def test_logits_that_are_no_numbers_end_their_row_only(victim: int, value: float) -> None:
    front = Front(tiny_engine())
    sequences = admitted(front)

    def spoil(batch: Batch, logits: torch.Tensor) -> None:
        if batch.segments == 3 and batch.positions[-1] > 10:
            logits[victim, 5] = value

    front.engine._backend.spoil = spoil
    front.run()
    assert "not a number" in sequences[victim].error
    assert len(sequences[victim].tokens) == 2
    for i, sequence in enumerate(sequences):
        if i != victim:
            assert sequence.answer == EXPECTED[i]


def test_an_exception_in_one_rows_processing_ends_that_row(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(scores: object, params: SamplingParams) -> None:
        raise KeyError("broken")

    monkeypatch.setattr("forerun.engine.processing.narrow", broken)
    front = Front(tiny_engine())
    sequences = admitted(front)
    front.run()
    assert sequences[1].error and [s.answer for s in sequences][::2] == EXPECTED[::2]
    assert "processing of a row failed" in caplog.text


def test_an_injected_fault_ends_the_row_that_reaches_it() -> None:
    front = Front(tiny_engine())
    front.engine.inject(Inject("fail", 3))
    sequences = admitted(front)
    front.run()
    assert "injected" in sequences[0].error and len(sequences[0].tokens) == 3
    assert [s.answer for s in sequences[1:]] == EXPECTED[1:]


def test_a_plan_of_nothing() -> None:
    engine = tiny_engine()
    assert engine.step(StepPlan(7)).emit == [] and engine.step(StepPlan(8, drop=[0, 3])).step == 8
    assert engine._backend.calls == []


def test_a_row_that_ended_ignores_what_was_planned_ahead() -> None:
    engine = tiny_engine()
    params = SamplingParams(0, 2, 1)
    first = engine.step(StepPlan(1, [Admit(0, [1, 2], 0, [3], params)], [Feed(0, 2)]))
    assert first.emit[0].finish == "length"
    assert engine.step(StepPlan(2, feed=[Feed(0, 1)])).emit == []
    again = engine.step(StepPlan(3, [Admit(0, [1, 2], 0, [3], params)], [Feed(0, 2)], [0]))
    assert again.emit == first.emit


def test_rows_and_nodes_are_counted() -> None:
    engine = tiny_engine()
    params = SamplingParams(0, 5, 4)
    result = engine.step(StepPlan(1, [Admit(0, [1] * 5, 0, [0], params), Admit(1, [2] * 5, 0, [1], params)], [Feed(0, 5), Feed(1, 3)]))
    assert (result.rows, result.nodes, [e.row for e in result.emit]) == (8, 0, [0])
    assert engine.step(StepPlan(2, feed=[Feed(0, 1), Feed(1, 2)])).rows == 3


def test_logprobs_only_when_asked() -> None:
    prompt = PROMPTS[0]
    quiet = alone(prompt, params_for(prompt, logprobs=False))
    loud = alone(prompt, params_for(prompt))
    assert quiet.tokens == loud.tokens and quiet.logprobs == [] and len(loud.logprobs) == len(loud.tokens)


def test_a_scored_prompt_leaves_the_choices_behind_it_to_the_output_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a whole step are made while a prompt is scored, and not for the rest of its answer, nor for those beside it."""
    made: list[TinyHead] = []
    once = TinyHead.logits

    def counted(head: TinyHead, hidden: torch.Tensor) -> torch.Tensor:
        made.append(head)
        return once(head, hidden)

    monkeypatch.setattr(TinyHead, "logits", counted)
    front = Front(tiny_engine())
    front.admit(plain := Sequence_(PROMPTS[0], params_for(PROMPTS[0], max_new_tokens=8)))
    front.admit(scored := Sequence_(PROMPTS[1], params_for(PROMPTS[1], max_new_tokens=8, prompt_logprobs=True)))
    front.step({0: 100, 1: 5})
    front.step({0: 100, 1: 100})
    assert len(made) == 2 and len(scored.prompt_logprobs) == len(PROMPTS[1]) - 1
    front.run()
    assert len(made) == 2 and plain.answer == EXPECTED[0] and len(scored.tokens) == 8


def test_alternatives_agree_with_the_token() -> None:
    prompt = PROMPTS[0]
    for way in ({"top_n": 3}, {"top_n": 3, "sample": True, "temperature": 0.3}, {"top_n": 3, "sample": True, "top_k": 2}):
        answer = alone(prompt, params_for(prompt, **way))
        for token, logprob, top in zip(answer.tokens, answer.logprobs, answer.top):
            values = dict(top)
            assert list(values.values()) == sorted(values.values(), reverse=True)
            assert len(top) == (2 if "top_k" in way else 3)
            if token in values:
                assert values[token] == logprob
            if "sample" not in way:
                assert top[0] == (token, logprob)
            if "top_k" in way:
                assert sum(torch.tensor(list(values.values())).exp()) == pytest.approx(1.0, abs=1e-6)


def test_top_k_of_one_is_greedy_with_certainty() -> None:
    prompt = PROMPTS[0]
    answer = alone(prompt, params_for(prompt, sample=True, top_k=1))
    assert answer.tokens == alone(prompt, params_for(prompt)).tokens
    assert answer.logprobs == [0.0] * len(answer.tokens)
