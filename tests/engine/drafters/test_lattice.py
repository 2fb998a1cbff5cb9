"""Levels of candidates and the trees made of them, against an enumeration of every combination."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.drafters.draft import FREE, Draft, Terms
from forerun.engine.drafters.imitation import Imitation
from forerun.engine.drafters.lattice import RANKS, Lattice, Levels, lined_up
from forerun.engine.rows import Row
from forerun.engine.sampler import Ask, Sampler
from forerun.messages import SamplingParams
from tests.engine.drafters.companions import host
from tests.engine.tiny import VOCAB

OPS = host().backend.ops


def levels(tree: bool = True, free: bool = True, **more: object) -> Levels:
    return Levels(Imitation(OPS, VOCAB, 0.5, 2.0), OPS, VOCAB, tree, free=free, **more)  # type: ignore[arg-type]


def row(**params: object) -> Row:
    fields: dict[str, object] = {"seed": 3, "prompt_tokens": 4, "max_new_tokens": 99, **params}
    return Row.open(0, SamplingParams(**fields), [1, 2, 3, 4])  # type: ignore[arg-type]


def grown(one: Levels, logits: torch.Tensor, most: int, **params: object) -> tuple[Lattice, Draft]:
    """A lattice of all these levels [depth, V], and its draft."""
    lattice = Lattice(row(**params), most, len(logits))
    for level in logits:
        one.add([lattice], level.unsqueeze(0))
    return lattice, one.finish(lattice)


def survivals(draft: Draft) -> list[float]:
    found: list[float] = []
    for parent, confidence in zip(draft.parent, draft.confidence):
        found.append(confidence * (found[parent] if parent >= 0 else 1.0))
    return found


@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 4),
    most=st.integers(1, 30),
    sharp=st.sampled_from([0.3, 2.0, 6.0]),
    free=st.booleans(),
)
def test_the_likeliest_nodes_of_all_combinations(seed: int, depth: int, most: int, sharp: float, free: bool) -> None:
    logits = torch.randn(depth, VOCAB, generator=torch.Generator().manual_seed(seed)) * sharp
    one = levels(free=free)
    lattice, draft = grown(one, logits, most)
    rate = one.calibration.rate
    all_ = [
        math.prod(rate[lattice.levels[d][rank][1]] for d, rank in enumerate(ranks))
        for length in range(1, depth + 1)
        for ranks in itertools.product(*(range(len(level)) for level in lattice.levels[:length]))
        if free or not any(ranks[:-1])
    ]
    best = sorted(all_, reverse=True)[:most]
    assert sorted(survivals(draft), reverse=True) == pytest.approx(best)
    assert draft.count == len(best) and all(parent < i for i, parent in enumerate(draft.parent))
    assert len({tuple(path) for path in draft.paths()}) == draft.count, "no path twice"
    at, path = -1, []
    while any(parent == at for parent in draft.parent):
        children = [i for i, parent in enumerate(draft.parent) if parent == at]
        at = max(children, key=lambda i: draft.confidence[i])
        path.append(at)
    assert path == list(range(len(path))), "the likeliest path lies in front, where its KV need not be moved"


def test_candidates_are_the_likeliest_tokens() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    lattice, _ = grown(levels(), logits, 30)
    shares = torch.softmax(logits[0], 0).sort(descending=True)
    tokens = [token for token, _ in lattice.levels[0]]
    assert tokens == shares.indices[: len(tokens)].tolist() and 1 < len(tokens) <= RANKS


def test_a_price_leaves_out_what_cannot_pay() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    one = levels()
    dear = Lattice(row(), 30, 1)
    one.add([dear], logits, Terms(price=0.2))
    shares = torch.softmax(logits[0], 0).sort(descending=True).values
    assert len(dear.levels[0]) == max(1, int((shares > 0.2).sum()))


@pytest.mark.parametrize("params", [{"sample": True}, {"sample": True, "top_k": 4, "temperature": 0.7}, {"repetition_penalty": 1.7}])
def test_a_perfect_head_throws_the_targets_dice(params: dict[str, object]) -> None:
    """Logits equal to the target's give the target's picks, along the chain."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    one = levels(tree=False)
    lattice, draft = grown(one, logits, 4, **params)
    sampler = Sampler(OPS, VOCAB, 0.5, 2.0)
    path: list[int] = []
    for level in range(4):
        choice = sampler.choose(logits, [Ask(level, row(**params), tuple(path))])[0]
        path.append(choice.token)
    assert draft.token == path == lattice.chain


def test_drawn_chains_say_from_what() -> None:
    one = levels(tree=False, draws=True)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    _, draft = grown(one, logits, 3, sample=True)
    assert len(draft.law) == 3 and draft.parent == [-1, 0, 1]
    for law, level in zip(draft.law, logits):
        torch.testing.assert_close(torch.from_numpy(law).float(), torch.softmax(level, 0), atol=1e-4, rtol=1e-3)


def test_a_reduced_vocabulary_speaks_the_targets_ids() -> None:
    targets = np.array([5, 90, 17, 3])
    one = levels(targets=targets)
    logits = torch.tensor([[0.0, 4.0, 3.0, -2.0]])
    assert [token for token, _ in grown(one, logits, 9)[0].levels[0]][:2] == [90, 17]
    drawn = [token for token, _ in grown(one, logits, 9, sample=True, temperature=2.0)[0].levels[0]]
    assert len(drawn) > 2 and set(drawn) <= set(targets.tolist())


def test_confidences_are_what_came_true() -> None:
    """A head that says 0.9 and holds every other time is believed half."""
    one = levels(tree=False)
    logits = torch.full((1, VOCAB), -4.0)
    logits[0, 7] = 2.8 + math.log(VOCAB) - 4.0 + 2.0
    for turn in range(2000):
        _, draft = grown(one, logits, 1)
        one.calibration.settle(0, [7 if turn % 2 else 8])
    assert draft.token == [7] and abs(draft.confidence[0] - 0.5) < 0.05


def test_levels_go_on_while_they_pay() -> None:
    one = levels()
    sure, unsure = Lattice(row(), 9, 3), Lattice(row(), 9, 3)
    logits = torch.zeros(2, VOCAB)
    logits[0, 5] = 20.0
    one.add([sure, unsure], logits)
    assert sure.alive > 0.9 > 0.1 > unsure.alive
    assert one.goes_on(sure, Terms(price=0.3)) and not one.goes_on(unsure, Terms(price=0.3))
    one.pace.observe(1, 0.01)
    assert one.pays([sure], Terms(goodput=10.0)) and not one.pays([sure], Terms(goodput=1000.0)) and not one.pays([], FREE)
    one.add([sure], logits[:1])
    one.add([sure], logits[:1])
    assert not one.goes_on(sure), "it has as many levels as it may"


def test_lined_up_keeps_a_tree() -> None:
    nodes = [(1, -1, 0), (2, -1, 1), (3, 1, 1), (4, 0, 0)]
    assert lined_up(nodes, [0.2, 0.6]) == ([2, 3, 1, 4], [-1, 0, -1, 2], [1, 1, 0, 0])


@pytest.mark.parametrize("params", [{}, {"sample": True}])
def test_a_row_that_is_no_number_has_no_draft_and_the_others_have(params: dict[str, object]) -> None:
    one = levels()
    bad, good = Lattice(row(**params), 4, 2), Lattice(row(**params), 4, 2)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 5] = float("nan")
    one.add([bad, good], logits)
    assert not one.goes_on(bad) and one.goes_on(good)
    assert one.finish(bad).count == 0 and one.finish(good).count > 0


def test_a_request_that_allows_nothing_of_a_reduced_vocabulary_has_no_draft() -> None:
    one = levels(targets=np.array([5, 9]))
    lattice = Lattice(row(logit_bias=((5, -math.inf), (9, -math.inf))), 4, 2)
    one.add([lattice], torch.tensor([[1.0, 2.0]]))
    assert not one.goes_on(lattice) and one.finish(lattice).count == 0


def test_nothing_grown_is_no_draft() -> None:
    assert levels().finish(None).count == 0 and levels().finish(Lattice(row(), 4, 4)).count == 0
