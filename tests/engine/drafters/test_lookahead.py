"""The window, the pool, and what neither may do."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.drafters.dag import Dag
from forerun.engine.drafters.draft import Commit, Draft, Drafter, Terms
from forerun.engine.drafters.lookahead import Lookahead
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.drafters.suffix import Suffix
from forerun.engine.errors import StartError
from forerun.engine.verify import walk
from tests.engine.test_identity import fresh, truth
from tests.engine.tiny import ROWS, Front, Sequence_, tiny_engine

Target = Callable[[tuple[int, ...]], int]


def words(text: tuple[int, ...]) -> int:
    """A target that writes words of four tokens, 40 of them; which comes next depends on the whole text before."""
    last = text[-1]
    return last + 1 if last % 4 < 3 else zlib.crc32(bytes(text)) % 40 * 4


def of_three(text: tuple[int, ...]) -> int:
    """One that looks at three, and wanders."""
    return (text[-1] * 7 + text[-2] * 3 + text[-3] + 1) % 11


def answers_of(draft: Draft, text: list[int], target: Target) -> dict[tuple[int, ...], int]:
    return {tuple(path): target((*text, *path)) for path, probe in zip(draft.paths(), draft.probe) if probe}


def write(
    drafter: Drafter, target: Target, prompt: list[int], count: int, most: int = 40, price: float = 0.0
) -> tuple[list[int], list[Draft]]:
    """A text of so many further tokens and more, made as the engine would; what was proposed at each step."""
    text = list(prompt)
    text.append(target(tuple(text)))
    drafter.absorb(Commit([0], [0], [text[:-1]], [text[-1]]))
    drafts = []
    while len(text) < len(prompt) + count:
        (draft,) = drafter.propose([0], [most], Terms(price))
        drafts.append(draft)
        picks = [target(tuple(text)), *(target((*text, *path)) for path in draft.paths())]
        path = walk(draft, picks)
        known = len(text)
        answers = answers_of(draft, text, target)
        text += [picks[node] for node in (0, *(node + 1 for node in path))]
        drafter.absorb(Commit([0], [known - 1], [text[known - 1 : -1]], [text[-1]], answers=[answers]))
    return text, drafts


def guesses_of(draft: Draft) -> list[int]:
    return [node for node, probe in enumerate(draft.probe) if not probe]


def test_words_are_guessed_that_were_never_said() -> None:
    """By the window alone: the target invents them behind guesses that were wrong."""
    text, drafts = write(Lookahead(window=6, ngram=4), words, [0, 4, 8], 160)
    assert all(token == words(tuple(text[:place])) for place, token in enumerate(text) if place >= 3)
    said: set[int] = set()
    first_time = invented = place = 0
    for draft in drafts:
        root = text[3 + place]
        picks = [words(tuple(text[: 4 + place])), *(words((*text[: 4 + place], *path)) for path in draft.paths())]
        held = len(walk(draft, picks))
        if root % 4 == 0 and root not in said:
            first_time += 1
            invented += held == 3
        said.add(root)
        place += 1 + held
    assert first_time > 15 and invented > 0.4 * first_time
    _, steps = write(Lookahead(window=6, ngram=4), words, [0, 4, 8], 160, price=0.9)
    assert not any(draft.count for draft in steps), "without a window nothing is ever known"


def test_the_pool_holds_the_target_s_own_words() -> None:
    drafter = Lookahead(window=5, ngram=4, guesses=3)
    write(drafter, words, [1, 2, 3], 80)
    pool = drafter._rows[0].pool
    whole = [(key, *gram) for key, known in pool.items() for gram in known if key % 4 == 0]
    assert len(whole) > 5 and sum(gram == tuple(range(gram[0], gram[0] + 4)) for gram in whole) > 0.9 * len(whole)
    assert all(len(known) <= 3 and len(set(known)) == len(known) for known in pool.values())


@given(st.integers(1, 6), st.integers(2, 5), st.integers(1, 4), st.integers(1, 60), st.integers(0, 1 << 20))
@settings(deadline=None, max_examples=40)
def test_the_window_is_the_paper_s_mask(window: int, ngram: int, guesses: int, most: int, seed: int) -> None:
    """A token of a column sees the first tokens of the columns up to its own and its own column above it, and no guess sees a probe."""
    drafter = Lookahead(window, ngram, guesses, most)
    prompt = [seed % 7, seed % 11, seed % 13]
    _, drafts = write(drafter, of_three, prompt, 20, most)
    for draft in drafts:
        assert draft.count <= most and draft.probe == sorted(draft.probe), "guesses first"
        chain: list[int] = []
        depths = draft.depths()
        for node, (parent, probe) in enumerate(zip(draft.parent, draft.probe)):
            assert parent < 0 or draft.probe[parent] == probe
            if probe and parent == (chain[-1] if chain else -1) and (not chain or node - chain[-1] > 1 or parent == -1):
                chain.append(node)
                assert depths[node] == len(chain)
        assert all(0 < confidence <= 1 for confidence in draft.confidence)


def test_guesses_that_held_use_up_columns() -> None:
    drafter = Lookahead(window=4, ngram=3)
    drafter.absorb(Commit([0], [0], [[1, 2]], [3]))
    drafter.propose([0], [40])
    columns = [list(column) for column in drafter._rows[0].columns]
    drafter.absorb(Commit([0], [2], [[3, 4, 5]], [6], answers=[{}]))
    assert drafter._rows[0].columns == columns[2:]
    drafter.propose([0], [40])
    assert drafter._rows[0].columns[:2] == columns[2:] and len(drafter._rows[0].columns) == 4


@pytest.mark.parametrize("streams", [8, ROWS])
def test_where_many_streams_share_a_step_it_is_no_work(streams: int) -> None:
    """Were a row to cost no more than a fiftieth of a step, eight streams would want 0.16 tokens of it, and a window brings less. So
    the forwards are those of plain decoding, and of what a window needs nothing is made: no column, no n-gram, no dice thrown."""
    answers = [truth("greedy", 1 + seed % 4, 21) for seed in range(streams)]
    drafter = Lookahead()
    front, plain = Front(tiny_engine(drafter)), Front(tiny_engine())
    for each in (front, plain):
        for answer in answers:
            each.admit(fresh(answer))
    unthrown = random.Random(0).getstate()
    while front.running:
        front.step(guess=12, price=streams / 50)
        assert all(not row.pool and not row.columns and row.dice.getstate() == unthrown for row in drafter._rows.values())
    plain.run()
    assert front.engine._backend.calls == plain.engine._backend.calls  # type: ignore[attr-defined]
    assert not drafter._rows and drafter._probed == 0


def test_a_window_that_brings_nothing_is_left_out_and_tried_again() -> None:
    """The price of a row decides, against what probes have brought."""
    drafter = Lookahead(window=4, ngram=3)
    dice = iter(range(10_000))
    write(drafter, lambda text: 100 + next(dice), [1, 2], 200)  # a target that never says the same
    assert drafter.worth < 0.02
    (draft,) = drafter.propose([0], [40], Terms(0.02))
    assert not any(draft.probe)
    for _ in range(3000):
        drafter.propose([0], [40], Terms(0.04))
    assert drafter.propose([0], [40], Terms(0.04))[0].probe.count(True) > 0


def test_joined_with_another_probes_stand_behind_the_guesses() -> None:
    dag = Dag([Suffix(8), Lookahead(4, 3, most=20)], 20)
    text, drafts = write(dag, words, [1, 2, 3], 120)
    assert all(draft.probe == sorted(draft.probe) and draft.count <= 20 for draft in drafts)
    assert any(any(draft.probe) for draft in drafts)
    assert len(drafts) < 0.7 * len(text)
    probes = [bits for draft in drafts for bits, probe in zip(draft.source, draft.probe) if probe]
    assert set(probes) == {2}
    assert all(draft.parent[node] < 0 or not draft.probe[draft.parent[node]] for draft in drafts for node in guesses_of(draft))


def test_the_engine_tells_what_the_target_picked_and_counts_probes_as_rows_only() -> None:
    answer: Sequence_ = truth("greedy", 1, 21)
    drafter = Lookahead(4, 3)
    front = Front(tiny_engine(drafter))
    sequence = fresh(answer)
    front.admit(sequence)
    rows = 0
    while front.running:
        emits = front.step(guess=12)
        rows += sum(emit.drafted for emit in emits)
    assert sequence.answer == answer.answer
    assert drafter._probed > 0 and rows == sequence.drafted
    assert sequence.drafted <= 24 * 4 * 2, "a window of eight probes in each of 24 steps would be more"


@pytest.mark.parametrize("value", ["window=0", "ngram=1", "size=3", "window", "window=x"])
def test_what_it_does_not_know_is_refused(value: str) -> None:
    with pytest.raises(StartError) as refused:
        open_drafter(f"lookahead={value}", Setting())
    assert "window=5" in refused.value.cure


def test_it_needs_trees() -> None:
    with pytest.raises(StartError):
        open_drafter("lookahead", Setting(tree=False))
    assert open_drafter("lookahead=window=2,ngram=3,guesses=1", Setting()).needs.most == 6
