"""The target as a writer: what it writes depends on the job alone, and is what the engine would have written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.messages import Start
from forerun.train.target import Job, Target, Written, stop_ids
from tests.train.conftest import open_tiny

JOBS = [Job(number, [1, *range(20, 24 + number)], 6 + number % 4, number % 2 == 1, 7 * number) for number in range(9)]


def written(target: Target, jobs: Sequence[Job]) -> dict[int, Written]:
    waiting = iter(jobs)
    return {one.job.number: one for one in target.write(lambda: next(waiting, None))}


def test_a_text_is_the_same_whatever_it_is_written_beside(folder: Path) -> None:
    together = written(open_tiny(folder, rows=4), JOBS)
    assert sorted(together) == list(range(9))
    alone = open_tiny(folder, rows=1)
    for job in JOBS:
        one = written(alone, [job])[job.number]
        assert one.tokens == together[job.number].tokens
        assert np.array_equal(one.candidates, together[job.number].candidates)
        assert np.array_equal(one.logprobs, together[job.number].logprobs)


def test_greedy_texts_take_the_likeliest_token_and_sampled_ones_do_not_always(opened: Target) -> None:
    found = written(opened, JOBS)
    for job in JOBS:
        first = [int(row[0]) for row in found[job.number].candidates]
        if not job.sample:
            assert found[job.number].tokens == first
    assert any(found[job.number].tokens != [int(row[0]) for row in found[job.number].candidates] for job in JOBS if job.sample)


def test_candidates_are_the_models_own_opinion(folder: Path, opened: Target) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = written(opened, [JOBS[2]])[2]
    with torch.inference_mode():
        logits = model(torch.tensor([[*text.job.prompt, *text.tokens]])).logits[0, len(text.job.prompt) - 1 : -1]
    values, ids = torch.log_softmax(logits, -1).topk(8)
    assert np.array_equal(np.stack(text.candidates), ids.numpy())
    assert np.allclose(np.stack(text.logprobs), values.numpy(), atol=4e-3)


def test_a_text_ends_at_its_limit_or_with_a_stop_token(opened: Target) -> None:
    for text in written(opened, [Job(n, [1, 30 + n], 40, True, n) for n in range(12)]).values():
        stops = [place for place, token in enumerate(text.tokens) if token in opened.stops]
        assert stops == [len(text.tokens) - 1] if stops else len(text.tokens) == 40


def test_states_are_kept_of_the_texts_that_want_them(folder: Path) -> None:
    """Each in memory of its own: a part of a step's would keep those of all its texts."""
    target = Target(Start(model_id=str(folder), device="cpu", threads=1), 3, 192, 8, (-1, 2))
    found = written(target, [Job(number, [1, 20, 21], 5, False, 0, states=number == 1) for number in range(3)])
    assert [len(found[number].states) > 0 for number in range(3)] == [False, True, False]
    assert [len(piece) for piece in found[1].states] == [3] + [1] * (len(found[1].tokens) - 1)
    assert all(piece.untyped_storage().nbytes() == 2 * piece.numel() for piece in found[1].states)


def test_a_text_never_grows_beyond_the_longest(folder: Path) -> None:
    text = written(open_tiny(folder, longest=24), [Job(0, list(range(10, 30)), 100, False, 0)])[0]
    assert len(text.job.prompt) + len(text.tokens) <= 24


def test_a_model_that_does_not_say_how_an_answer_ends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="add eos_token_id"):
        stop_ids(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert stop_ids(tmp_path) == (4, 5)


def test_the_vocabulary_may_be_smaller_than_the_candidates(folder: Path) -> None:
    target = Target(Start(model_id=str(folder), device="cpu", threads=1), 1, 64, 1 << 20)
    assert written(target, [JOBS[0]])[0].candidates[0].shape[0] <= target.vocab
