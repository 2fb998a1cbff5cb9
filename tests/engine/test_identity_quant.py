"""The promises of a step for weights of 8 and 4 bits and a KV cache of 8: no answer depends on guesses, company, chunks or accidents."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.drafters.draft import Draft
from forerun.kernels import quant
from tests.engine.test_identity import KINDS, Script, backwards, fresh, halfway, perfect, prompt_of, shared_prefix, spread, twins, wrong
from tests.engine.tiny import VOCAB, Front, Sequence_, alone, params_for, random_tree, tiny_engine

FORMS: dict[str, dict[str, object]] = {
    **{format: {"format": format} for format in quant.FORMATS},
    "bf16, int8 KV": {"dtype": torch.bfloat16, "kv": torch.int8},
    "f32, int8 KV": {"kv": torch.int8},
    "int4, int8 KV": {"format": "int4", "kv": torch.int8},
}


@functools.cache
def truth(form: str, kind: str, seed: int, length: int) -> Sequence_:
    prompt = prompt_of(seed, length)
    return alone(prompt, params_for(prompt, **KINDS[kind]), **FORMS[form])


@pytest.mark.parametrize("make", [perfect, wrong, halfway, twins, backwards, spread], ids=lambda make: make.__name__)
@pytest.mark.parametrize("form", FORMS)
def test_speculation_changes_nothing(form: str, make: Callable[[list[int], int], Draft]) -> None:
    for kind in ("greedy", "everything"):
        answers = [truth(form, kind, seed, length) for seed, length in ((1, 21), (2, 5), (3, 40))]
        front = Front(tiny_engine(Script(answers, make), **FORMS[form]))  # type: ignore[arg-type]
        sequences = [fresh(answer) for answer in answers]
        for sequence in sequences:
            front.admit(sequence)
        front.run(guess=8)
        assert [s.answer for s in sequences] == [a.answer for a in answers]
        assert sum(s.drafted for s in sequences) > 0
        assert (sum(s.accepted for s in sequences) > 0) == (make is not wrong)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_life(data: st.DataObject) -> None:
    """Random trees, budgets, chunks and company; rows join, are preempted and resumed on others' pages, engines start anew."""
    form = data.draw(st.sampled_from(sorted(FORMS)))
    names = data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=3))
    answers = [truth(form, name, 20 + i % 2, 34) for i, name in enumerate(names)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))

    def guess(future: list[int], most: int) -> Draft:
        return random_tree(generator, most, VOCAB, future[:4])

    def opened() -> Front:
        return Front(tiny_engine(Script(answers, guess), **FORMS[form]))  # type: ignore[arg-type]

    front, waiting = opened(), [fresh(answer) for answer in answers]
    sequences = list(waiting)
    for _ in range(40):
        if waiting and (not front.running or data.draw(st.booleans())):
            sequence = waiting.pop(0)
            front.admit(sequence, shared_prefix(front, sequence, data))
        if front.running and data.draw(st.integers(0, 7)) == 0:
            victim = data.draw(st.sampled_from(front.running))
            front.leave(victim)
            waiting.append(victim)
        if front.running and data.draw(st.integers(0, 19)) == 0:
            waiting += front.running
            front = opened()
        chunks = {i: data.draw(st.sampled_from([0, 1, 3, 16, 64])) for i in range(len(front.running))}
        front.step(chunks, guess=data.draw(st.sampled_from([0, 4, 9])))
    for sequence in waiting:
        front.admit(sequence)
    front.run(guess=4)
    assert [s.answer for s in sequences] == [a.answer for a in answers]


def test_the_forms_are_different_models() -> None:
    """What is compared above is really quantised: no two forms have the same log-probabilities."""
    logprobs = {form: tuple(truth(form, "greedy", 1, 21).logprobs) for form in FORMS}
    assert len(set(logprobs.values())) == len(FORMS)
