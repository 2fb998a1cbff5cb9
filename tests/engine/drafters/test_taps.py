"""What a drafter that reads features keeps of every row: no pair is wrong, nothing grows without bound, what is missing is counted."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch

from forerun.engine.drafters.draft import Commit
from forerun.engine.drafters.taps import LOOSE, Trail
from forerun.engine.kv import Table
from tests.engine.drafters.nets import Told, told, write_eagle3
from tests.engine.drafters.plain_eagle import Golden
from tests.engine.drafters.test_eagle import Heard

SIZE = 16


def trail(successor: bool = True, stored: int = 64) -> Trail:
    table = Table(4, 400, SIZE)
    for row in range(4):
        table.grant(row, range(row * 25, row * 25 + 25))
    return Trail(table, 100, successor, stored)


def commit(row: int, start: int, tokens: list[int], newest: int | None, features: int | None = None) -> Commit:
    """Features are their own positions."""
    count = len(tokens) if features is None else features
    at = torch.arange(start + len(tokens) - count, start + len(tokens)).float()[:, None]
    return Commit([row], [start], [tokens], [newest], [at])


def test_the_last_features_of_a_chunk_wait_for_the_next_token() -> None:
    pairs, alone = trail(), trail(successor=False)
    for each, due in ((pairs, 4), (alone, 5)):
        each.absorb(commit(1, 0, [10, 11, 12, 13, 14], None))
        traced = each.get(1)
        assert traced is not None and each.due(traced) == due and not traced.ready
        each.absorb(commit(1, 5, [15], 16))
        assert each.due(traced) == 6
        tokens, features = each.take(traced, 6)
        assert tokens == ([11, 12, 13, 14, 15, 16] if each is pairs else [10, 11, 12, 13, 14, 15])
        assert features[:, 0].tolist() == [0, 1, 2, 3, 4, 5] and traced.ready and not each.waiting


def test_features_are_not_kept_alive_by_the_step_they_came_from() -> None:
    kept = trail()
    step = torch.zeros(1000, 1)
    kept.absorb(Commit([1], [0], [[7]], [8], [step[500:501]]))
    traced = kept.get(1)
    assert traced is not None
    assert traced.parts[0].untyped_storage().nbytes() == 4


@pytest.mark.parametrize("beside", [1, 3, 7])
def test_features_that_wait_take_little_more_than_their_size(beside: int) -> None:
    """A row that nobody asks about waits beside others whose features were taken: each step's tensor would stay whole for its sake."""
    kept = trail(stored=1000)
    kept.absorb(Commit([1], [0], [[*range(100)]], [100], [torch.zeros(100, 1)]))
    traced = kept.get(1)
    assert traced is not None
    kept.take(traced, 95)
    for at in range(100, 130):
        step = torch.zeros(1 + beside, 1)
        kept.absorb(Commit([1], [at], [[at]], [at + 1], [step[:1]]))
    *waiting, _newest = traced.parts
    assert all(part.untyped_storage().nbytes() <= LOOSE * part.nbytes for part in waiting)
    assert kept.waiting == sum(len(part) for part in traced.parts) == 35


@pytest.mark.parametrize("found", [16, 32, 48])
def test_what_a_prefix_hit_brings_along_is_late(found: int) -> None:
    """Nobody drafted over these pages: the row begins behind them."""
    kept = trail()
    kept.absorb(commit(1, 0, list(range(found + 5)), 90, features=5))
    traced = kept.get(1)
    assert traced is not None and traced.base == traced.row.computed == found and kept.late == found and kept.due(traced) == 5


def test_pages_that_somebody_filled_are_found() -> None:
    kept = trail()
    text = list(range(50))
    kept.absorb(commit(0, 0, text, 50))
    first = kept.get(0)
    assert first is not None
    kept.take(first, 50)
    kept._table.clear(1)
    kept._table.grant(1, [*range(3), *range(60, 70)])
    kept.absorb(commit(1, 0, [*text[:48], 80, 81], 82, features=2))
    second = kept.get(1)
    assert second is not None and second.base == 48, "they were about to be made, and that failed"
    kept.late = 0
    kept.entered(first, 50)
    kept.absorb(commit(1, 0, [*text[:48], 80, 81], 82, features=2))
    second = kept.get(1)
    assert second is not None and second.base == 0 and second.row.computed == 48 and kept.due(second) == 2 and not kept.late
    kept.scribbles(first, 20, 21)
    kept.absorb(commit(1, 0, [*text[:48], 80, 81], 82, features=2))
    second = kept.get(1)
    assert second is not None and second.base == 48, "a page that is written to is not there any more"


def test_too_much_is_given_up_by_whoever_has_most() -> None:
    kept = trail(stored=64)
    kept.absorb(commit(0, 0, list(range(30)), 50))
    kept.absorb(commit(1, 0, list(range(100)), 50))
    assert kept.excess == 66
    kept.shed()
    small, large = kept.get(0), kept.get(1)
    assert small is not None and large is not None and kept.waiting <= 64
    assert small.waiting == 30 and large.base % SIZE == 0 and large.end == 100 and kept.late == large.base > 0
    tokens, features = kept.take(large, kept.due(large))
    assert features[0, 0] == large.base and tokens[0] == large.base + 1


@pytest.mark.parametrize("seed", range(20))
def test_any_life(seed: int) -> None:
    """Rows come, are told in any parts with any hits, are entered and given up: an entry is always of the right token and features."""
    dice = random.Random(seed)
    successor = dice.random() < 0.5
    kept = trail(successor, stored=dice.choice([8, 64, 1000]))
    known: dict[int, int] = {}
    for _ in range(200):
        row = dice.randrange(3)
        start = known.get(row, 0)
        if start > 300 or dice.random() < 0.05:
            kept.forget([row])
            known.pop(row, None)
            continue
        count = dice.choice([1, 1, 2, 5, 17, 40])
        lacking = SIZE * dice.randrange(3) if not start else 0
        last = start + count + lacking
        newest = last if dice.random() < 0.7 else None
        kept.absorb(commit(row, start, list(range(start, last)), newest, count))
        known[row] = last
        kept.shed()
        assert not kept.excess
        traced = kept.get(dice.choice(list(known)))
        assert traced is not None
        assert traced.end == known[traced.row.number] or traced.base > known[traced.row.number]
        if kept.due(traced) > 0:
            first = traced.row.computed
            tokens, features = kept.take(traced, dice.randint(1, kept.due(traced)))
            assert features[:, 0].tolist() == list(range(first, traced.row.computed)) and first >= traced.base
            assert tokens == [position + successor for position in range(first, traced.row.computed)]
    kept.forget(list(known))
    assert not kept.waiting and not kept._rows and not kept._held._rows


def beside(row: Told, number: int, shared: int) -> Told:
    """Another row of the same drafter, whose first `shared` pages are this row's."""
    other = copy.copy(row)
    other.row, other.known = number, 0
    pages = row.table.pages[row.row, :shared].tolist() + row.table.pages[number, shared:].tolist()
    row.table.clear(number)
    row.table.grant(number, pages[:70])
    return other


def test_a_row_behind_a_prefix_hit_drafts_as_if_it_had_come_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another row entered the prefix: the very same logits. Where nobody did: those of a text that begins behind it."""
    heard = Heard(monkeypatch)
    row = told(f"eagle={write_eagle3(tmp_path)}", 70, nodes=3, tree=False)
    row.tell(70)
    row.draft(3)
    whole = [logits for _, logits in heard.said]
    hit = beside(row, 1, 3)
    heard.said.clear()
    hit.tell(70, lacking=48)
    hit.draft(3)
    assert all(torch.equal(one, other) for one, (_, other) in zip(whole, heard.said, strict=True)) and not row.drafter.listener.late
    stranger = told(f"eagle={tmp_path}", 70, nodes=3, tree=False)
    heard.said.clear()
    stranger.tell(70, lacking=48)
    stranger.draft(3)
    assert stranger.drafter.listener.late == 48
    stranger.tokens, stranger.features, stranger.known = stranger.tokens[48:], stranger.features[48:], 22
    assert heard.off(Golden(tmp_path, "plain"), stranger) < 1e-4


def test_a_silent_time_costs_context_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks for long: what waits is bounded. Then somebody does: guesses begin from what is left, and fit the network again."""
    monkeypatch.setattr("forerun.engine.drafters.taps.STORED", 40)
    heard = Heard(monkeypatch)
    row = told(f"eagle={write_eagle3(tmp_path)}", 400, nodes=3, tree=False)
    monkeypatch.setattr(row.drafter.listener.trail, "_stored", 40)
    row.drafter.listener._quiet = 1000
    for _ in range(300):
        row.tell(1, ends=True)
        assert row.drafter.listener.trail.waiting <= 40
    assert row.drafter.listener.late >= 250
    row.draft(3)
    base = row.drafter.listener.trail.get(row.row).base
    rest = copy.copy(row)
    rest.tokens, rest.features, rest.known = row.tokens[base:301], row.features[base:], row.known - base
    assert heard.said and heard.off(Golden(tmp_path, "plain"), rest) < 1e-4
    late = row.drafter.listener.late
    row.tell(100, ends=True)
    assert row.drafter.listener.late == late, "while somebody drafts, what is too much is entered instead"
    heard.said.clear()
    row.draft(3)
    rest.tokens, rest.known = row.tokens[base:], row.known - base
    assert heard.said and heard.off(Golden(tmp_path, "plain"), rest) < 1e-4
