"""A draft model: as good as it is, at every length; never more than it may be; and its pool holds what it says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from forerun.engine.drafters.dag import Dag
from forerun.engine.drafters.draft import Commit, Place, Terms
from forerun.engine.drafters.model import Companion
from forerun.engine.drafters.registry import open_drafter
from forerun.engine.drafters.suffix import Suffix
from forerun.engine.drafters.vocabulary import Vocabulary
from forerun.engine.errors import StartError
from forerun.engine.kv import Table
from tests.engine.drafters.companions import companion, host, setting, word, write_draft, write_target
from tests.engine.test_identity import KINDS, fresh, prompt_of, truth
from tests.engine.tiny import LONGEST, PAGES, ROWS, VOCAB, Front, Sequence_, alone, params_for, tiny_engine

WHOLE = Terms()


def steps_of(drafter: object, sequence: Sequence_, guess: int) -> list[int]:
    """Tokens that each step brought, the prompt's steps left out."""
    front = Front(tiny_engine(drafter))  # type: ignore[arg-type]
    front.admit(sequence)
    front.step()
    brought = []
    while front.running:
        before = len(sequence.tokens)
        front.step(guess=guess)
        brought.append(len(sequence.tokens) - before)
    return brought


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("guess", [1, 3, 8])
def test_a_perfect_draft_is_accepted_whole(kind: str, guess: int) -> None:
    """Greedy or with dice, whatever the processing: draft = target means k + 1 tokens a step."""
    answer = truth(kind, 1, 21)
    sequence = fresh(answer)
    brought = steps_of(companion(), sequence, guess)
    assert sequence.answer == answer.answer
    assert all(count == guess + 1 for count in brought[:-1])


@pytest.mark.parametrize("length", [2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 64, 100])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_perfect_draft_at_every_length(kind: str, length: int) -> None:
    """Around page boundaries, and through all of them: 24 tokens each."""
    sequence = fresh(truth(kind, 4, length))
    brought = steps_of(companion(), sequence, 4)
    assert all(count == 5 for count in brought[:-1]) and sequence.answer == truth(kind, 4, length).answer


@pytest.mark.parametrize("rows", [2, ROWS])
def test_rows_draft_together_and_each_is_perfect(rows: int) -> None:
    answers = [truth(kind, seed, 5 + 9 * seed) for seed, kind in zip(range(rows), list(KINDS) * 2)]
    drafter = companion()
    front = Front(tiny_engine(drafter))
    forwards = watch(drafter)
    sequences = [fresh(answer) for answer in answers]
    for sequence in sequences:
        front.admit(sequence)
    front.step()
    front.step(guess=3)
    assert rows * 3 > len(forwards) >= 3, "a forward a level for all rows"
    assert forwards[1:3] == [rows, rows] or rows > 8, "of one token each behind the first"
    front.run(guess=3)
    assert [s.answer for s in sequences] == [a.answer for a in answers]
    assert all(s.accepted == s.drafted for s in sequences)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_perfect_draft_with_random_budgets_and_pauses(most: int) -> None:
    """After rounds without guesses, with fewer, with one: everything proposed is accepted."""
    answer = truth("everything", 1, 21)
    sequence = fresh(answer)
    front = Front(tiny_engine(companion()))
    front.admit(sequence)
    step = 0
    while front.running:
        step += 1
        front.step(guess=(step * most) % 4)
    assert sequence.answer == answer.answer and sequence.accepted == sequence.drafted > 5


def test_a_wrong_draft_leaves_no_trace() -> None:
    """Another model's guesses are seldom right; then the next draft is that of a model that read the truth."""
    answer = truth("greedy", 1, 21)
    text = answer.prompt + answer.tokens
    one, two = companion(7), companion(7)
    for drafter in (one, two):
        place(drafter)
    for end in range(2, len(text)):
        hear(one, text, max(0, end - 2), end)
        drafted = one.propose([0], [4], WHOLE)[0]
        if end % 5 == 0:
            two.forget([0])
            place(two)
            hear(two, text, 0, end)
            assert drafted.token == two.propose([0], [4], WHOLE)[0].token, end


def watch(drafter: Companion) -> list[int]:
    """Rows of each forward of the draft model from now on."""
    forwards: list[int] = []
    run = drafter._run
    drafter._run = lambda batch: (forwards.append(batch.rows), run(batch))[1]
    return forwards


def place(drafter: Companion, rows: int = ROWS) -> Table:
    """Attached to a table whose rows have all the pages they can use, each its own."""
    table = Table(rows, LONGEST + 24, 16)
    size = table.pages.shape[1]
    for row in range(rows):
        table.grant(row, range(row * size, (row + 1) * size))
    pool = host().backend.pool(drafter.needs.pools[0], rows * size)
    drafter.needs.attach(Place((pool,), table, rows, LONGEST))
    return table


def hear(drafter: Companion, text: list[int], start: int, end: int, row: int = 0) -> None:
    """Tokens start … end−1 of the text, the last of which is the root."""
    drafter.absorb(Commit([row], [start], [text[start : end - 1]], [text[end - 1]]))


def test_a_long_prompt_is_caught_up_in_parts_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.drafters.model.CATCH_UP", 40)
    drafter = companion()
    place(drafter)
    forwards = watch(drafter)
    short, long = prompt_of(1, 9), prompt_of(2, 95)
    hear(drafter, short, 0, len(short), 0)
    hear(drafter, long, 0, len(long), 1)
    drafts = [drafter.propose([0, 1], [1, 1], WHOLE) for _ in range(4)]
    assert [[draft.count for draft in each] for each in drafts] == [[1, 0], [1, 0], [1, 1], [1, 1]]
    assert forwards == [9 + 31, 1 + 40, 1 + 24, 2]


def test_pages_that_hold_a_prefix_are_not_computed_again() -> None:
    """A row that comes back on its pages, and another that shares them; but not pages that somebody wrote to since."""
    drafter = companion()
    table = place(drafter)
    text = prompt_of(3, 70)
    fed = watch(drafter)

    def first(row: int) -> int:
        fed.clear()
        hear(drafter, text, 0, len(text), row)
        drafts.append(drafter.propose([row], [1], WHOLE)[0])
        return fed[0]

    drafts: list[object] = []
    assert first(0) == 70
    drafter.forget([0])
    assert first(0) == 70 - 64
    table.clear(1)
    table.grant(1, [*table.pages[0, :4], *range(40, 46)])
    assert first(1) == 70 - 64
    drafter.forget([0, 1])
    other = prompt_of(9, 20)
    hear(drafter, other, 0, 20, 0)
    drafter.propose([0], [1], WHOLE)
    assert first(1) == 70, "the first page was written to"
    assert all(draft == drafts[0] for draft in drafts)


def test_it_stops_where_another_level_is_not_worth_its_time() -> None:
    """A second that must bring many tokens ends the draft at its first level; a price ends it where survival falls below."""
    text = prompt_of(1, 21)
    free, dear, priced = companion(7), companion(7), companion(7)
    for drafter in (free, dear, priced):
        place(drafter)
        hear(drafter, text, 0, 21)
    whole = free.propose([0], [8])[0]
    assert dear.propose([0], [8], Terms(goodput=1e9))[0].count == 1 < whole.count
    part = priced.propose([0], [8], Terms(price=0.5))[0]
    alive = np.cumprod(whole.confidence)
    assert part.token == whole.token[: max(1, part.count)] and part.count == max(1, 1 + int((alive[:-1] * 0.6 > 0.5).sum()))


def test_runners_up_are_leaves_behind_the_chain() -> None:
    text = prompt_of(1, 21)
    drafter, chain = companion(7, tree=True), companion(7)
    for each in (drafter, chain):
        place(each)
        hear(each, text, 0, 21)
    draft, plain = drafter.propose([0], [8])[0], chain.propose([0], [8])[0]
    assert draft.count == 8 and len(set(draft.parent)) < 8
    depth = next(i for i, parent in enumerate(draft.parent) if parent != i - 1)
    assert draft.token[:depth] == plain.token[:depth], "the chain comes first, so that accepting it moves nothing"
    assert len(set(zip(draft.parent, draft.token))) == 8, "no node twice"
    alive: list[float] = []
    for parent, confidence in zip(draft.parent, draft.confidence):
        alive.append(confidence * (alive[parent] if parent >= 0 else 1.0))
    assert max(alive[depth:]) >= min(alive[:depth]) * 0.5


@pytest.mark.parametrize("kind", ["greedy", "everything", "sampled"])
def test_a_tree_finds_what_the_chain_misses(kind: str) -> None:
    answer = truth(kind, 1, 21)
    accepted = []
    for tree in (False, True):
        sequence = fresh(answer)
        steps_of(companion(7, tree=tree), sequence, 16)
        assert sequence.answer == answer.answer
        accepted.append(sequence.accepted)
    assert accepted[1] >= accepted[0]


def test_the_draft_models_limit_is_a_rows_limit() -> None:
    """Beyond the draft model's positions there are no guesses, up to them there are, and the answer is whole."""
    drafter = companion()
    drafter._model.max_tokens = 30
    prompt = prompt_of(1, 21)
    sequence = Sequence_(prompt, params_for(prompt))
    brought = steps_of(drafter, sequence, 4)
    assert sequence.tokens == truth("greedy", 1, 21).tokens
    assert brought[0] == 5 and brought[-1] == 1 and sequence.drafted == sequence.accepted == 8


def test_nothing_stays_of_rows_that_are_gone() -> None:
    drafter = companion()
    front = Front(tiny_engine(drafter))
    for kind in KINDS:
        front.admit(fresh(truth(kind, 1, 21)))
    front.run(guess=4)
    assert not drafter._rows and not drafter._held._rows and not drafter.calibration._proposed


def test_two_of_them_have_a_pool_each() -> None:
    """The perfect one and a stranger: what one writes does not disturb the other."""
    dag = Dag([companion(7), Suffix(8), companion()], 8)
    assert len(dag.needs.pools) == 2 and dag.needs.work_bytes == 2 * companion().needs.work_bytes
    for kind in ("greedy", "everything"):
        answer = truth(kind, 1, 21)
        sequence = fresh(answer)
        steps_of(dag, sequence, 6)
        assert sequence.answer == answer.answer
    assert sequence.accepted > 12


# -- vocabularies --------------------------------------------------------------------------------------------------------------


def test_a_draft_model_that_knows_half_of_the_tokens(tmp_path: Path) -> None:
    """In another order, with an unknown token of its own: it opens, guesses, and never says what the target does not know."""
    target = write_target(tmp_path / "target")
    words = ["<unk>", *(word(id) for id in range(VOCAB - 1, VOCAB // 2, -1)), "mine"]
    draft = write_draft(tmp_path / "draft", words, "<unk>")
    drafter = open_drafter(f"model={draft}", setting(target))
    answer = truth("sampled", 1, 21)
    sequence = fresh(answer)
    steps_of(drafter, sequence, 4)
    assert sequence.answer == answer.answer and sequence.drafted > 8
    assert drafter.needs.weight_bytes > 0


def test_a_stranger_is_refused_with_a_cure(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    draft = write_draft(tmp_path / "draft", [f"x{id}" for id in range(60)] + [word(id) for id in range(20)])
    with pytest.raises(StartError, match="20 of the 80") as error:
        open_drafter(f"model={draft}", setting(target))
    assert "suffix" in error.value.cure


@pytest.mark.parametrize("spec", ["model", "model="])
def test_which_model_must_be_said(spec: str, tmp_path: Path) -> None:
    with pytest.raises(StartError) as error:
        open_drafter(spec, setting(write_target(tmp_path)))
    assert "model=DIR" in error.value.cure


def test_a_row_with_a_token_that_cannot_be_read_waits() -> None:
    to_draft = np.arange(VOCAB)
    to_draft[5] = -1
    drafter = companion(vocabulary=Vocabulary(np.where(np.arange(VOCAB) == 5, -1, np.arange(VOCAB)), to_draft, False))
    place(drafter)
    hear(drafter, [1, 2, 5, 4, 3], 0, 5, row=0)
    hear(drafter, [1, 2, 6, 4, 3], 0, 5, row=1)
    assert [draft.count > 0 for draft in drafter.propose([0, 1], [3, 3])] == [False, True]


def test_an_unknown_token_is_never_proposed() -> None:
    """Where the draft's best is a token of its own, the next best takes its place."""
    text, free = prompt_of(1, 21), companion(7)
    place(free)
    hear(free, text, 0, 21)
    best = free.propose([0], [1])[0].token[0]
    to_target = np.arange(VOCAB)
    to_target[best] = -1
    drafter = companion(7, vocabulary=Vocabulary(to_target, np.arange(VOCAB), False))
    place(drafter)
    hear(drafter, text, 0, 21)
    draft = drafter.propose([0], [1])[0]
    assert draft.count == 1 and draft.token[0] != best


def test_sampled_guesses_follow_the_dice() -> None:
    """A draft model that is nearly the target: with the same dice it is right far more often than one that would sample by itself."""
    prompt = prompt_of(2, 30)
    drafted = accepted = 0
    for seed in range(6):
        params = params_for(prompt, seed=seed, sample=True, temperature=1.0, max_new_tokens=40)
        sequence = Sequence_(prompt, params)
        drafter = companion()
        for table in (drafter._model.table,):
            table += 0.02 * np.float32(1.0) * table.roll(1, 0)
        steps_of(drafter, sequence, 2)
        assert sequence.answer == alone(prompt, params).answer
        drafted, accepted = drafted + sequence.drafted, accepted + sequence.accepted
    assert accepted > 0.7 * drafted


def test_needs_are_declared() -> None:
    needs = companion(most=5).needs
    assert needs.dear and needs.lazy and needs.most == 5 and needs.work_bytes > 0
    assert dataclasses.replace(needs).pools[0].layers == 2 and PAGES > 0
