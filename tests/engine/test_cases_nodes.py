"""Processing at a node is that of a row to which the node's path was committed: the same token, log-probability and alternatives, bit for
bit, and nothing of the path stays behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.backends.registry import open_backend
from forerun.engine.rows import Counts, Row
from forerun.engine.sampler import Ask, Choice, Sampler
from forerun.messages import SamplingParams
from tests.engine.test_identity import KINDS, fresh, spread, truth
from tests.engine.test_identity import Script as Knowing
from tests.engine.tiny import VOCAB, Front, tiny_engine

pytestmark = pytest.mark.timeout(600)
OPS = open_backend("cpu", 1).ops

names = st.sampled_from(sorted(KINDS))
paths = st.lists(st.integers(0, VOCAB - 1), max_size=6)
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def row_of(kind: str, tokens: list[int], prompt: int) -> Row:
    return Row.open(
        0, SamplingParams(**{"seed": 5, "prompt_tokens": prompt, "max_new_tokens": 99, **KINDS[kind]}), list(tokens), len(tokens) - 1
    )  # type: ignore[arg-type]


def said(choice: Choice) -> tuple[object, ...]:
    return choice.token, choice.logprob, choice.top, choice.error


@settings(max_examples=150)
@given(st.lists(st.tuples(names, tokens, st.lists(paths, min_size=1, max_size=5)), min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_a_node_is_what_its_path_would_have_led_to(rows: list[tuple[str, list[int], list[list[int]]]], seed: int) -> None:
    """Several rows of several kinds, several nodes each, in one call; against a row of its own for each node."""
    sampler = Sampler(OPS, VOCAB, 0.5, 2.0)
    asks: list[Ask] = []
    alone: list[Ask] = []
    for kind, known, nodes in rows:
        row = row_of(kind, known, len(known))
        for path in nodes:
            asks.append(Ask(len(asks), row, path))
            alone.append(Ask(0, row_of(kind, known + path, len(known)), ()))
    logits = 3 * torch.randn(len(asks), VOCAB, generator=torch.Generator().manual_seed(seed))
    before = [None if ask.row.counts is None else sorted(zip(ask.row.counts.ids, ask.row.counts.counts)) for ask in asks]
    together = [said(choice) for choice in sampler.choose(logits.clone(), asks)]
    for place, ask in enumerate(alone):
        assert together[place] == said(Sampler(OPS, VOCAB, 0.5, 2.0).choose(logits[place : place + 1].clone(), [ask])[0])
    assert before == [None if ask.row.counts is None else sorted(zip(ask.row.counts.ids, ask.row.counts.counts)) for ask in asks]


def test_every_kind_of_processing_looks_at_the_path() -> None:
    """The test above would see a path that is ignored: each of these depends on it."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    for kind, looks in (("penalties", True), ("watermark", True), ("sampled", True), ("greedy, alternatives", False)):
        row = row_of(kind, [1, 2, 3], 3)
        sampler = Sampler(OPS, VOCAB, 0.5, 2.0)
        answers = {str(said(sampler.choose(logits.clone(), [Ask(0, row, path)])[0])) for path in ((), (7, 7), tuple(range(40, 60)))}
        assert (len(answers) > 1) == looks, kind


def test_what_is_counted_after_accepted_runs_is_what_is_there() -> None:
    """Penalties go on from all committed tokens, each once, also those that were accepted in one step."""
    answers = [truth("penalties", 1, 21), truth("everything", 2, 9)]
    front = Front(tiny_engine(Knowing(answers, spread)))
    sequences = [fresh(answer) for answer in answers]
    for sequence in sequences:
        front.admit(sequence)
    accepted = 0
    while front.running:
        accepted += sum(emit.accepted for emit in front.step(guess=7))
        for sequence in front.running:
            row = front.engine._rows._rows[sequence.row]
            assert row is not None and row.counts is not None and row.tokens == sequence.all
            fresh_counts = Counts(sequence.all)
            found = dict(zip(row.counts.ids.tolist(), row.counts.counts.tolist()))
            assert found == dict(zip(fresh_counts.ids.tolist(), fresh_counts.counts.tolist()))
            assert row.counts.length == len(sequence.all)
    assert accepted > 10
