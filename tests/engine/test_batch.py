"""The flat batch and the page table, against a builder of loops."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine import kv
from forerun.engine.batch import Batch, build, feed
from forerun.engine.drafters.draft import Draft
from forerun.engine.rows import Row, RowTable, Share
from forerun.messages import Admit, Feed, SamplingParams, StepPlan

PAGE = 4
CPU = torch.device("cpu")


@given(st.data())
def test_build(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    rows = RowTable(8, 64, 16, 100, PAGE)
    admits, feeds = [], []
    page = 0
    for number in data.draw(st.permutations(range(8)))[:count]:
        tokens = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=40))
        computed = data.draw(st.integers(0, (len(tokens) - 1) // PAGE)) * PAGE
        known = data.draw(st.integers(1, len(tokens) - computed))
        need = -(-(computed + known + 12) // PAGE)
        pages = list(range(page, page + need))[::-1]
        page += need
        params = SamplingParams(0, len(tokens), 30, prompt_logprobs=data.draw(st.booleans()))
        admits.append(Admit(number, tokens, computed, pages[:-1], params))
        feeds.append(Feed(number, known, 0, pages[-1:]))
    shares, errors, gone = rows.apply(StepPlan(1, admits, feeds))
    assert not errors and not gone and len(shares) == count
    for share in shares:
        if share.ends:
            n = data.draw(st.integers(0, 12))
            share.draft = Draft(list(range(n)), [data.draw(st.integers(-1, i - 1)) for i in range(n)], [1.0] * n, [False] * n)
    batch = build(shares, rows.table, CPU)
    check(batch, shares, {admit.row: admit.pages + feed.pages for admit, feed in zip(admits, feeds)})


def check(batch: object, shares: list[Share], pages: dict[int, list[int]]) -> None:
    flat: list[tuple[int, int, int, int]] = []
    logit_rows, starts = [], [0]
    for share in shares:
        row, draft = share.row, share.draft
        slot = lambda p, row=row: pages[row.number][p // PAGE] * PAGE + p % PAGE  # noqa: E731
        first = len(flat)
        end = row.computed + share.known
        flat += [(row.tokens[p], p, slot(p), -1) for p in range(row.computed, end)]
        nodes = len(flat)
        for i, (token, parent, depth) in enumerate(zip(draft.token, draft.parent, draft.depths())):
            flat.append((token, end - 1 + depth, slot(end + i), -1 if parent < 0 else nodes + parent))
        logit_rows += range(nodes - share.scored, nodes + draft.count)
        starts.append(len(flat))
        assert share.scored == (share.known if row.params.prompt_logprobs and row.computed + 1 < len(row.tokens) else int(share.ends))
        assert first == starts[-2]
    columns = [batch.tokens, batch.positions, batch.slots, batch.parents]  # type: ignore[attr-defined]
    assert list(zip(*(column.tolist() for column in columns))) == flat
    assert batch.starts.tolist() == starts  # type: ignore[attr-defined]
    assert batch.logit_rows.tolist() == logit_rows  # type: ignore[attr-defined]
    assert batch.known.tolist() == [s.known for s in shares]  # type: ignore[attr-defined]
    assert batch.context.tolist() == [s.row.computed for s in shares]  # type: ignore[attr-defined]
    for share, row in zip(shares, batch.pages.tolist()):  # type: ignore[attr-defined]
        used = -(-(share.row.computed + share.known) // PAGE)
        assert row[:used] == pages[share.row.number][:used]
    for field in ("tokens", "positions", "slots", "parents", "starts", "known", "context", "pages", "logit_rows"):
        tensor = getattr(batch, field)
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


@given(st.integers(0, 50), st.lists(st.integers(0, 30), unique=True, max_size=8))
def test_moves_put_a_path_in_order(first: int, path: list[int]) -> None:
    path = sorted(path)
    cells = {first + node: f"node {node}" for node in range(31)}
    moves = kv.Moves()
    moves.add(3, first, path)
    values = [cells[s] for s in moves.source]
    cells.update(zip(moves.target, values))
    assert [cells[first + depth] for depth in range(len(path))] == [f"node {node}" for node in path]
    assert all(s > t for s, t in zip(moves.source, moves.target))
    assert path != list(range(len(path))) or not moves.source
    assert moves.rows == [3] * len(moves.source)


def test_table() -> None:
    table = kv.Table(3, 20, PAGE)
    table.grant(1, [7, 3])
    table.grant(1, [9])
    assert table.reach(1) == 12 and table.reach(0) == 0
    assert table.slots(torch.tensor([1, 1, 1]).numpy(), torch.tensor([0, 5, 11]).numpy()).tolist() == [28, 13, 39]
    table.clear(1)
    assert table.reach(1) == 0


@given(st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.integers(0, 20), st.booleans()), min_size=1, max_size=5))
def test_known_tokens_alone(fed: list[tuple[list[int], int, bool]]) -> None:
    """What a draft model is fed is what a step of the same rows without guesses would be."""
    rows = RowTable(8, 64, 16, 100, PAGE)
    shares: list[Share] = []
    for number, (tokens, context, ends) in enumerate(fed):
        rows.table.grant(number, range(8 * number, 8 * number + 8))
        row = Row.open(number, SamplingParams(0, 1, 99), [0] * context + tokens + [0] * (not ends), context)
        shares.append(Share(row, len(tokens), 0, Draft.none(), []))
    expected = build(shares, rows.table, CPU)
    tokens, context, ends = zip(*fed)
    found = feed(range(len(fed)), context, tokens, ends, rows.table, CPU)
    for field in dataclasses.fields(Batch):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name)), field.name
