"""Rejection sampling against the law that it must have: by enumeration of all that can happen, and by counting what the engine says."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Needs, Room, Terms
from forerun.engine.drafters.model import Companion
from forerun.engine.drafters.speculator import Speculator
from forerun.engine.engine import Engine
from forerun.engine.rejection import Law, Rejection, chances, fit, judge, point, rest
from tests.engine.drafters.companions import host, identity
from tests.engine.test_identity import prompt_of, truth
from tests.engine.tiny import ROWS, VOCAB, Front, Sequence_, TinyModel, params_for, tiny_engine

pytestmark = pytest.mark.timeout(600)

Path = tuple[int, ...]


class World:
    """Random target and draft distributions over `vocab` tokens behind every path. `sharp`: 0 makes them equal."""

    def __init__(self, seed: int, vocab: int, sharp: float, certain: bool) -> None:
        self.vocab = vocab
        self._dice = np.random.default_rng(seed)
        self._sharp = sharp
        self._certain = certain
        self._laws: dict[Path, tuple[Law, Law]] = {}

    def laws(self, path: Path) -> tuple[Law, Law]:
        """Of the target and of the drafter."""
        if path not in self._laws:
            scores = 1.5 * self._dice.normal(size=self.vocab)
            target = np.exp(scores)
            other = np.exp(scores + self._sharp * self._dice.normal(size=self.vocab))
            if self._sharp > 1 and self._dice.random() < 0.3:
                target[self._dice.integers(self.vocab)] = 0.0
            drawn = point(int(other.argmax()), self.vocab) if self._certain else other / other.sum()
            self._laws[path] = target / target.sum(), drawn
        return self._laws[path]

    def probability(self, path: Path) -> float:
        """Of the target saying this."""
        return math.prod(float(self.laws(path[:i])[0][token]) for i, token in enumerate(path))

    def chain(self, path: Path) -> tuple[list[Law], list[Law]]:
        every = [self.laws(path[:i]) for i in range(len(path) + 1)]
        return [target for target, _ in every], [drawn for _, drawn in every[:-1]]

    def drawn(self, path: Path) -> float:
        """Probability that this chain is drafted."""
        return math.prod(float(self.laws(path[:i])[1][token]) for i, token in enumerate(path))


def drafts(world: World, depth: int, ends: bool, path: Path = ()) -> Iterator[Path]:
    """All chains that may be drafted. `ends`: a drafter may stop earlier for what it has just drawn."""
    if len(path) == depth or (ends and path and (7 * sum(path) + 3 * len(path)) % 5 < 2):
        yield path
        return
    for token in range(world.vocab):
        if world.laws(path)[1][token] > 0.0:
            yield from drafts(world, depth, ends, (*path, token))


def outcomes(world: World, depth: int, ends: bool = False) -> tuple[dict[Path, float], float]:
    """Probability of everything that a round of `depth` drafted tokens can say, and the mean number of accepted tokens."""
    said: dict[Path, float] = {}
    mean = 0.0
    for path in drafts(world, depth, ends):
        target, drawn = world.chain(path)
        worth, chance = chances(path, target, drawn)
        left, length = world.drawn(path), len(path)
        for accepted in range(length, -1, -1):
            here = left * (chance[accepted - 1] if accepted else 1.0)
            left -= here
            mean += here * accepted
            law = (
                target[length] if accepted == length else rest(worth[accepted - 1] if accepted else 1.0, target[accepted], drawn[accepted])
            )
            if here > 0.0:
                for token in range(world.vocab):
                    run = (*path[:accepted], token)
                    said[run] = said.get(run, 0.0) + here * float(law[token])
    return said, mean


worlds = st.builds(World, st.integers(0, 10_000), st.integers(2, 4), st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]), st.booleans())


@settings(max_examples=60)
@given(worlds, st.integers(1, 3), st.booleans())
def test_what_is_said_has_the_targets_law(world: World, depth: int, ends: bool) -> None:
    """Exactly: a run that was said goes on as the target would; all continuations together have the target's probabilities."""
    said, _ = outcomes(world, depth, ends)
    assert sum(said.values()) == pytest.approx(1.0)
    for path in itertools.product(range(world.vocab), repeat=depth + 1):
        begun = sum(chance * world.probability(path) / world.probability(run) for run, chance in said.items() if _begins(run, path, world))
        assert begun == pytest.approx(world.probability(path), abs=1e-12)


def _begins(run: Path, path: Path, world: World) -> bool:
    return path[: len(run)] == run and world.probability(run) > 0


def token_by_token(world: World, depth: int) -> float:
    """Mean number of accepted tokens of the older rule: each with min(1, p/q), up to the first that is not."""
    mean = 0.0
    for count in range(1, depth + 1):
        for path in itertools.product(range(world.vocab), repeat=count):
            kept = 1.0
            for i, token in enumerate(path):
                target, drawn = world.laws(path[:i])
                kept *= min(float(target[token]), float(drawn[token]))
            mean += kept
    return mean


@settings(max_examples=60)
@given(worlds, st.integers(1, 4))
def test_a_block_accepts_at_least_what_its_tokens_would(world: World, depth: int) -> None:
    assert outcomes(world, depth)[1] >= token_by_token(world, depth) - 1e-12


def test_a_block_accepts_more() -> None:
    gains = []
    for seed in range(8):
        world = World(seed, 3, 1.5, certain=False)
        gains.append(outcomes(world, 4)[1] / token_by_token(world, 4))
    assert min(gains) >= 1 - 1e-12 and sum(gains) / len(gains) > 1.03


@given(st.integers(0, 1000), st.integers(1, 4))
def test_for_certain_guesses_both_rules_are_one(seed: int, depth: int) -> None:
    world = World(seed, 4, 1.0, certain=True)
    assert outcomes(world, depth)[1] == pytest.approx(token_by_token(world, depth))


def test_equal_laws_accept_everything() -> None:
    world = World(1, 4, 0.0, certain=False)
    assert outcomes(world, 3)[1] == pytest.approx(3.0)


def chi_square(counts: Counter[Path], law: dict[Path, float], trials: int) -> tuple[float, float]:
    """The statistic, and what it exceeds once in ten thousand times (Wilson and Hilferty). Cells of few counts are put together."""
    cells: list[tuple[float, float]] = []
    small = [0.0, 0.0]
    for path, probability in law.items():
        expected, found = trials * probability, float(counts.get(path, 0))
        if expected >= 8:
            cells.append((found, expected))
        else:
            small = [small[0] + found, small[1] + expected]
    cells += [(small[0], small[1])] if small[1] > 1 else []
    free = len(cells) - 1
    limit = free * (1 - 2 / (9 * free) + 3.72 * math.sqrt(2 / (9 * free))) ** 3
    return sum((found - expected) ** 2 / expected for found, expected in cells), limit


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_coins_fall_as_they_should(depth: int, certain: bool) -> None:
    """The whole rule with real draws: 5,000 rounds, completed by the target."""
    world, dice, trials, counts = World(depth, 3, 1.5, certain), np.random.default_rng(depth), 5000, Counter[Path]()
    for _ in range(trials):
        path: Path = ()
        for _ in range(depth):
            path = (*path, _draw(dice, world.laws(path)[1]))
        target, drawn = world.chain(path)
        accepted, law = judge(path, target, drawn, dice.random(depth).tolist())
        said: Path = (*path[:accepted], _draw(dice, law))
        while len(said) < depth + 1:
            said = (*said, _draw(dice, world.laws(said)[0]))
        counts[said] += 1
    exact = {path: world.probability(path) for path in itertools.product(range(3), repeat=depth + 1)}
    found, limit = chi_square(counts, exact, trials)
    assert found < limit
    wrong = {path: exact[path[1:] + path[:1]] for path in exact}
    assert chi_square(counts, wrong, trials)[0] > limit, "the test would see another law"


def _draw(dice: np.random.Generator, law: Law) -> int:
    return int(np.searchsorted(np.cumsum(law), dice.random() * law.sum(), side="right").clip(0, len(law) - 1))


# In the engine

PROMPT = prompt_of(1, 21)
ROUNDS = 80
LENGTH = 3


class Guessing:
    """Drafts chains of up to four tokens: always the same ones, or drawn from a distribution of its own with the seed that it is told."""

    def __init__(self, favourites: list[int], draws: bool) -> None:
        self.needs = Needs(most=4)
        self.seeds: dict[int, int] = {}
        self.heard: dict[int, int] = {}
        self._favourites = favourites
        self._draws = draws

    def absorb(self, commit: Commit) -> None:
        assert commit.params is not None
        for row, start, tokens, params in zip(commit.rows, commit.start, commit.tokens, commit.params):
            self.seeds[row], self.heard[row] = params.seed, start + len(tokens)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        return [self._draft(row, most) for row, most in zip(rows, budget)]

    def _draft(self, row: int, most: int) -> Draft:
        if not self._draws:
            return Draft.chain([self._favourites[(self.heard[row] + i) % len(self._favourites)] for i in range(most)], [0.9, 0.4] * 2)
        law = np.zeros(VOCAB)
        law[self._favourites] = np.arange(len(self._favourites), 0, -1)
        law /= law.sum()
        dice = np.random.default_rng([self.seeds[row], self.heard[row]])
        return dataclasses.replace(Draft.chain([_draw(dice, law) for _ in range(most)]), law=[law] * most)

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            self.seeds.pop(row, None)


def engine_of(drafter: Drafter) -> Engine:
    """The tiny engine with another rule of acceptance."""
    plain = tiny_engine(drafter)
    speculator = Speculator(drafter, VOCAB, plain.ready.max_tokens, plain.ready.max_nodes, ROWS * 4, rejects=True)
    plain._speculator, plain._accept = speculator, Rejection(plain._backend.ops, plain._sampler)
    return plain


def law_of(kind: dict[str, object]) -> dict[Path, float]:
    """What the target says with which probability, from the alternatives it reports."""
    found: dict[Path, float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[Path, float] = {}
        for path, chance in found.items():
            tokens = PROMPT + list(path)
            params = params_for(PROMPT, max_new_tokens=LENGTH, top_n=VOCAB, **kind)
            sequence = Sequence_(PROMPT, params, tokens=list(path))
            front = Front(tiny_engine())
            front.admit(sequence)
            assert sequence.all == tokens
            front.step()
            for token, logprob in sequence.top[0]:
                if logprob > -50:
                    longer[(*path, token)] = chance * math.exp(logprob)
        found = longer
    return found


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize(
    "kind",
    [{"sample": True, "top_k": 3, "temperature": 1.5}, {"sample": True, "top_k": 4, "repetition_penalty": 1.6, "temperature": 2.0}],
    ids=["top-k", "penalties"],
)
def test_the_engine_says_what_the_target_would(kind: dict[str, object], draws: bool) -> None:
    """Sequences of three tokens of some 1,300 seeds, a random number of guesses each step, prices included."""
    exact = law_of(kind)
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-5)
    likeliest = Counter[int]()
    for path, chance in exact.items():
        for token in path:
            likeliest[token] += chance  # type: ignore[assignment]
    drafter = Guessing([token for token, _ in likeliest.most_common(4)], draws)
    front, counts, dice, accepted = Front(engine_of(drafter)), Counter[Path](), random.Random(3), 0
    for number in range(ROUNDS):
        sequences = [Sequence_(PROMPT, params_for(PROMPT, seed=97 * number + i, max_new_tokens=LENGTH, **kind)) for i in range(ROWS)]
        for sequence in sequences:
            front.admit(sequence)
        while front.running:
            front.step(guess=dice.choice([0, 1, 4]), price=dice.choice([0.0, 0.5]))
        counts.update(tuple(sequence.tokens) for sequence in sequences)
        accepted += sum(sequence.accepted for sequence in sequences)
        if not number:
            assert set(drafter.seeds.values()).isdisjoint({97 * number + i for i in range(ROWS)}), "it must not know the row's dice"
    found, limit = chi_square(counts, exact, ROUNDS * ROWS)
    assert found < limit
    assert accepted > ROUNDS


def test_what_stays_as_it_was() -> None:
    """Without guesses, and for greedy requests with them, the tokens are those of the default; with equal guesses a seed repeats."""
    for kind in ("greedy", "penalties", "everything"):
        answer = truth(kind, 1, 21)
        for guess in (0, 4) if kind != "everything" else (0,):
            front = Front(engine_of(Guessing(answer.tokens[:3], False)))
            sequence = Sequence_(answer.prompt, answer.params)
            front.admit(sequence)
            front.run(guess=guess)
            assert sequence.answer == answer.answer
    texts = []
    for _ in range(2):
        front = Front(engine_of(Guessing(truth("sampled", 1, 21).tokens[:4], True)))
        sequence = Sequence_(PROMPT, params_for(PROMPT, sample=True, top_n=2))
        front.admit(sequence)
        front.run(guess=4)
        assert len(sequence.tokens) == len(sequence.logprobs) == len(sequence.top) == 24
        texts.append(sequence.answer)
    assert texts[0] == texts[1]


def test_a_chosen_token_has_its_own_logprob() -> None:
    front = Front(engine_of(Guessing(truth("greedy", 1, 21).tokens[:4], True)))
    sequences = [Sequence_(PROMPT, params_for(PROMPT, seed=seed, sample=True, top_k=5, top_n=5)) for seed in range(ROWS)]
    for sequence in sequences:
        front.admit(sequence)
    front.run(guess=4)
    assert sum(sequence.accepted for sequence in sequences) > 0
    for sequence in sequences:
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs, sequence.top):
            assert dict(top)[token] == pytest.approx(logprob, abs=1e-6)


def test_trees_are_cut_to_a_chain_and_drawn_ones_are_not_cut_for_what_they_are() -> None:
    tree = Draft([1, 2, 3, 4, 5], [-1, -1, 0, 2, 1], [0.5, 0.9, 0.5, 0.5, 0.9], [False, False, False, True, False])
    whole, dear = fit(tree, Room(9, 9, VOCAB, 0.0)), fit(tree, Room(9, 9, VOCAB, 0.4))
    assert (whole.token, whole.parent, dear.token) == ([1, 3], [-1, 0], [1])
    drawn = dataclasses.replace(Draft.chain([1, 2, 3], [0.1, 0.1, 0.1]), law=[point(i, 9) for i in range(3)])
    assert fit(drawn, Room(9, 9, VOCAB, 0.4)).token == [1, 2, 3]
    assert len(fit(drawn, Room(9, 2, VOCAB, 0.4)).law) == fit(drawn, Room(9, 2, VOCAB, 0.4)).count == 2


def test_a_draft_model_says_from_what_it_drew() -> None:
    """`--speculator model=DIR` with this rule: sampled chains carry their laws, and an equal draft is accepted whole."""
    for seed in (0, 1):
        around = host()
        asked = msgspec.structs.replace(around.start, acceptance="rejection")
        drafter = Companion(TinyModel(around.backend, seed), identity(), dataclasses.replace(around, start=asked), 6, tree=False)
        front = Front(engine_of(drafter))
        sequences = [Sequence_(PROMPT, params_for(PROMPT, seed=9 + i, sample=True, **more)) for i, more in enumerate(KINDS_DRAWN)]
        for sequence in sequences:
            front.admit(sequence)
        front.run(guess=4)
        accepted, drafted = sum(s.accepted for s in sequences), sum(s.drafted for s in sequences)
        assert all(len(s.tokens) == 24 for s in sequences) and drafted > 0
        assert accepted == drafted if seed == 0 else 0 < accepted < drafted


KINDS_DRAWN: tuple[dict[str, object], ...] = ({}, {"temperature": 1.7}, {"top_k": 7}, {"repetition_penalty": 1.3, "top_p": 0.9})


def test_a_draft_model_keeps_the_law() -> None:
    """Counted against the exact law, with a stranger for a draft."""
    kind: dict[str, object] = {"sample": True, "top_k": 3, "temperature": 1.5}
    exact, counts = law_of(kind), Counter[Path]()
    around = host()
    asked = msgspec.structs.replace(around.start, acceptance="rejection")
    front = Front(engine_of(Companion(TinyModel(around.backend, 5), identity(), dataclasses.replace(around, start=asked), 6, tree=False)))
    for number in range(ROUNDS):
        sequences = [Sequence_(PROMPT, params_for(PROMPT, seed=31 * number + i, max_new_tokens=LENGTH, **kind)) for i in range(ROWS)]
        for sequence in sequences:
            front.admit(sequence)
        front.run(guess=2)
        counts.update(tuple(sequence.tokens) for sequence in sequences)
    found, limit = chi_square(counts, exact, ROUNDS * ROWS)
    assert found < limit
