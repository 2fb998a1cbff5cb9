"""The echo stepper: a pure function of tokens and seed, whatever the batch, the chunks and the pages; strict about plans."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.echo import PAGE_TOKENS, Echo, PlanError, answer, logprob
from forerun.messages import Admit, Emit, Feed, Inject, SamplingParams, Start, StepPlan

START = Start("none", max_rows=8, max_pool_tokens=8 * 64 * PAGE_TOKENS)
VOCAB = 32000


def params(prompt: list[int], new: int = 5, **more: object) -> SamplingParams:
    return SamplingParams(seed=7, prompt_tokens=len(prompt), max_new_tokens=new, **more)  # type: ignore[arg-type]


def pages_of(row: int) -> list[int]:
    return list(range(row * 64, row * 64 + 64))


def run_alone(echo: Echo, prompt: list[int], what: SamplingParams, row: int = 0) -> list[Emit]:
    emits: list[Emit] = []
    feed = Feed(row, len(prompt))
    plan = StepPlan(0, [Admit(row, prompt, 0, pages_of(row), what)], [feed])
    while not emits or not (emits[-1].finish or emits[-1].error):
        emits += echo.step(plan).emit
        plan = StepPlan(0, [], [Feed(row, 1)])
    return emits


def tokens_of(emits: list[Emit]) -> list[int]:
    return [token for emit in emits for token in emit.tokens]


@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=100), min_size=1, max_size=8),
    sample=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_batch_chunks_and_guesses_do_not_change_an_answer(prompts: list[list[int]], sample: bool, seed: int) -> None:
    rng = random.Random(seed)
    echo = Echo(START)
    what = [params(prompt, rng.randint(1, 20), sample=sample) for prompt in prompts]
    got: dict[int, list[int]] = {row: [] for row in range(len(prompts))}
    left = {row: len(prompt) for row, prompt in enumerate(prompts)}
    plan = StepPlan(0, [Admit(row, prompt, 0, pages_of(row), what[row]) for row, prompt in enumerate(prompts)])
    while left:
        feed = []
        for row in rng.sample(sorted(left), rng.randint(1, len(left))):
            chunk = rng.randint(1, left[row])
            left[row] = max(1, left[row] - chunk)
            feed.append(Feed(row, chunk, rng.randint(0, 4)))
        for emit in echo.step(StepPlan(0, plan.admit, feed)).emit:
            got[emit.row] += emit.tokens
            if emit.finish:
                del left[emit.row]
        plan = StepPlan(0)
    for row, prompt in enumerate(prompts):
        assert got[row] == answer(prompt, what[row], VOCAB)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60), st.integers(1, 19))
def test_a_sequence_admitted_again_continues_where_it_stopped(prompt: list[int], kept: int) -> None:
    whole = answer(prompt, params(prompt, 20, sample=True), VOCAB)
    echo = Echo(START)
    resumed = prompt + whole[:kept]
    emits = run_alone(echo, resumed, params(prompt, 20, sample=True))
    assert tokens_of(emits) == whole[kept:]
    assert emits[-1].finish == "length"


def test_greedy_answers_ignore_the_seed_and_sampled_ones_do_not() -> None:
    prompt = [1, 2, 3]
    several = [SamplingParams(seed, 3, 8, sample=sample) for seed in (1, 2) for sample in (False, True)]
    greedy_1, sampled_1, greedy_2, sampled_2 = (answer(prompt, what, VOCAB) for what in several)
    assert greedy_1 == greedy_2
    assert sampled_1 != sampled_2


def test_stop_ids_end_only_rows_whose_prompt_has_one() -> None:
    without = [answer([1, index], params([1, 2], 200, stop_ids=(9,)), 16) for index in range(8)]
    assert all(len(tokens) == 200 and 9 not in tokens for tokens in without)
    prompt = [1, 9]
    tokens = answer(prompt, params(prompt, 200, stop_ids=(9,)), VOCAB)
    assert tokens.index(9) == len(tokens) - 1 < 199
    assert run_alone(Echo(START), prompt, params(prompt, 200, stop_ids=(9,)))[-1].finish == "eos_token"


def test_at_the_limit_an_answer_ends_by_length_also_with_a_stop_id() -> None:
    """TGI's order, and the engine's."""
    prompt = [1, 9]
    whole = answer(prompt, params(prompt, 200, stop_ids=(9,)), VOCAB)
    for new, reason in ((len(whole), "length"), (len(whole) + 1, "eos_token")):
        emits = run_alone(Echo(START), prompt, params(prompt, new, stop_ids=(9,)))
        assert tokens_of(emits) == whole and whole[-1] == 9
        assert emits[-1].finish == reason


def test_log_probabilities_and_alternatives() -> None:
    prompt = [5, 6, 7]
    (emit,) = run_alone(Echo(START), prompt, params(prompt, 1, top_n=3, prompt_logprobs=True))
    assert emit.logprobs == [logprob(emit.tokens[0])]
    assert emit.prompt_logprobs == [logprob(6), logprob(7)]
    assert [token for token, _ in emit.top[0]] == [(emit.tokens[0] + i) % VOCAB for i in range(3)]
    assert emit.top[0] == sorted(emit.top[0], key=lambda pair: -pair[1])
    (bare,) = run_alone(Echo(START), prompt, params(prompt, 1, logprobs=False))
    assert bare.logprobs == [] and bare.top == [] and bare.prompt_logprobs == []


@given(st.integers(1, 80), st.lists(st.integers(1, 30), min_size=1, max_size=80))
def test_prompt_log_probabilities_come_whole_over_any_chunks(length: int, chunks: list[int]) -> None:
    prompt = list(range(100, 100 + length))
    echo = Echo(START)
    plan = StepPlan(0, [Admit(0, prompt, 0, pages_of(0), params(prompt, 1, prompt_logprobs=True))])
    got: list[float] = []
    fed = 0
    for chunk in [*chunks, length]:
        chunk = min(chunk, length - fed)
        if chunk:
            got += [value for emit in echo.step(StepPlan(0, plan.admit, [Feed(0, chunk)])).emit for value in emit.prompt_logprobs]
            plan = StepPlan(0)
            fed += chunk
    assert got == [logprob(token) for token in prompt[1:]]


def test_a_prefix_hit_on_what_was_written_is_accepted_and_on_anything_else_refused() -> None:
    prompt = list(range(40))
    echo = Echo(START)
    expected = tokens_of(run_alone(echo, prompt, params(prompt)))
    hit = Admit(1, prompt, 32, [*pages_of(0)[:2], *pages_of(1)], params(prompt))
    assert echo.step(StepPlan(0, [hit], [Feed(1, 8)])).emit[0].tokens == expected[:1]
    wrong = Admit(2, [99, *prompt[1:]], 32, [*pages_of(0)[:2], *pages_of(2)], params(prompt))
    with pytest.raises(PlanError, match="does not hold"):
        echo.step(StepPlan(0, [wrong]))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(0, [Admit(8, [1], 0, [0], params([1]))]), "does not exist"),
        (StepPlan(0, [Admit(0, [1], 0, [0], params([1]))] * 2), "still running"),
        (StepPlan(0, [Admit(0, [1], 1, [0], params([1]))]), "1 tokens computed of 1"),
        (StepPlan(0, [Admit(0, [1] * 20, 0, [0], params([1]))], [Feed(0, 20)]), "do not reach"),
        (StepPlan(0, [Admit(0, [1], 0, [0], params([1]))], [Feed(0, 2)]), "but it has 1"),
        (StepPlan(0, [Admit(0, [1], 0, [0], params([1]))], [Feed(0, 0)]), "but it has 1"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Echo(START).step(plan)


def test_feeds_and_drops_of_rows_that_ended_are_ignored() -> None:
    echo = Echo(START)
    run_alone(echo, [1, 2], params([1, 2], 1))
    assert echo.step(StepPlan(0, [], [Feed(0, 1)])).emit == []
    assert echo.step(StepPlan(0, [], [], [0])).emit == []
    run_alone(echo, [1, 2], params([1, 2], 1))


def test_an_injected_failure_ends_one_row() -> None:
    echo = Echo(START)
    echo.inject(Inject("fail", 3))
    emits = run_alone(echo, [1, 2], params([1, 2], 9))
    assert emits[-1].error and len(tokens_of(emits)) == 2
    assert run_alone(echo, [1, 2], params([1, 2], 9))[-1].finish == "length"


def test_limits_come_from_the_model_folder_and_from_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 260, "max_position_embeddings": 512}))
    ready = Echo(Start(str(tmp_path), max_pool_tokens=1024, max_total_tokens=4096)).ready
    assert (ready.vocab, ready.max_tokens, ready.pages, ready.page_tokens) == (260, 512, 1024 // PAGE_TOKENS, PAGE_TOKENS)
    assert Echo(Start(str(tmp_path), max_total_tokens=100)).ready.max_tokens == 100


def test_an_echo_worker_never_imports_torch() -> None:
    code = (
        "import sys; from forerun.engine.worker import build; from forerun.messages import Start\n"
        "build(Start('none', echo=True), print); print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
