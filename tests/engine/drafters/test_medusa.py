"""Medusa against an implementation of its own in plain torch, in each public layout, and what it makes of the levels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.engine.drafters.draft import Commit, Draft, Terms
from forerun.engine.drafters.medusa import Medusa
from forerun.engine.drafters.medusa_shapes import SHAPES
from forerun.engine.drafters.registry import Setting
from forerun.engine.errors import StartError
from tests.engine.drafters.companions import host
from tests.engine.drafters.golden import HIDDEN, LENGTHS, ROW, differ, draw, logits_of, same, setting, tell, tokens_of, write
from tests.engine.test_identity import prompt_of
from tests.engine.tiny import VOCAB, Front, Sequence_, params_for, tiny_engine

HEADS = 3
LAYOUTS = {  # file, prefix, blocks, own output matrices
    "Medusa-1": ("medusa_lm_head.safetensors", "", 1, True),
    "Medusa-1, pickled": ("medusa_lm_head.pt", "", 1, True),
    "two blocks": ("medusa_lm_head.safetensors", "", 2, True),
    "Medusa-2": ("model.safetensors", "medusa_head.", 1, True),
    "TGI": ("medusa_lm_head.safetensors", "", 1, False),
}


def tensors_of(prefix: str, blocks: int, own: bool, heads: int = HEADS, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"{prefix}{i}.{j}.linear.weight"] = draw(100 * i + j, HIDDEN, HIDDEN, dtype=dtype)
            tensors[f"{prefix}{i}.{j}.linear.bias"] = draw(100 * i + j + 50, HIDDEN, scale=0.3, dtype=dtype)
        if own:
            tensors[f"{prefix}{i}.{blocks}.weight"] = draw(100 * i + 90, VOCAB, HIDDEN, dtype=dtype)
    return tensors


def write_heads(folder: Path, layout: str = "Medusa-1", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    file, prefix, blocks, own = LAYOUTS[layout]
    tensors = tensors_of(prefix, blocks, own, dtype=dtype)
    more = {"model.norm.weight": torch.ones(HIDDEN)} if prefix else {}
    write(folder, tensors | more, {"medusa_num_heads": 2, "medusa_num_layers": blocks, "base_model_name_or_path": "tiny"}, file)
    return tensors


def golden(tensors: dict[str, Tensor], features: Tensor, mutant: str = "") -> list[Tensor]:
    """Logits [V] of every head, written from the paper: residual blocks of SiLU on the newest row's final hidden state."""
    prefix = "medusa_head." if any(name.startswith("medusa") for name in tensors) else ""
    blocks = sum(name.startswith(f"{prefix}0.") and name.endswith("linear.weight") for name in tensors)
    found = []
    for head in range(HEADS):
        i = min(head + 1, HEADS - 1) if mutant == "heads" else head
        x = features[-2 if mutant == "position" else -1].float()
        for j in range(blocks - (mutant == "layers")):
            weight, bias = (tensors[f"{prefix}{i}.{j}.linear.{name}"].float() for name in ("weight", "bias"))
            inner = F.silu(weight @ x + bias)
            x = inner if mutant == "residual" else x + inner
        out = tensors.get(f"{prefix}{i}.{blocks}.weight")
        found.append((host().model.raw_head if out is None else out).float() @ x)  # type: ignore[attr-defined]
    return found


def pickled() -> Setting:
    around = setting()
    assert around.host is not None
    start = msgspec.structs.replace(around.host.start, allow_pickle=True)
    return dataclasses.replace(around, host=dataclasses.replace(around.host, start=start))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, length: int) -> None:
    tensors = write_heads(tmp_path, layout)
    drafter = Medusa.open(str(tmp_path), pickled())
    features = draw(7, length, HIDDEN, scale=1.0)
    tell(drafter, tokens_of(1, length + 1), features, chunks=(1, 16, 17, 600))
    draft, ours = logits_of(monkeypatch, drafter)
    same(ours, golden(tensors, features))
    assert draft.token[0] == int(ours[0].argmax())
    mutants = ["heads", "layers", "residual", *(["position"] if length > 1 else [])]
    assert all(differ(ours, golden(tensors, features, mutant)) for mutant in mutants)


def test_half_size_stays_half_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads in 16 bits are multiplied in bf16; ours are close to what their numbers say."""
    bytes_of = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        folder = tmp_path / str(dtype)
        tensors = write_heads(folder, dtype=dtype)
        drafter = Medusa.open(str(folder), setting())
        features = draw(7, 9, HIDDEN, scale=1.0)
        tell(drafter, tokens_of(1, 10), features)
        same(logits_of(monkeypatch, drafter)[1], golden(tensors, features), 0.05)
        bytes_of[dtype] = drafter.needs.weight_bytes
    assert bytes_of[torch.bfloat16] == bytes_of[torch.float16] < 0.6 * bytes_of[torch.float32]


def test_the_state_follows_what_became_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a verification: the state behind the last accepted guess, as its commit told it."""
    tensors = write_heads(tmp_path)
    drafter = Medusa.open(str(tmp_path), setting())
    tokens, features = tokens_of(1, 30), draw(7, 29, HIDDEN, scale=1.0)
    tell(drafter, tokens[:11], features[:10])
    for first, last in ((10, 11), (11, 15), (15, 29)):
        drafter.absorb(Commit([ROW], [first], [tokens[first:last]], [tokens[last]], [features[first:last]], [10]))
        same(logits_of(monkeypatch, drafter)[1], golden(tensors, features[:last]))


@pytest.mark.parametrize("shape", SHAPES)
def test_published_shapes_are_trees_of_63_nodes(shape: str) -> None:
    nodes = [tuple(node) for node in SHAPES[shape]]
    assert len(nodes) == len(set(nodes)) == 63
    assert all(node[:-1] in {(), *nodes[:i]} for i, node in enumerate(nodes)), "a parent comes before its child"
    assert all((*node[:-1], rank) in nodes[:i] for i, node in enumerate(nodes) for rank in range(node[-1])), "and better siblings do"


def test_a_published_shape_is_drafted_as_it_is(tmp_path: Path) -> None:
    write_heads(tmp_path)
    drafter = Medusa.open(f"{tmp_path},tree=mc_sim_7b_63", setting(0))
    assert drafter.needs.most == sum(len(node) <= HEADS for node in SHAPES["mc_sim_7b_63"])
    features = draw(7, 9, HIDDEN, scale=1.0)
    tell(drafter, tokens_of(1, 10), features)
    (draft,) = drafter.propose([ROW], [drafter.needs.most])
    ranked = [drafter.net.logits(features[-1:], head)[0].sort(descending=True).indices[:10].tolist() for head in range(HEADS)]
    expected = {tuple(ranked[depth][rank] for depth, rank in enumerate(node)) for node in SHAPES["mc_sim_7b_63"] if len(node) <= HEADS}
    assert {tuple(path) for path in draft.paths()} == expected
    (part,) = drafter.propose([ROW], [10])
    wanted = SHAPES["mc_sim_7b_63"][:10]
    assert {tuple(path) for path in part.paths()} == {tuple(ranked[d][r] for d, r in enumerate(node)) for node in wanted}


def test_a_chain_where_no_siblings_can_be_verified(tmp_path: Path) -> None:
    write_heads(tmp_path)
    for value, tree in ((str(tmp_path), False), (f"{tmp_path},tree=chain", True)):
        drafter = Medusa.open(value, setting(0, tree))
        assert drafter.needs.most == HEADS
        tell(drafter, tokens_of(1, 10), draw(7, 9, HIDDEN, scale=1.0))
        (draft,) = drafter.propose([ROW], [8])
        assert draft.parent == [-1, 0, 1]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda t: t.pop("1.1.weight"), "only some of its heads"),
        (lambda t: [t.pop(name) for name in list(t) if name.startswith("1.")], "none is number 1"),
        (lambda t: t.pop("0.0.linear.bias"), ""),
        (lambda t: t.update({"0.0.linear.weight": torch.ones(16, 16)}), "trained for this target"),
        (lambda t: t.update({f"{i}.1.weight": torch.ones(5, HIDDEN) for i in range(HEADS)}), "trained for this target"),
        (lambda t: t.update({"norm.weight": torch.ones(4)}), "norm.weight"),
        (lambda t: [t.pop(name) for name in list(t) if "linear" in name], "no Medusa heads"),
    ],
)
def test_other_heads_are_refused_with_the_cure(tmp_path: Path, spoil: Any, told: str) -> None:
    tensors = tensors_of("", 1, True)
    spoil(tensors)
    write(tmp_path, tensors, {}, "medusa_lm_head.safetensors")
    if not told:
        Medusa.open(str(tmp_path), setting())
        return
    with pytest.raises(StartError) as refused:
        Medusa.open(str(tmp_path), setting())
    assert told in refused.value.error + refused.value.cure and refused.value.cure


@pytest.mark.parametrize(
    ("value", "told"),
    [("{},tree=oak", "oak"), ("{},shape=best", "no option"), ("/nowhere/at/all", "nowhere")],
)
def test_a_value_that_makes_no_sense_is_refused(tmp_path: Path, value: str, told: str) -> None:
    write_heads(tmp_path)
    with pytest.raises(StartError) as refused:
        Medusa.open(value.format(tmp_path), setting())
    assert told in refused.value.error


def test_a_pickle_needs_trust(tmp_path: Path) -> None:
    write_heads(tmp_path, "Medusa-1, pickled")
    with pytest.raises(StartError, match="pickle"):
        Medusa.open(str(tmp_path), setting())


def test_a_row_inside_its_prompt_has_no_draft(tmp_path: Path) -> None:
    write_heads(tmp_path)
    drafter = Medusa.open(str(tmp_path), setting())
    drafter.absorb(Commit([ROW], [0], [[1, 2, 3]], [None], [draw(1, 3, HIDDEN)], [9]))
    assert [draft.count for draft in drafter.propose([ROW, 5], [8, 8])] == [0, 0]


def test_the_state_is_the_one_that_the_root_was_picked_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine itself: a head that adds nothing says again what the target said there, which is the root."""
    tensors = {"0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN), "0.0.linear.bias": torch.zeros(HIDDEN)}
    write(tmp_path, tensors, {}, "medusa_lm_head.safetensors")
    drafter = Medusa.open(f"{tmp_path},tree=chain", setting())
    said: list[tuple[int, int]] = []
    propose = drafter.propose

    def spy(rows: list[int], budget: list[int], terms: Terms) -> list[Draft]:
        drafts = propose(rows, budget, terms)
        said.extend((drafter._tips._tips[row].row.tokens[-1], draft.token[0]) for row, draft in zip(rows, drafts))
        return drafts

    monkeypatch.setattr(drafter, "propose", spy)
    front = Front(tiny_engine(drafter))
    for seed, length in ((1, 21), (2, 5)):
        front.admit(Sequence_(prompt_of(seed, length), params_for(prompt_of(seed, length))))
    front.run(guess=4)
    assert len(said) > 40 and all(root == guess for root, guess in said)
