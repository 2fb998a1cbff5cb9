"""DFlash and DSpark against plain torch, in each public layout: across chunks, pages and windows, and with every mistake found out."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.engine.drafters import dflash_net
from forerun.engine.drafters.dflash import Blocks, Dflash
from forerun.engine.drafters.dflash_net import Spot, standing
from forerun.engine.drafters.draft import FREE, Commit, Draft, Terms
from forerun.engine.drafters.imitation import Imitation
from forerun.engine.drafters.lattice import BINS, Lattice, Levels
from forerun.engine.drafters.registry import Setting
from forerun.engine.errors import StartError
from forerun.engine.kv import Table
from forerun.engine.rows import Row
from forerun.messages import SamplingParams
from tests.engine.drafters.blocks import LAYOUTS, LONGEST, REDUCED, WINDOW, golden, long_setting, tensors_of, write_block
from tests.engine.drafters.companions import host
from tests.engine.drafters.golden import HIDDEN, LENGTHS, ROW, attached, differ, draw, logits_of, same, tell, tokens_of, write
from tests.engine.test_identity import prompt_of
from tests.engine.tiny import VOCAB, Front, Sequence_, params_for, tiny_engine

MUTANTS = ("tap order", "context norm", "seeded early", "context position", "block keys", "causal", "last norm")


def ours(monkeypatch: pytest.MonkeyPatch, drafter: Blocks, layout: str, row: int = ROW) -> tuple[list[Tensor], list[int]]:
    """(logits of every place, what was chosen at each)."""
    _, levels = logits_of(monkeypatch, drafter, 16, row)
    ids = torch.arange(REDUCED) * 2 if LAYOUTS[layout].reduced else None
    chosen = [int(level.argmax()) for level in levels]
    return levels, chosen if ids is None else [int(ids[token]) for token in chosen]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, length: int) -> None:
    own = LAYOUTS[layout]
    tensors = write_block(tmp_path, own)
    drafter = Dflash.open(str(tmp_path), long_setting())
    assert drafter.needs.layers == own.taps and drafter.plan.anchor == own.anchor and drafter.plan.size == own.size
    attached(drafter, LONGEST)
    tokens, features = tokens_of(1, length + 1), draw(7, length, 2 * HIDDEN, scale=1.0)
    tell(drafter, tokens, features, chunks=(1, 16, 17, 600))
    for _ in range(4):  # a long prompt is caught up with in parts
        levels, chosen = ours(monkeypatch, drafter, layout)
        if levels:
            break
    expected, _ = golden(own, tensors, features, tokens[-1], chosen)
    same(levels, expected)
    with monkeypatch.context() as patch:  # and where the row's pages end with its tokens
        patch.setattr(drafter, "_reaches", lambda traced: False)
        same(ours(monkeypatch, drafter, layout)[0], expected)
    mutants = [*MUTANTS, *(["key norm"] if own.norms else [])]
    mutants += ["anchor"] if not own.anchor else []
    if length >= WINDOW and any(window for window, _, _ in own.sights):
        mutants += ["wider window", "narrower window"]
    mutants += ["shifted"] if own.markov else []
    mutants += ["stateless"] if own.markov == "rnn" else []
    found = {mutant: differ(levels, golden(own, tensors, features, tokens[-1], chosen, mutant)[0]) for mutant in mutants}
    assert all(found.values()), found


def opened(folder: Path, layout: str = "z-lab, windows", **more: object) -> tuple[Blocks, dict[str, Tensor]]:
    tensors = write_block(folder, LAYOUTS[layout])
    drafter = Dflash.open(str(folder), long_setting(**more))  # type: ignore[arg-type]
    attached(drafter, LONGEST)
    return drafter, tensors


@pytest.mark.parametrize("layout", ["z-lab, windows", "DSpark, recurrent"])
def test_entries_follow_what_became_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Drafts in between leave nothing: after each verification the next block is as if all had been known at once."""
    drafter, tensors = opened(tmp_path, layout)
    tokens, features = tokens_of(1, 90), draw(7, 89, 2 * HIDDEN, scale=1.0)
    tell(drafter, tokens[:12], features[:11])
    for first, last in ((11, 11), (11, 12), (12, 19), (19, 20), (20, 35), (35, 64), (64, 89)):
        if last > first:
            drafter.absorb(Commit([ROW], [first], [tokens[first:last]], [tokens[last]], [features[first:last]], [11]))
        levels, chosen = ours(monkeypatch, drafter, layout)
        same(levels, golden(LAYOUTS[layout], tensors, features[:last], tokens[last], chosen)[0])


def test_entries_are_made_when_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without guesses leave no hole."""
    drafter, tensors = opened(tmp_path)
    tokens, features = tokens_of(1, 41), draw(7, 40, 2 * HIDDEN, scale=1.0)
    tell(drafter, tokens, features, chunks=range(1, 40))
    levels, chosen = ours(monkeypatch, drafter, "z-lab, windows")
    same(levels, golden(LAYOUTS["z-lab, windows"], tensors, features, tokens[-1], chosen)[0])


@pytest.mark.parametrize("layout", ["z-lab", "z-lab, windows", "speculators"])
def test_a_context_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Attention over a page or three at a time is attention."""
    drafter, tensors = opened(tmp_path, layout)
    tokens, features = tokens_of(1, 200), draw(7, 199, 2 * HIDDEN, scale=1.0)
    tell(drafter, tokens, features)
    for gather in (1, 48):
        monkeypatch.setattr(dflash_net, "GATHER", gather)
        levels, chosen = ours(monkeypatch, drafter, layout)
        same(levels, golden(LAYOUTS[layout], tensors, features, tokens[-1], chosen)[0])


@pytest.mark.parametrize("layout", ["z-lab, windows", "DSpark, recurrent"])
def test_several_rows_at_once_are_drafted_as_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """And their entries are made in one forward."""
    write_block(tmp_path, LAYOUTS[layout])
    lengths = {0: 3, 1: 40, 2: 17, 5: 90}

    def fresh() -> tuple[Blocks, Table]:
        drafter = Dflash.open(str(tmp_path), long_setting())
        _, table = attached(drafter, 160)
        for i, row in enumerate(lengths):
            table.clear(row)
            table.grant(row, range(3 * i, 3 * i + (3 if row != 5 else 10)))
        return drafter, table

    def commit(row: int) -> Commit:
        n = lengths[row]
        return Commit([row], [0], [tokens_of(row, n)], [row], [draw(row, n, 2 * HIDDEN, scale=1.0)], [n])

    together, alone = fresh()[0], []
    for row in lengths:
        single = fresh()[0]
        single.absorb(commit(row))
        alone += single.propose([row], [9])
        together.absorb(commit(row))
    entered: list[int] = []
    enter = together._entered
    monkeypatch.setattr(together, "_entered", lambda batch: entered.append(batch.rows) or enter(batch))
    drafts = together.propose(list(lengths), [9] * 4)
    assert entered == [sum(lengths.values())]
    for ours_, theirs in zip(drafts, alone, strict=True):
        assert (ours_.token, ours_.parent) == (theirs.token, theirs.parent)
        assert ours_.confidence == pytest.approx(theirs.confidence)


@pytest.mark.parametrize("layout", ["z-lab", "z-lab, windows both ways", "speculators", "DSpark, gated"])
def test_a_block_is_a_recorded_forward(tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: str) -> None:
    """Recorded once, it is replayed for any number of rows: bit for bit what its ops are one by one, in the pool too."""
    write_block(tmp_path, LAYOUTS[layout])
    around = long_setting()
    with caplog.at_level(logging.INFO):
        drafter = Dflash.open(str(tmp_path), around)
        _, table = attached(drafter, 160)
    assert "not recorded" not in caplog.text
    ops, net, pool, plan = around.worker.backend.ops, drafter.net, drafter._pool, drafter.plan
    for row in range(4):
        table.clear(row)
        table.grant(row, range(4 * row, 4 * row + 4))
    for roots in ([33], [3, 40, 17, 0], [12, 5], [46]):
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        spots = [Spot(row, 0, root) for row, root in enumerate(roots)]
        tokens = [token for root in roots for token in (root, *[plan.mask] * (plan.size - 1))]
        batch = standing(spots, tokens, table, torch.device("cpu"))
        assert batch.sight.tolist() == [root + plan.size - 1 for root in roots for _ in range(plan.size)]
        for forward in (drafter._stand, lambda each: net.stand(ops, drafter._embedded(each.tokens), plan.size, each, pool)):
            for entries in (pool.keys, pool.values):
                entries.copy_(draw(3, *entries.shape))
            found.append((forward(batch), pool.keys.clone(), pool.values.clone()))
        assert all(torch.equal(one, other) for one, other in zip(*found))
        assert not found[0][1].equal(draw(3, *pool.keys.shape).to(pool.keys.dtype)), "it writes"


def test_a_prefix_that_another_row_left_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target found 32 tokens computed; the drafter's pool has their entries, because the first row drafted there."""
    drafter, tensors = opened(tmp_path)
    table = drafter._table
    size = table.page_tokens
    tokens, features = tokens_of(1, 41), draw(7, 40, 2 * HIDDEN, scale=1.0)
    tell(drafter, tokens, features)
    ours(monkeypatch, drafter, "z-lab, windows")
    drafter.forget([ROW])
    other = tokens[: 2 * size] + tokens_of(2, 9)
    table.grant(1, [*table.pages[ROW, :2], *range(100, 103)])
    more = torch.cat([features[: 2 * size], draw(8, 8, 2 * HIDDEN, scale=1.0)])
    drafter.absorb(Commit([1], [0], [other[:-1]], [other[-1]], [more[2 * size :]], [40]))
    assert drafter.listener.late == 0
    levels, chosen = ours(monkeypatch, drafter, "z-lab, windows", 1)
    same(levels, golden(LAYOUTS["z-lab, windows"], tensors, more, other[-1], chosen)[0])


def test_a_prefix_that_nobody_left_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row begins behind the hole, and drafts as if the text began there."""
    drafter, tensors = opened(tmp_path)
    size = drafter._table.page_tokens
    tokens, features = tokens_of(1, 61), draw(7, 60, 2 * HIDDEN, scale=1.0)
    hole = size + 3
    drafter.absorb(Commit([ROW], [0], [tokens[:-1]], [tokens[-1]], [features[hole:]], [60]))
    levels, chosen = ours(monkeypatch, drafter, "z-lab, windows")
    same(levels, golden(LAYOUTS["z-lab, windows"], tensors, features[2 * size :], tokens[-1], chosen)[0])
    assert drafter.listener.late == 2 * size


def test_confidences_are_the_heads_own_until_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["DSpark, gated"]
    drafter, tensors = opened(tmp_path, "DSpark, gated")
    tokens, features = tokens_of(1, 31), draw(7, 30, 2 * HIDDEN, scale=1.0)
    tell(drafter, tokens, features)
    said: list[float] = []
    add = drafter.levels.add

    def spy(growing: Sequence[Lattice], logits: Tensor, terms: Terms, trust: list[float] | None) -> None:
        assert trust is not None
        said.append(trust[0])
        add(growing, logits, terms, trust)

    monkeypatch.setattr(drafter.levels, "add", spy)
    draft, levels = logits_of(monkeypatch, drafter, 7)
    _, sure = golden(layout, tensors, features, tokens[-1], [int(level.argmax()) for level in levels])
    assert said == pytest.approx(sure, abs=1e-5)
    assert draft.confidence[draft.token.index(int(levels[0].argmax()))] == pytest.approx(sure[0], abs=0.5 / BINS + 1e-6)


def test_a_boastful_confidence_head_is_calibrated() -> None:
    """The head says c where c² holds: expected calibration error of what leaves the drafter, after it has seen enough."""
    levels = Levels(Imitation(host().backend.ops, VOCAB, 0.5, 2.0), host().backend.ops, VOCAB, False)
    row = Row.open(0, SamplingParams(seed=1, prompt_tokens=1, max_new_tokens=9), [1])
    dice = random.Random(5)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 9.0
    outcomes: list[tuple[float, bool]] = []
    for turn in range(6000):
        claim = dice.random()
        one = Lattice(row, 1, 1)
        levels.add([one], logits, FREE, [claim])
        draft = levels.finish(one)
        holds = dice.random() < claim * claim
        levels.calibration.settle(0, [7 if holds else 8])
        if turn >= 2000:
            outcomes.append((draft.confidence[0], holds))
    outcomes.sort()
    parts = [outcomes[i : i + 400] for i in range(0, len(outcomes), 400)]
    error = sum(abs(sum(c for c, _ in part) - sum(h for _, h in part)) for part in parts) / len(outcomes)
    assert error <= 0.03


def test_a_tree_of_places_or_a_chain(tmp_path: Path) -> None:
    write_block(tmp_path, LAYOUTS["z-lab"])
    for value, most, tree in ((str(tmp_path), 16, True), (f"{tmp_path},tree=chain", 15, False)):
        drafter = Dflash.open(value, long_setting())
        attached(drafter)
        assert drafter.needs.most == most
        tell(drafter, tokens_of(1, 10), draw(7, 9, 2 * HIDDEN, scale=1.0))
        (draft,) = drafter.propose([ROW], [most])
        assert (draft.parent != list(range(-1, draft.count - 1))) == tree


def test_waiting_features_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than what may wait: late while nobody asks, and still a draft."""
    drafter, _ = opened(tmp_path)
    drafter.listener.trail._stored = 100
    drafter.listener._quiet = 1000
    tokens, features = tokens_of(1, 401), draw(7, 400, 2 * HIDDEN, scale=1.0)
    tell(drafter, tokens, features, chunks=range(50, 400, 50))
    assert drafter.listener.trail.waiting <= 100 and drafter.listener.late > 0
    assert drafter.propose([ROW], [8])[0].count > 0


def test_half_size_stays_half_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_of = {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        tensors = write_block(folder, LAYOUTS["z-lab"], dtype)
        drafter = Dflash.open(str(folder), long_setting())
        attached(drafter)
        tokens, features = tokens_of(1, 31), draw(7, 30, 2 * HIDDEN, scale=1.0)
        tell(drafter, tokens, features)
        levels, chosen = ours(monkeypatch, drafter, "z-lab")
        same(levels, golden(LAYOUTS["z-lab"], tensors, features, tokens[-1], chosen)[0], 1e-4 if dtype == torch.float32 else 0.1)
        bytes_of[dtype] = drafter.needs.weight_bytes
    assert bytes_of[torch.bfloat16] < 0.75 * bytes_of[torch.float32], "the tables of rotations are float32"


def test_copies_of_the_targets_ends_are_not_kept(tmp_path: Path) -> None:
    layout = LAYOUTS["DeepSpec's DFlash"]
    sizes = []
    for name, change in (("copies", {}), ("own head", {"lm_head.weight": draw(1, VOCAB, HIDDEN)})):
        write(tmp_path / name, tensors_of(layout) | change, layout.config)
        sizes.append(Dflash.open(str(tmp_path / name), long_setting()).needs.weight_bytes)
    assert sizes[1] - sizes[0] >= VOCAB * HIDDEN * 4


REFUSED: list[tuple[str, dict[str, object], dict[str, Tensor | None], str]] = [
    ("z-lab", {"num_target_layers": 36}, {}, "36 layers"),
    ("z-lab", {"hidden_size": 64}, {}, "64 wide"),
    ("z-lab", {"dflash_config": {"target_layer_ids": [0, 7], "mask_token_id": 90}}, {}, "layers [0, 7]"),
    ("z-lab", {"dflash_config": {"target_layer_ids": [0], "mask_token_id": 90}}, {}, "fc reads 2"),
    ("z-lab", {"dflash_config": {"target_layer_ids": [0, 1]}}, {}, "mask_token_id"),
    ("z-lab", {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": VOCAB}}, {}, "mask token 97"),
    ("z-lab", {"block_size": 1}, {}, "block has 1 rows"),
    ("z-lab", {"block_size": 4096}, {}, "4096 rows"),
    ("z-lab", {"num_hidden_layers": None, "intermediate_size": None}, {}, "num_hidden_layers, intermediate_size"),
    ("DSpark, vanilla", {}, {"layers.0.pre_feedforward_layernorm.weight": torch.ones(HIDDEN)}, "Gemma's"),
    ("z-lab", {}, {"layers.1.self_attn.g_proj.weight": torch.zeros(4, 4)}, "g_proj"),
    ("z-lab", {}, {"candidate_selector.hidden_projection.weight": torch.zeros(4, 4)}, "DFlash2"),
    ("z-lab", {}, {"layers.2.mlp.up_proj.weight": None}, "lacks the tensor"),
    ("DeepSpec's DFlash", {}, {"embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}, "embedding is not the target's"),
    ("DeepSpec's DFlash", {}, {"lm_head.weight": torch.ones(5, HIDDEN)}, "5 tokens"),
    ("speculators", {}, {"d2t": torch.full((REDUCED,), VOCAB)}, "d2t"),
    ("DSpark, vanilla", {"markov_rank": 99}, {}, "markov_rank"),
    ("DSpark, vanilla", {"markov_head_type": "fir"}, {}, "fir"),
    ("DSpark, vanilla", {"confidence_head_with_markov": False}, {}, "trained for this target"),
]


@pytest.mark.parametrize(("layout", "config", "tensors", "told"), REFUSED)
def test_other_checkpoints_are_refused_with_the_cure(
    tmp_path: Path, layout: str, config: dict[str, object], tensors: dict[str, Tensor | None], told: str
) -> None:
    all_ = tensors_of(LAYOUTS[layout]) | tensors
    write(tmp_path, {name: value for name, value in all_.items() if value is not None}, LAYOUTS[layout].config | config)
    with pytest.raises(StartError) as refused:
        Dflash.open(str(tmp_path), long_setting())
    assert told in refused.value.error + refused.value.cure and refused.value.cure


@pytest.mark.parametrize("layout", ["z-lab, windows", "DSpark, gated"])
def test_in_the_engine_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """A prompt in chunks, then steps with guesses: what each draft is chosen from is what plain torch makes of the features so far."""
    tensors = write_block(tmp_path, LAYOUTS[layout])
    drafter = Dflash.open(str(tmp_path), Setting(8, True, host()))
    tokens: list[int] = []
    features: list[Tensor] = []
    drafts: list[list[Tensor]] = []
    absorb, propose, add = drafter.absorb, drafter.propose, drafter.levels.add

    def hear(commit: Commit) -> None:
        assert commit.features is not None
        tokens.extend(commit.tokens[0])
        tokens[len(tokens) :] = [] if commit.next[0] is None else [commit.next[0]]
        features.append(commit.features[0].clone())
        absorb(commit)

    def asked(rows: list[int], budget: list[int], terms: Terms) -> list[Draft]:
        drafts.append([])
        found = propose(rows, budget, terms)
        chosen = [int(level.argmax()) for level in drafts[-1]]
        same(drafts[-1], golden(LAYOUTS[layout], tensors, torch.cat(features), tokens[-1], chosen)[0][: len(chosen)])
        tokens.pop()  # the root is told again with what follows it
        return found

    def chosen_from(growing: Sequence[Lattice], logits: Tensor, *rest: object) -> None:
        drafts[-1].append(logits[0].clone())
        add(growing, logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter, "absorb", hear)
    monkeypatch.setattr(drafter, "propose", asked)
    monkeypatch.setattr(drafter.levels, "add", chosen_from)
    front = Front(tiny_engine(drafter))
    front.admit(Sequence_(prompt_of(1, 40), params_for(prompt_of(1, 40))))
    for chunk in (17, 5, 18):
        front.step({0: chunk})
    front.run(guess=8)
    assert len(drafts) > 10 and len(drafts[0]) == min(8, drafter.plan.places) and front.engine._speculator.failures.count == 0
