"""The promises of a step: speculation, batching, chunking, prefix hits, preemption and restarts never change a bit of the answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Needs, Terms
from forerun.messages import SamplingParams
from tests.engine.tiny import STOP, VOCAB, Front, Sequence_, alone, params_for, random_tree, tiny_engine

RECORDS = LLMatcher.grammar_from_regex(r'(\{"[a-f]+":(true|false|-?[1-9][0-9]{0,2})\}[,;])+')
"""text that is now forced, now nearly free, and never has to end"""
PERSON = LLMatcher.grammar_from_json_schema(
    json.dumps(
        {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "is": {"enum": ["up", "down", None]}},
            "required": ["age", "is"],
            "additionalProperties": False,
        }
    ),
    overrides={"whitespace_flexible": False},
)
WORDS = LLMatcher.grammar_from_lark('start: "yes" | "yesterday" | "no, never" | "none"')
"""These two come to an end, where the row must end too."""

KINDS: dict[str, dict[str, object]] = {
    "greedy": {},
    "greedy, alternatives": {"top_n": 4},
    "sampled": {"sample": True},
    "temperature": {"sample": True, "temperature": 0.6, "seed": 2**64 - 5},
    "top-k": {"sample": True, "top_k": 7},
    "top-p": {"sample": True, "top_p": 0.8, "temperature": 1.3},
    "typical": {"sample": True, "typical_p": 0.7, "top_n": 3},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.9},
    "watermark": {"watermark": True, "sample": True},
    "OpenAI's": {
        "sample": True,
        "presence_penalty": 0.7,
        "count_penalty": 0.4,
        "logit_bias": ((3, 4.0), (9, -100.0)),
        "raw_logprobs": True,
        "top_n": 3,
    },
    "everything": {
        "sample": True,
        "watermark": True,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.95,
        "typical_p": 0.95,
        "top_n": 5,
    },
}
ALL = KINDS | {
    "grammar": {"grammar": RECORDS, "top_n": 3},
    "grammar, sampled": {"grammar": RECORDS, "sample": True, "temperature": 1.7, "raw_logprobs": True},
    "grammar, everything": {**KINDS["everything"], "grammar": RECORDS},
    "schema": {"grammar": PERSON, "sample": True, "seed": 5, "stop_ids": (STOP,), "top_n": 2},
    "choice": {"grammar": WORDS, "stop_ids": (STOP,)},
    "choice, sampled": {"grammar": WORDS, "sample": True, "temperature": 1.7, "frequency_penalty": 0.5, "stop_ids": (STOP,)},
}
"""also those that only an engine with a tokenizer can have"""


def prompt_of(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
def truth(kind: str, seed: int, length: int, dtype: torch.dtype = torch.float32, stop: tuple[int, ...] = ()) -> Sequence_:
    prompt = prompt_of(seed, length)
    return alone(prompt, params_for(prompt, **{"stop_ids": stop, **ALL[kind]}), dtype=dtype)


def fresh(sequence: Sequence_) -> Sequence_:
    return Sequence_(list(sequence.prompt), sequence.params)


class Script:
    """A drafter that knows every answer (by the row's prompt) and spoils it in its own way. Records what it hears."""

    def __init__(
        self, answers: list[Sequence_], make: Callable[[list[int], int], Draft], lazy: bool = True, layers: tuple[int, ...] = ()
    ) -> None:
        self.needs = Needs(layers=layers, most=64, lazy=lazy)
        self._answers = [a.prompt + a.tokens for a in answers]
        self._make = make
        self.rows: dict[int, list[int]] = {}
        self.newest: dict[int, int | None] = {}
        self.features: dict[int, list[torch.Tensor]] = {}
        self.calls = 0

    def absorb(self, commit: Commit) -> None:
        self.calls += 1
        for i, row in enumerate(commit.rows):
            told = self.rows.setdefault(row, [])
            assert commit.start[i] == len(told), "nothing is told twice and nothing is left out"
            told += commit.tokens[i]
            self.newest[row] = commit.next[i]
            if commit.features is not None:
                assert commit.features[i].shape[0] <= len(commit.tokens[i])
                self.features.setdefault(row, []).append(commit.features[i])

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self.calls += 1
        drafts = []
        for row, most in zip(rows, budget):
            newest = self.newest[row]
            assert newest is not None
            so_far = [*self.rows[row], newest]
            whole = next(a for a in self._answers if a[: len(so_far)] == so_far)
            drafts.append(self._make(whole[len(so_far) :], most))
        return drafts

    def forget(self, rows: list[int]) -> None:
        self.calls += 1
        for row in rows:
            del self.rows[row], self.newest[row]
            self.features.pop(row, None)


def perfect(future: list[int], most: int) -> Draft:
    return Draft.chain(future[:most])


def wrong(future: list[int], most: int) -> Draft:
    return Draft.chain([(t + 1) % VOCAB for t in (*future, 0, 0, 0, 0)][:most])


def halfway(future: list[int], most: int) -> Draft:
    return Draft.chain([*future[:2], *((t + 1) % VOCAB for t in future[2:])][:most])


def illegal(future: list[int], most: int) -> Draft:
    """An illegal id takes what hangs off it along; the rest counts."""
    return (
        Draft([VOCAB, -1, 2**31, *future[:1], *future[:1]], [-1, -1, 0, 2, -1], [1.0] * 4 + [1.0] * len(future[:1]), [False] * 5)
        if future
        else Draft.none()
    )


def twins(future: list[int], most: int) -> Draft:
    """Every node of the true path twice; the children hang off the second twin, then off the first."""
    token, parent = [], []
    for depth, t in enumerate(future[: most // 2]):
        token += [t, t]
        parent += [-1, -1] if depth == 0 else [len(token) - 4, len(token) - 4]
    return Draft(token, parent, [1.0] * len(token), [False] * len(token))


def backwards(future: list[int], most: int) -> Draft:
    """The true path lies last among decoys, so that all of it must be moved into place."""
    path = future[: max(1, most // 3)]
    decoys = [(path[0] + 1 + i) % VOCAB for i in range(min(3, most - len(path)))] if path else []
    at = len(decoys)
    return Draft(
        [*decoys, *path],
        [-1] * at + [-1 if i == 0 else at + i - 1 for i in range(len(path))],
        [1.0] * (at + len(path)),
        [False] * (at + len(path)),
    )


def spread(future: list[int], most: int) -> Draft:
    """The true path with a wrong sibling before each of its nodes."""
    token: list[int] = []
    parent: list[int] = []
    last = -1
    for t in future[: most // 2]:
        token += [(t + 1) % VOCAB, t]
        parent += [last, last]
        last = len(token) - 1
    return Draft(token, parent, [0.9] * len(token), [False] * len(token))


def probes(future: list[int], most: int) -> Draft:
    """Right guesses that may not be accepted because they are probes, then one that may."""
    right = future[:2]
    return (
        Draft([*right, *right], [-1, 0, -1, 2][: 2 * len(right)], [1.0] * 2 * len(right), [True] * len(right) + [False] * len(right))
        if len(right) == 2
        else Draft.none()
    )


def eos(stop: int) -> Callable[[list[int], int], Draft]:
    return lambda future, most: Draft.chain([stop] * most)


DRAFTS = {f.__name__: f for f in (perfect, wrong, halfway, illegal, twins, backwards, spread, probes)}


@pytest.mark.parametrize(
    "kind, make",
    [
        pytest.param(kind, make, id=f"{kind}-{name}")
        for kind in ALL
        for name, make in DRAFTS.items()
        if kind in ("greedy", "everything", "grammar") or make in (wrong, spread)
    ],
)
def test_speculation_changes_nothing(kind: str, make: Callable[[list[int], int], Draft]) -> None:
    answers = [truth(kind, seed, length) for seed, length in ((1, 21), (2, 5), (3, 40))]
    drafter = Script(answers, make)
    front = Front(tiny_engine(drafter))
    sequences = [fresh(answer) for answer in answers]
    for sequence in sequences:
        front.admit(sequence)
    front.run(guess=8)
    for sequence, answer in zip(sequences, answers):
        assert sequence.answer == answer.answer
    assert not drafter.rows, "every row that was heard of is forgotten at its end"
    drafted, accepted = sum(s.drafted for s in sequences), sum(s.accepted for s in sequences)
    if make in (perfect, backwards, spread, halfway):
        assert accepted > 0
    if make is perfect:
        assert accepted == drafted > 50
    if make is wrong:
        forced = "grammar" in ALL[kind]
        assert (accepted > 0) == forced and drafted > 0, "only what a grammar forces is right"


def test_a_perfect_drafter_needs_the_fewest_steps() -> None:
    answer = truth("greedy", 1, 21)
    front = Front(tiny_engine(Script([answer], perfect)))
    sequence = fresh(answer)
    front.admit(sequence)
    front.run(guess=5)
    assert len(sequence.tokens) == 24 and next(front.steps) - 1 == 4, "six tokens a step, the prompt's step included"
    assert sequence.accepted == sequence.drafted == 20


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_tree_any_budget(data: st.DataObject) -> None:
    """Random trees of likely and unlikely tokens, a random number of guesses each step, rows in any mixture."""
    names = data.draw(st.lists(st.sampled_from(sorted(ALL)), min_size=1, max_size=3))
    answers = [truth(name, 10 + i, 7 + 9 * i) for i, name in enumerate(names)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    front = Front(tiny_engine(Script(answers, lambda future, most: random_tree(generator, most, VOCAB, future[:4]))))
    sequences = [fresh(answer) for answer in answers]
    for sequence in sequences:
        front.admit(sequence)
    while front.running:
        front.step(guess=data.draw(st.sampled_from([0, 1, 3, 8, 20])))
    assert [s.answer for s in sequences] == [a.answer for a in answers]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_batch_chunks_preemption_prefix_and_restart(data: st.DataObject) -> None:
    """A random life: rows join at any time, prompts come in any chunks, rows are preempted and resumed (on other pages, another row, a
    prefix of their own or another's pages, another engine). Every answer is that of the request alone."""
    live(data, lambda answers: Script(answers, spread))


def live(data: st.DataObject, open_drafter: Callable[[list[Sequence_]], Drafter]) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    names = data.draw(st.lists(st.sampled_from(sorted(ALL)), min_size=2, max_size=4))
    answers = [truth(name, 20 + i % 2, 34, dtype) for i, name in enumerate(names)]
    front = Front(tiny_engine(open_drafter(answers), dtype))
    waiting = [fresh(answer) for answer in answers]
    sequences = list(waiting)
    for _ in range(60):
        if waiting and (not front.running or data.draw(st.booleans())):
            sequence = waiting.pop(0)
            front.admit(sequence, shared_prefix(front, sequence, data))
        if front.running and data.draw(st.integers(0, 7)) == 0:
            victim = data.draw(st.sampled_from(front.running))
            front.leave(victim)
            waiting.append(victim)
        if front.running and data.draw(st.integers(0, 19)) == 0:
            waiting += front.running
            front = Front(tiny_engine(open_drafter(answers), dtype))
        chunks = {i: data.draw(st.sampled_from([0, 1, 3, 16, 64])) for i in range(len(front.running))}
        front.step(chunks, guess=data.draw(st.sampled_from([0, 4])), price=data.draw(st.sampled_from([0.0, 0.2])))
    for sequence in waiting:
        front.admit(sequence)
    front.run(guess=4)
    assert [s.answer for s in sequences] == [a.answer for a in answers]


def shared_prefix(front: Front, sequence: Sequence_, data: st.DataObject) -> list[int]:
    """Pages of a running sequence that hold the start of this one, if the test wants them."""
    size = front.engine.ready.page_tokens
    for other in front.running:
        same = 0
        limit = min(other.computed, len(sequence.all) - 1)
        while same < limit and other.all[same] == sequence.all[same]:
            same += 1
        if same >= size and data.draw(st.booleans()):
            return other.pages[: same // size]
    return []


@pytest.mark.parametrize("make", [perfect, spread, twins, backwards], ids=lambda f: f.__name__)
def test_stop_ids_inside_an_accepted_run(make: Callable[[list[int], int], Draft]) -> None:
    free = truth("penalties", 1, 21)
    for place in range(0, 12, 2):
        stop = free.tokens[place]
        answer = truth("penalties", 1, 21, stop=(stop, VOCAB - 1))
        first = free.tokens.index(stop)
        assert answer.tokens == free.tokens[: first + 1] and answer.finish == "eos_token"
        front = Front(tiny_engine(Script([free], make)))
        sequence = fresh(answer)
        front.admit(sequence)
        front.run(guess=9)
        assert sequence.answer == answer.answer


def test_a_drafter_that_always_says_stop() -> None:
    stop = 40
    answer = truth("greedy", 1, 21, stop=(stop,))
    front = Front(tiny_engine(Script([answer], eos(stop))))
    sequence = fresh(answer)
    front.admit(sequence)
    front.run(guess=6)
    assert sequence.answer == answer.answer


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9])
def test_length_is_exact_inside_an_accepted_run(limit: int) -> None:
    whole = truth("sampled", 2, 9)
    params = params_for(whole.prompt, max_new_tokens=limit, **KINDS["sampled"])
    front = Front(tiny_engine(Script([whole], perfect)))
    sequence = Sequence_(whole.prompt, params)
    front.admit(sequence)
    front.run(guess=7)
    assert sequence.tokens == whole.tokens[:limit] and sequence.finish == "length"
    assert sequence.drafted <= limit - 1, "no guess behind the last token is computed"


def test_length_is_tested_before_the_stop_ids() -> None:
    whole = truth("greedy", 2, 9)
    place = next(i for i, token in enumerate(whole.tokens) if i > 1 and token not in whole.tokens[:i])
    params = params_for(whole.prompt, max_new_tokens=place + 1, stop_ids=(whole.tokens[place],))
    assert alone(whole.prompt, params).finish == "length"


@pytest.mark.parametrize("layers", [(), (0,), (0, 1)])
def test_a_drafter_that_hears_all_hears_what_became_true(layers: tuple[int, ...]) -> None:
    """Tokens without a gap, and the features of exactly the rows that hold: the same as without any guess."""
    heard: list[dict[int, torch.Tensor]] = []
    for guess in (0, 8):
        answers = [truth("greedy", 1, 21), truth("top-p", 3, 40)]
        drafter = Script(answers, spread, lazy=False, layers=layers)
        kept: dict[int, torch.Tensor] = {}
        front = Front(tiny_engine(drafter))
        sequences = [fresh(answer) for answer in answers]
        for sequence in sequences:
            front.admit(sequence)
        front.step({0: 10, 1: 33})
        for _ in range(4):
            front.step(guess=guess)
        for row, sequence in enumerate(sequences):
            told = [*drafter.rows[row], drafter.newest[row]]
            assert told == sequence.all
            kept[row] = torch.cat(drafter.features[row])[: len(sequence.prompt) + 3] if layers else torch.zeros(0)
        heard.append(kept)
        front.run(guess=guess)
        assert [s.answer for s in sequences] == [a.answer for a in answers]
    for row in heard[0]:
        assert torch.equal(heard[0][row], heard[1][row])


def test_no_guesses_cost_nothing() -> None:
    """Zero guesses: the drafter is not called, the forwards have the rows of plain decoding."""
    answers = [truth("greedy", 1, 21)]
    drafter = Script(answers, perfect)
    front, plain = Front(tiny_engine(drafter)), Front(tiny_engine())
    for f in (front, plain):
        f.admit(fresh(answers[0]))
        f.run()
    assert drafter.calls == 0
    assert front.engine._backend.calls == plain.engine._backend.calls == [(21, 1)] + [(1, 1)] * 23


def test_guesses_on_and_off_from_step_to_step() -> None:
    """A lazy drafter that was not asked for some steps catches up from the tokens alone."""
    answers = [truth("everything", 1, 21), truth("greedy", 3, 40)]
    front = Front(tiny_engine(Script(answers, halfway)))
    sequences = [fresh(answer) for answer in answers]
    for sequence in sequences:
        front.admit(sequence)
    for i in range(1000):
        if not front.running:
            break
        front.step(guess=6 if i % 3 == 2 else 0)
    assert [s.answer for s in sequences] == [a.answer for a in answers]


@pytest.mark.parametrize("chunk", [1, 5, 16, 33])
@pytest.mark.parametrize("kind", ["greedy", "everything"])
def test_prompt_logprobs_do_not_depend_on_chunks(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(5, 60)
    params = params_for(prompt, prompt_logprobs=True, **{**KINDS[kind], "top_n": 2, "raw_logprobs": True})
    whole = alone(prompt, params)
    assert len(whole.prompt_logprobs) == len(whole.prompt_top) == 59 and max(whole.prompt_logprobs) < 0
    monkeypatch.setattr("forerun.engine.engine.PROMPT_ROWS", 7)
    answers = [Sequence_(prompt, params, tokens=whole.tokens)]
    front = Front(tiny_engine(Script(answers, spread, lazy=False, layers=(1,))))
    twins, other = [Sequence_(prompt, params) for _ in range(3)], Sequence_(prompt_of(6, 50), params_for([0] * 50))
    for sequence in (*twins, other):
        front.admit(sequence)
    while any(sequence in front.running for sequence in twins):
        front.step({0: chunk, 1: chunk, 2: chunk, 3: 9})
    for sequence in twins:
        assert sequence.answer == whole.answer and sequence.prompt_logprobs == whole.prompt_logprobs
        assert sequence.prompt_top == whole.prompt_top
    assert max(logits for _, logits in front.engine._backend.calls) <= 7 + len(twins) + 1, "logits of one step, all prompts together"


def test_prompt_logprobs_are_the_models_own() -> None:
    prompt = prompt_of(5, 40)
    engine = tiny_engine()
    seen: list[torch.Tensor] = []
    engine._backend.spoil = lambda batch, logits: seen.append(logits.clone())
    front = Front(engine)
    unusual = {"repetition_penalty": 2.0, "max_new_tokens": 1, "top_n": 2}
    sequence = Sequence_(prompt, params_for(prompt, prompt_logprobs=True, raw_logprobs=True, **unusual))
    front.admit(sequence)
    front.run()
    spread = torch.log_softmax(seen[0].double(), 1)[:39]
    expected = spread[torch.arange(39), torch.tensor(prompt[1:])]
    assert torch.allclose(torch.tensor(sequence.prompt_logprobs).double(), expected, atol=1e-6)
    values, ids = spread.topk(2)
    assert [[token for token, _ in top] for top in sequence.prompt_top] == ids.tolist()
    assert torch.allclose(torch.tensor([[value for _, value in top] for top in sequence.prompt_top]).double(), values, atol=1e-6)
    plain = alone(prompt, params_for(prompt, prompt_logprobs=True, **unusual))
    assert plain.prompt_logprobs == sequence.prompt_logprobs and not plain.prompt_top, "TGI's prefill has none"


def test_same_seed_same_text_other_seed_other_text() -> None:
    prompt = prompt_of(1, 21)
    texts = {seed: alone(prompt, params_for(prompt, seed=seed, sample=True)).tokens for seed in (0, 1, 2**63, 2**64 - 1)}
    assert len({tuple(t) for t in texts.values()}) == 4
    assert alone(prompt, params_for(prompt, seed=1, sample=True)).tokens == texts[1]


def test_sampling_params_default_is_greedy() -> None:
    prompt = prompt_of(1, 21)
    assert alone(prompt, SamplingParams(5, 21, 24)).tokens == truth("greedy", 1, 21).tokens


def test_no_parameter_is_forgotten() -> None:
    """Whoever adds a way to choose tokens adds a kind of request that uses it: then all tests of identity know it."""
    others = {"seed", "prompt_tokens", "max_new_tokens", "stop_ids", "logprobs", "prompt_logprobs"}
    used = {name for kind in ALL.values() for name in kind}
    assert {field.name for field in msgspec.structs.fields(SamplingParams)} - others == used - {"seed", "stop_ids"}
