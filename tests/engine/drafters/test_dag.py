"""Joined drafters: one tree of what any of them proposes, believed as far as it was right before."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.backends.base import PoolSpec
from forerun.engine.drafters.dag import Dag
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Terms
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.errors import StartError
from forerun.messages import Admit, Feed, SamplingParams, StepPlan
from tests.engine.drafters.companions import companion
from tests.engine.drafters.test_draft import trees
from tests.engine.drafters.test_model import hear, place
from tests.engine.test_identity import prompt_of
from tests.engine.tiny import tiny_engine

POOL = PoolSpec(1, 1, 16, torch.float32)


class Fixed:
    """Proposes what it is told to, and records what it hears."""

    def __init__(self, draft: Draft | None = None, dear: bool = False, layers: tuple[int, ...] = (), lazy: bool = True) -> None:
        self.needs = Needs(layers, (POOL,) if dear else (), 8, lazy)
        self.draft = draft or Draft.none()
        self.asked: list[list[int]] = []
        self.heard: list[Commit] = []
        self.forgotten: list[int] = []

    def absorb(self, commit: Commit) -> None:
        self.heard.append(commit)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self.asked.append(rows)
        return [self.draft for _ in rows]

    def forget(self, rows: list[int]) -> None:
        self.forgotten += rows


def survival(draft: Draft) -> list[float]:
    found: list[float] = []
    for parent, confidence in zip(draft.parent, draft.confidence):
        found.append(confidence * (found[parent] if parent >= 0 else 1))
    return found


@given(st.lists(trees(), min_size=2, max_size=3), st.integers(1, 30))
def test_the_union_of_all_paths_best_first(drafts: list[Draft], most: int) -> None:
    dag = Dag([Fixed(draft) for draft in drafts], 100)
    whole = dag.propose([0], [100])[0]
    paths = {tuple(path) for draft in drafts for path in draft.paths()}
    assert sorted(map(tuple, whole.paths())) == sorted(paths), "each path once"
    alive = survival(whole)
    assert alive == sorted(alive, reverse=True) or alive == pytest.approx(sorted(alive, reverse=True))
    part = dag.propose([0], [most])[0]
    lists = whole.token, whole.parent, whole.confidence, whole.probe, list(whole.source)
    assert part == Draft(*(one[:most] for one in lists))
    for bits, path in zip(whole.source, whole.paths()):
        assert bits == sum(1 << i for i, draft in enumerate(drafts) if path in draft.paths())
    assert all(-1 <= parent < i for i, parent in enumerate(whole.parent))


@given(st.lists(trees(), min_size=2, max_size=3))
def test_a_chain_where_siblings_cannot_be_verified(drafts: list[Draft]) -> None:
    chain = Dag([Fixed(draft) for draft in drafts], 100, tree=False).propose([0], [100])[0]
    tree = Dag([Fixed(draft) for draft in drafts], 100).propose([0], [100])[0]
    assert chain.parent == list(range(-1, chain.count - 1))
    assert not tree.count or (chain.token[0] == tree.token[0] and chain.paths()[-1] in tree.paths())


def test_agreement_is_worth_more() -> None:
    draft = Dag([Fixed(Draft.chain([1, 2], [0.5, 0.5])), Fixed(Draft([1, 3], [-1, -1], [0.5, 0.5], [False] * 2))], 9).propose([0], [9])[0]
    confidence = dict(zip(draft.token, draft.confidence))
    assert confidence[1] > confidence[3] == confidence[2] == pytest.approx(0.5, abs=0.1)


def test_probes_of_one_source_and_guesses_of_another() -> None:
    """Whichever of them is named first."""
    probes, guesses = Fixed(Draft([5, 6], [-1, 0], [0.5, 0.5], [True, True])), Fixed(Draft.chain([1, 2]))
    for sources in ([probes, guesses], [guesses, probes]):
        (draft,) = Dag(sources, 8).propose([0], [8])
        assert draft.token == [1, 2, 5, 6] and draft.parent == [-1, 0, -1, 2] and draft.probe == [False, False, True, True]


def test_of_guesses_of_a_kind_the_surer_stays_the_surer() -> None:
    """Sixteen that hold nine times out of ten are not sixteen that hold always: what a source knows better than its class is kept."""
    source = Fixed(Draft.chain([1] * 4, [0.985] * 4))
    dag = Dag([source, Fixed()], 8)
    (sure,) = dag.propose([0], [8])
    source.draft = Draft.chain([1] * 4, [0.989] * 4)
    (surer,) = dag.propose([0], [8])
    assert all(one < other for one, other in zip(sure.confidence, surer.confidence))


def teach(dag: Dag, truth: list[int], rounds: int) -> None:
    """The row's text goes on with `truth` again and again."""
    start = 0
    for _ in range(rounds):
        dag.absorb(Commit([0], [start], [[9, *truth[:-1]]], [truth[-1]]))
        start += len(truth)
        dag.propose([0], [8])


def test_a_boaster_is_not_believed_for_long() -> None:
    boaster, modest = Fixed(Draft.chain([5, 6], [0.95, 0.95])), Fixed(Draft.chain([1, 2], [0.35, 0.35]))
    dag = Dag([boaster, modest], 8)
    assert dag.propose([0], [2])[0].token == [5, 6]
    teach(dag, [1, 2, 3], 60)
    draft = dag.propose([0], [2])[0]
    assert draft.token == [1, 2] and min(draft.confidence) > 0.8


def test_a_dear_source_is_asked_last_and_only_if_it_brings_more() -> None:
    dear, cheap = Fixed(Draft.chain([1, 2, 3, 4]), dear=True), Fixed(Draft.chain([1, 2, 3, 4]))
    dag = Dag([dear, cheap], 8)
    dag.propose([0], [8])
    assert cheap.asked == [[0]] and dear.asked == [], "the cheap one promises four tokens"
    cheap.draft = Draft.chain([1], [0.4])
    dag.propose([0, 1], [8, 8])
    assert dear.asked == [[0, 1]]


def test_a_dear_source_that_earns_nothing_is_left_alone_and_tried_again() -> None:
    dear, cheap = Fixed(Draft.chain([7, 7, 7]), dear=True), Fixed(Draft.chain([1, 2], [0.9, 0.1]))
    dag = Dag([dear, cheap], 8)
    teach(dag, [1, 5], 100)
    times = len(dear.asked)
    assert 0 < times < 20
    teach(dag, [1, 5], 300)
    assert times < len(dear.asked) < times + 5
    dear.draft = Draft.chain([1, 5, 1, 5])
    teach(dag, [1, 5], 300)
    assert len(dear.asked) > times + 150, "found again when it has become useful"


class Clock:
    """Time that passes when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Expert(Fixed):
    """A network that takes its time for a call, and is right about some rows: four tokens ahead there, nothing elsewhere."""

    def __init__(self, clock: Clock, seconds: float, good: set[int], right: int = 4) -> None:
        super().__init__(dear=True)
        self.clock, self.seconds, self.good, self.right = clock, seconds, good, right

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        self.asked.append(rows)
        self.clock.now += self.seconds
        return [Draft.chain([1] * self.right if row in self.good else [7, 7]) for row in rows]


def serve(
    dag: Dag,
    clock: Clock,
    rows: list[int],
    rounds: int,
    step_seconds: float,
    goodput: float,
    toll: list[float] | None = None,
    prompt: int = 1,
) -> float:
    """Tokens a second over so many rounds; every row's text is all ones."""
    began, tokens = clock.now, 0
    start = dict.fromkeys(rows, 0)
    told = {row: [1] * (prompt + 1) for row in rows}
    for _ in range(rounds):
        numbers = list(rows)
        dag.absorb(Commit(numbers, [start[r] for r in numbers], [told[r][:-1] for r in numbers], [told[r][-1] for r in numbers]))
        start = {row: start[row] + len(told[row]) - 1 for row in rows}
        drafts = dag.propose(numbers, [8] * len(rows), Terms(0.0, goodput, toll or ()))
        clock.now += step_seconds
        for row, draft in zip(numbers, drafts):
            held = max((sum(1 for _ in path) for path in draft.paths() if set(path) == {1}), default=0)
            told[row] = [1] * (held + 2)
            tokens += held + 1
    return tokens / (clock.now - began)


def test_two_experts_each_serve_the_rows_that_they_are_good_at() -> None:
    """One is right about rows 0 and 1, the other about 2 and 3: each is soon asked about its own and hardly ever about the others'."""
    clock = Clock()
    chat, code = Expert(clock, 0.002, {0, 1}), Expert(clock, 0.002, {2, 3})
    dag = Dag([Fixed(), chat, code], 8, clock=clock)
    best = 4 * 5 / (0.010 + 2 * 0.002)
    assert serve(dag, clock, [0, 1, 2, 3], 400, 0.010, goodput=best) > 0.95 * best
    for expert in (chat, code):
        rows = [row for asked in expert.asked[-300:] for row in asked]
        assert sum(row in expert.good for row in rows) > 0.97 * len(rows)


@pytest.mark.parametrize("seconds, right", [(0.001, 4), (0.005, 1), (0.020, 1), (0.050, 4), (0.200, 4), (0.001, 0)])
def test_a_source_is_asked_where_its_gain_is_worth_its_time(seconds: float, right: int) -> None:
    """Never far from the better of always and never asking: the loss of finding out is bounded."""
    clock = Clock()
    expert = Expert(clock, seconds, {0}, right)
    dag = Dag([Fixed(), expert], 8, clock=clock)
    plain, always = 1 / 0.010, (1 + right) / (0.010 + seconds)
    rate = serve(dag, clock, [0], 1000, 0.010, goodput=max(plain, always))
    assert rate > 0.95 * max(plain, always)
    assert (len(expert.asked) > 500) is (always > plain)


class Doubter(Expert):
    """Has four guesses for the next token and does not know which of them holds."""

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        super().propose(rows, budget, terms)
        return [Draft([7, 8, 1, 9], [-1] * 4, [0.25] * 4, [False] * 4) for _ in rows]


@pytest.mark.parametrize("row_costs, pays", [(0.02, True), (0.15, True), (0.35, False), (0.9, False)])
def test_a_source_is_asked_only_if_its_guesses_are_worth_being_verified(row_costs: float, pays: bool) -> None:
    """Time is nearly free; what counts is what a row of the forward costs."""
    clock = Clock()
    doubter = Doubter(clock, 0.0001, {0})
    dag = Dag([Fixed(), doubter], 8, clock=clock)
    serve(dag, clock, [0], 500, 0.010, goodput=100.0, toll=[row_costs * n for n in range(1, 9)])
    assert len(doubter.asked) > 450 if pays else len(doubter.asked) < 60


class Reader(Expert):
    """Reads what it has not read before it guesses: twenty tokens in a millisecond, so many a call, and has no guess meanwhile."""

    def __init__(self, clock: Clock, good: set[int], right: int, part: int) -> None:
        super().__init__(clock, 0.001, good, right)
        self.unread: dict[int, int] = {}
        self.part = part
        self.needs = dataclasses.replace(self.needs, behind=self.unread.__getitem__)

    def absorb(self, commit: Commit) -> None:
        for row, tokens in zip(commit.rows, commit.tokens):
            self.unread[row] = self.unread.get(row, 0) + len(tokens)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        drafts, left = super().propose(rows, budget, terms), self.part
        for i, row in enumerate(rows):
            read = min(left, self.unread[row])
            left -= read
            self.clock.now += read / 20e3
            self.unread[row] -= read
            drafts[i] = Draft.none() if self.unread[row] else drafts[i]
        return drafts


@pytest.mark.parametrize("part", [128, 2001])
@pytest.mark.parametrize("right", [0, 1, 4])
def test_prompts_are_not_read_for_rows_that_end_before_it_pays(right: int, part: int) -> None:
    """Prompts of 2,000 tokens take as long as ten steps, and each row has eight."""
    clock = Clock()
    reader = Reader(clock, set(range(200)), right, part)
    dag = Dag([Fixed(), reader], 8, clock=clock)
    tokens = 0.0
    for row in range(200):
        began = clock.now
        tokens += serve(dag, clock, [row], 8, 0.010, goodput=100.0, prompt=2000) * (clock.now - began)
        dag.forget([row])
    assert tokens / clock.now > 0.97 / 0.010


@pytest.mark.parametrize("part", [64, 2001])
def test_a_long_prompt_is_read_to_its_end_where_that_pays(part: int) -> None:
    """No guesses before that say nothing about those that come, and what it takes is learned from the part that was read."""
    clock = Clock()
    reader = Reader(clock, {0}, 4, part)
    dag = Dag([Fixed(), reader], 8, clock=clock)
    serve(dag, clock, [0], 400, 0.010, goodput=20.0, prompt=2000)
    assert len(reader.asked) == 400
    if part < 2000:
        assert dag._sources[-1].asking.reading(1000) == pytest.approx(0.050, rel=0.4)
    assert dag._sources[-1].asking.seconds(1) == pytest.approx(0.001, rel=0.4)


def test_of_a_row_that_is_never_read_the_source_learns_that_nothing_comes() -> None:
    """It says that it is behind, and does nothing about it: it cannot."""
    clock = Clock()
    reader = Reader(clock, {0}, 4, 0)
    serve(Dag([Fixed(), reader], 8, clock=clock), clock, [0], 400, 0.010, goodput=20.0, prompt=2000)
    assert len(reader.asked) < 60


def test_a_draft_model_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.drafters.model.CATCH_UP", 40)
    model = companion()
    dag = Dag([model, Fixed()], 8)
    place(dag)  # type: ignore[arg-type]
    hear(dag, prompt_of(2, 95), 0, 95)  # type: ignore[arg-type]
    found = [(dag.propose([0], [4])[0].count > 0, model.needs.behind(0)) for _ in range(3)]
    assert found == [(False, 55), (False, 15), (True, 0)]


def test_a_source_that_was_stopped_once_is_tried_as_if_it_had_not_been() -> None:
    """A second in its first ask, three milliseconds in the others; and those are paid for, in rounds without."""
    clock = Clock()
    expert = Expert(clock, 1.0, set())
    dag = Dag([Fixed(), expert], 8, clock=clock)
    serve(dag, clock, [0], 1, 0.010, goodput=500.0)
    expert.seconds = 0.003
    serve(dag, clock, [0], 3000, 0.010, goodput=500.0)
    assert 10 < len(expert.asked) < 30


def test_rows_that_come_later_profit_from_what_was_learned() -> None:
    """A source that was useless for many rows is not tried anew on each."""
    clock = Clock()
    expert = Expert(clock, 0.010, set())
    dag = Dag([Fixed(), expert], 8, clock=clock)
    for row in range(60):
        serve(dag, clock, [row], 20, 0.010, goodput=100.0)
        dag.forget([row])
    assert len(expert.asked) < 40


def test_everybody_hears_with_their_own_features() -> None:
    sources = [Fixed(layers=(7, 2), lazy=False), Fixed(), Fixed(layers=(2,), lazy=False)]
    dag = Dag(sources, 8)
    assert dag.needs.layers == (2, 7) and not dag.needs.lazy
    two, seven = torch.randn(3, 4), torch.randn(3, 4)
    dag.absorb(Commit([1], [0], [[5, 6, 7]], [None], [torch.cat([two, seven], 1)]))
    heard = [source.heard[0].features for source in sources]
    assert torch.equal(heard[0][0], torch.cat([seven, two], 1)) and heard[1] is None and torch.equal(heard[2][0], two)
    dag.absorb(Commit([1], [3], [[]], [8], [torch.zeros(0, 8)]))
    assert sources[0].heard[1].features[0].shape == (0, 8)
    dag.forget([1])
    assert all(source.forgotten == [1] for source in sources) and not dag._known and not dag._asked


@pytest.mark.parametrize("drafters", [[Fixed()], [Fixed()] * 5])
def test_what_cannot_be_joined(drafters: list[Fixed]) -> None:
    with pytest.raises(StartError):
        Dag(drafters, 8)


def test_joined_by_name() -> None:
    dag = open_drafter("ngram+suffix=chain,private", Setting(nodes=6, tree=False))
    assert dag.needs == Needs(most=6) and open_drafter("ngram+suffix", Setting()).needs.most == 16
    with pytest.raises(StartError):
        open_drafter("ngram+suffix=what+ever", Setting())
    with pytest.raises(StartError):
        open_drafter("ngram+eagle", Setting())


def test_what_need_not_have_been_spent_is_told_apart() -> None:
    clock = Clock()
    dag = Dag([Expert(clock, 0.002, {0}), Fixed()], 8, clock=clock)
    serve(dag, clock, [0], 3, 0.010, goodput=100.0)
    assert dag.needs.chosen() == pytest.approx(0.006) and dag.needs.chosen() == 0.0


def test_a_step_tells_the_front_what_need_not_have_been_spent() -> None:
    clock = Clock()
    engine = tiny_engine(Dag([Expert(clock, 0.002, {0}), Fixed()], 8, clock=clock))
    params = SamplingParams(seed=0, prompt_tokens=5, max_new_tokens=9)
    told = [engine.step(StepPlan(1, [Admit(0, [1, 2, 3, 4, 5], 0, [0, 1], params)], [Feed(0, 5)])).chosen_us]
    told += [engine.step(StepPlan(step, feed=[Feed(0, 1, guess)], budget=guess)).chosen_us for step, guess in ((2, 4), (3, 0), (4, 4))]
    assert told == [0, 2000, 0, 2000]
