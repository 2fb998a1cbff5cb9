"""EAGLE against an independent implementation: plain torch over whole sequences, from the papers' and the repositories' description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.engine.drafters.branches import Branches
from forerun.engine.drafters.draft import Draft
from forerun.engine.drafters.eagle import Eagle
from forerun.engine.drafters.lattice import Levels
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.errors import StartError
from tests.engine.drafters.nets import Told, around, told, write, write_eagle1, write_eagle3
from tests.engine.drafters.plain_eagle import Golden

SHAPES = ((1, 1), (7, 3), (64, 1), (64, 16), (1000, 300))
"""tokens with features, and the most that are told at once"""
VARIANTS = ("plain", "speculators", "deepspec", "biased", "first", "first without bias")


def write_variant(folder: Path, variant: str) -> str:
    if variant.startswith("first"):
        return f"eagle={write_eagle1(folder, variant == 'first')}"
    return f"eagle={write_eagle3(folder, variant)}"


class Heard:
    """What the net said behind each node, by the path to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[tuple[list[int], Tensor]] = []
        add = Branches.add

        def listen(this: Any, trees: Any, nodes: Any, logits: Tensor, terms: Any) -> None:
            self.said += [([level[0][0] for level in tree.path(node).levels], row.clone()) for tree, node, row in zip(trees, nodes, logits)]
            add(this, trees, nodes, logits, terms)

        monkeypatch.setattr(Branches, "add", listen)

    def off(self, golden: Golden, row: Told) -> float:
        """The largest difference to the golden network, relative to its logits."""
        worst = 0.0
        for path, logits in self.said:
            want = golden.logits(row.tokens[: row.known + 1], row.features[: row.known], path)
            worst = max(worst, float((logits.double() - want).abs().max() / want.abs().max()))
        return worst


def in_parts(row: Told, most: int) -> None:
    while row.known < len(row.tokens) - 1:
        row.tell(min(most, len(row.tokens) - 1 - row.known))


@pytest.mark.parametrize("length, chunk", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_network(variant: str, length: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_variant(tmp_path, variant)
    heard = Heard(monkeypatch)
    row = told(spec, length, nodes=4, tree=False)
    in_parts(row, chunk)
    draft = row.draft(4)
    for _ in range(4):
        draft = draft if draft.count else row.draft(4)  # a long prompt is entered in parts
    assert draft.count and len(heard.said) == draft.count
    assert heard.off(Golden(tmp_path, variant), row) < 1e-4


@pytest.mark.parametrize("variant", ["plain", "speculators", "first"])
def test_trees_are_what_the_network_says_of_their_paths(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_variant(tmp_path, variant)
    heard = Heard(monkeypatch)
    row = told(f"{spec},beams=3", 21, nodes=24)
    in_parts(row, 21)
    draft = row.draft(24)
    assert max(draft.depths()) > 2 and len({len(path) for path, _ in heard.said}) > 2
    opened = [len(path) for path, _ in heard.said]
    assert opened[:2] == [0, 1] and max(opened.count(depth) for depth in opened) > 1, "more than a chain is gone on from"
    assert heard.off(Golden(tmp_path, variant), row) < 1e-4
    assert all(0 < sure < 1 for sure in draft.confidence)


@pytest.mark.parametrize("beams", [2, 5, 30])
def test_a_tree_opens_no_more_nodes_than_have_slots(beams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the likeliest nodes change on the way; and what it drafts is still what the network says."""
    heard = Heard(monkeypatch)
    row = told(f"{write_variant(tmp_path, 'plain')},beams={beams}", 30, nodes=12)
    row.tell(20, ends=True)
    for step in (1, 3, 2):
        heard.said.clear()
        assert row.draft(12).count == 12 and len(heard.said) <= 13
        assert heard.off(Golden(tmp_path, "plain"), row) < 1e-4
        row.tell(step, ends=True)


def test_a_drafts_scratch_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds with guesses, of which some held: what is entered afterwards are the target's features, in the place of the guesses."""
    spec = write_variant(tmp_path, "plain")
    heard = Heard(monkeypatch)
    row = told(spec, 90, nodes=5, tree=False)
    row.tell(30, ends=True)
    for step in (1, 4, 2, 6, 1, 3, 5):
        heard.said.clear()
        row.draft(5)
        assert heard.off(Golden(tmp_path, "plain"), row) < 1e-4
        row.tell(step, ends=True)


MUTANTS = {
    "plain": ["position", "layers", "feature", "token", "no hidden_norm", "no input_layernorm", "no norm"],
    "speculators": ["position", "layers", "feature", "token", "no input_norm", "no norm"],
    "deepspec": ["position", "no q_norm", "no k_norm"],
    "biased": ["no 0", "no 1", "no 2"],
    "first": ["position", "feature", "token", "no post_attention_layernorm"],
}


@pytest.mark.parametrize("variant, mutant", [(variant, mutant) for variant, mutants in MUTANTS.items() for mutant in mutants])
def test_a_mutant_is_found(variant: str, mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees positions, layers and norms that are off by one."""
    spec = write_variant(tmp_path, variant)
    heard = Heard(monkeypatch)
    row = told(spec, 40, nodes=3, tree=False)
    in_parts(row, 17)
    row.draft(3)
    assert heard.off(Golden(tmp_path, variant, mutant), row) > 1e-2


def test_a_draft_of_few_positions_looks_back_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_variant(tmp_path, "plain")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    heard = Heard(monkeypatch)
    row = told(spec, 77, nodes=3, tree=False)
    in_parts(row, 10)
    row.draft(3)
    assert heard.off(Golden(tmp_path, "plain", window=24), row) < 1e-4 < heard.off(Golden(tmp_path, "plain", window=25), row)


def spoil(folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None) -> None:
    there = load_file(folder / "model.safetensors") | (tensors or {})
    read = json.loads((folder / "config.json").read_text()) | (config or {})
    write(folder, read, {name: tensor for name, tensor in there.items() if tensor is not None})


@pytest.mark.parametrize(
    "config, tensors, said",
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, {}, "another target"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, {}, "another target"),
        ({"target_hidden_size": 64}, {}, "another target"),
        ({}, {"fc.weight": None}, "it reads 32 values, 3 layers of the target have 96"),
        ({}, {"d2t": None}, "no d2t"),
        ({}, {"d2t": torch.full((40,), 90)}, "outside the target's vocabulary"),
        ({}, {"norm.weight": None}, "lacks the tensor norm.weight"),
        ({}, {"midlayer.self_attn.q_proj.weight": torch.zeros(32, 32)}, "q_proj"),
        ({}, {"midlayer.self_attn.k_proj.bias": torch.zeros(32)}, "lacks the tensor midlayer.self_attn.q_proj.bias"),
        ({}, {"midlayer.something.weight": torch.zeros(3)}, "something"),
        ({"hidden_size": None}, {}, "config.json"),
    ],
)
def test_heads_of_another_target_are_refused(config: dict[str, Any], tensors: dict[str, Any], said: str, tmp_path: Path) -> None:
    spec = write_variant(tmp_path, "plain")
    spoil(tmp_path, config, tensors)
    with pytest.raises(StartError) as refused:
        open_drafter(spec, Setting(4, True, around()))
    assert said in refused.value.error and refused.value.cure


def test_the_log_says_what_was_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for variant, said in (("plain", "SafeAILab's"), ("speculators", "speculators'"), ("deepspec", "DeepSpec's"), ("first", "EAGLE-1/2")):
        folder = tmp_path / variant
        open_drafter(write_variant(folder, variant), Setting(4, True, around()))
        assert said in caplog.messages[-1]


def levels_of(row: Told, most: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Draft, list[Tensor]]:
    """A draft, and the logits that it came of, place by place."""
    said: list[Tensor] = []
    add = Levels.add

    def listen(this: Levels, growing: Any, logits: Tensor, *rest: Any) -> None:
        said.append(logits[0].clone())
        add(this, growing, logits, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Levels, "add", listen)
        draft = row.draft(most)
        for _ in range(4):
            draft = draft if draft.count else row.draft(most)  # a long prompt is entered in parts
    return draft, said


def far(said: list[Tensor], golden: list[Tensor]) -> float:
    return max(float((ours.double() - want).abs().max() / want.abs().max()) for ours, want in zip(said, golden, strict=True))


@pytest.mark.parametrize("length, chunk", SHAPES)
@pytest.mark.parametrize("variant", ["parallel", "parallel behind fc"])
def test_parallel_places_are_those_of_one_forward(
    variant: str, length: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = told(f"eagle={write_eagle3(tmp_path, variant)}", length, nodes=5, tree=False)
    in_parts(row, chunk)
    draft, said = levels_of(row, 5, monkeypatch)
    assert draft.count == 5 == len(said)
    golden = {mutant: Golden(tmp_path, variant, mutant).masked(row.tokens, row.features, 5) for mutant in ("", "mask", "mask token")}
    assert far(said, golden[""]) < 1e-4 and far(said, golden["mask"]) > 1e-2 and far(said, golden["mask token"]) > 1e-2
    if length > 1:
        assert far(said, Golden(tmp_path, variant, "position").masked(row.tokens, row.features, 5)) > 1e-3


def test_what_masks_left_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round after round, with guesses that held; a tree of the places; and no more of them than are asked for or have slots."""
    row = told(f"eagle={write_eagle3(tmp_path, 'parallel')}", 90, nodes=12)
    row.tell(30, ends=True)
    for step in (1, 4, 2, 6, 1, 3, 5):
        draft, said = levels_of(row, 12, monkeypatch)
        assert draft.count == 12 and max(draft.depths()) <= 5 == len(said) and draft.parent.count(-1) > 1
        assert far(said, Golden(tmp_path, "parallel").masked(row.tokens[: row.known + 1], row.features[: row.known], 5)) < 1e-4
        row.tell(step, ends=True)
    assert row.draft(2).count == 2 and Eagle.open(str(tmp_path), Setting(0, True, around())).needs.most == 5


def test_parallel_heads_without_their_mask_are_refused(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, "parallel")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for change, gone, said in (({"mask_token_id": None}, "", "mask_token_id"), ({}, "mask_hidden", "no tensor mask_hidden")):
        write(folder, config | change, {name: tensor for name, tensor in tensors.items() if name != gone})
        with pytest.raises(StartError, match=said):
            Eagle.open(str(folder), Setting(0, True, around()))
    write(folder, config, tensors | {"mask_hidden": torch.zeros(1, 7)})
    with pytest.raises(StartError, match="7 values"):
        Eagle.open(str(folder), Setting(0, True, around()))
