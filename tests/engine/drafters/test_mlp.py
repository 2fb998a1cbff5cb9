"""MLPSpeculator against plain torch, in each public layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.engine.drafters.draft import Commit
from forerun.engine.drafters.mlp import Mlp
from forerun.engine.errors import StartError
from tests.engine.drafters.golden import HIDDEN, LENGTHS, ROW, differ, draw, logits_of, same, setting, tell, tokens_of, write
from tests.engine.drafters.plain import mlp_logits
from tests.engine.tiny import VOCAB

STAGES, INNER = 4, 48
LAYOUTS: dict[str, dict[str, Any]] = {
    "IBM": {"inner_dim": INNER},
    "as wide as the target": {"inner_dim": 0, "scale_input": True},
    "scaled input": {"inner_dim": INNER, "scale_input": True},
    "tied": {"inner_dim": INNER, "tie_weights": True},
    "tied, with copies": {"inner_dim": INNER, "tie_weights": True, "copies": True},
    "Arctic's RNN": {"inner_dim": str(INNER), "deep": ".0", "scale_input": True},
    "Arctic's LSTM": {"inner_dim": str(INNER), "method": "sum_lstm", "tie_weights": True, "tie_lstm_embs": True, "scale_input": True},
}


def tensors_of(layout: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, configuration), names without prefix."""
    given = LAYOUTS[layout]
    deep, copies = given.get("deep", ""), given.get("copies", False)
    config = {"n_predict": STAGES, "emb_dim": HIDDEN, "vocab_size": VOCAB, "tie_weights": False, "scale_input": False}
    config |= {name: value for name, value in given.items() if name not in ("deep", "copies")}
    inner = int(config["inner_dim"]) or HIDDEN
    seeds = iter(range(1000))
    make = lambda *shape, scale=None: draw(next(seeds), *shape, scale=scale, dtype=dtype)  # noqa: E731
    norm = lambda: {"weight": 1 + make(inner, scale=0.2), "bias": make(inner, scale=0.2)}  # noqa: E731
    tensors: dict[str, Tensor] = {}
    if given.get("method"):
        for i in range(2):
            tensors |= {f"{gate}_proj.{i}.weight": make(inner, inner if i else HIDDEN) for gate in ("forget", "input", "output", "cell")}
        tensors |= {f"{which}.0.{name}": value for which in ("cell_ln", "state_ln") for name, value in norm().items()}
        tensors |= {"forget_emb.0.weight": make(VOCAB, inner, scale=0.3), "head.0.weight": make(VOCAB, inner)}
        tensors |= {f"{gate}_emb.0.weight": tensors["forget_emb.0.weight"].clone() for gate in ("input", "output", "cell")}
        return tensors, config
    for i in range(STAGES):
        parts = {f"emb.{i}{deep}.weight": make(VOCAB, inner, scale=0.3), f"proj.{i}{deep}.weight": make(inner, inner if i else HIDDEN)}
        parts |= {f"ln.{i}{deep}.{name}": value for name, value in norm().items()} | {f"head.{i}.weight": make(VOCAB, inner)}
        if config["tie_weights"] and i:
            parts = {name: value if name.startswith("proj") and i == 1 else tensors[first_of(name, i)] for name, value in parts.items()}
            parts = parts if copies else {name: value for name, value in parts.items() if name.startswith("proj") and i == 1}
        tensors |= {name: value.clone() for name, value in parts.items()}
    return tensors, config


def first_of(name: str, i: int) -> str:
    return name.replace(f".{i}", ".1" if name.startswith("proj") and i > 1 else ".0", 1)


def write_speculator(folder: Path, layout: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, config = tensors_of(layout, dtype)
    prefix = "" if "Arctic" in layout else "speculator."
    write(folder, {prefix + name: value for name, value in tensors.items()}, config)
    return tensors, config | {"inner_dim": int(config["inner_dim"])}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, length: int) -> None:
    tensors, config = write_speculator(tmp_path, layout)
    drafter = Mlp.open(str(tmp_path), setting())
    tokens, features = tokens_of(1, length + 1), draw(7, length, HIDDEN, scale=1.0)
    tell(drafter, tokens, features, chunks=(1, 16, 17, 600))
    ours = logits_of(monkeypatch, drafter)[1]
    chain = [tokens[-1], *(int(level.argmax()) for level in ours)]
    same(ours, mlp_logits(tensors, config, features[-1], chain))
    mutants = ["position", "weight", "norm", *(["input norm"] if config["scale_input"] else [])]
    assert all(differ(ours, mlp_logits(tensors, config, features[-1], chain, mutant)) for mutant in mutants)
    if length > 1:
        assert differ(ours, mlp_logits(tensors, config, features[-2], chain))


def test_only_behind_the_chain_has_anything_been_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses beside the chain are leaves."""
    write_speculator(tmp_path, "IBM")
    for value in (f"{tmp_path},tree=chain", str(tmp_path)):
        drafter = Mlp.open(value, setting())
        tell(drafter, tokens_of(1, 10), draw(7, 9, HIDDEN, scale=1.0))
        draft, ours = logits_of(monkeypatch, drafter)
        chain = [int(level.argmax()) for level in ours]
        inner = {tuple(draft.paths()[parent]) for parent in draft.parent if parent >= 0}
        assert inner <= {tuple(chain[:depth]) for depth in range(1, STAGES)}
        assert draft.count == 8 if draft.count > STAGES else draft.token == chain


def test_several_rows_at_once_are_drafted_as_each_alone(tmp_path: Path) -> None:
    write_speculator(tmp_path, "scaled input")
    alone = []
    together = Mlp.open(str(tmp_path), setting())
    for row in range(4):
        commit = Commit([row], [0], [tokens_of(row, 5)], [row], [draw(row, 5, HIDDEN, scale=1.0)], [5])
        single = Mlp.open(str(tmp_path), setting())
        for drafter in (single, together):
            drafter.absorb(commit)
        alone += single.propose([row], [8])
    assert together.propose([0, 1, 2, 3], [8] * 4) == alone


def test_half_size_stays_half_size(tmp_path: Path) -> None:
    bytes_of = {}
    for dtype in (torch.float32, torch.bfloat16):
        write_speculator(tmp_path / str(dtype), "IBM", dtype)
        bytes_of[dtype] = Mlp.open(str(tmp_path / str(dtype)), setting()).needs.weight_bytes
    assert bytes_of[torch.bfloat16] < 0.6 * bytes_of[torch.float32]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"n_predict": 0}, "n_predict"),
        ({"vocab_size": 5}, "the target has"),
        ({"inner_dim": "48.96"}, "several layers"),
        ({"inner_dim": 64}, "trained for this target"),
        ({"n_predict": 5}, "lacks the tensor"),
        ({"n_predict": 3}, "do not have"),
        ({"tie_weights": True, "n_predict": 1}, "nobody to share"),
        ({"method": "sum_lstm"}, "does not share"),
    ],
)
def test_other_speculators_are_refused_with_the_cure(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    tensors, config = tensors_of("IBM")
    write(tmp_path, tensors, config | change)
    with pytest.raises(StartError) as refused:
        Mlp.open(str(tmp_path), setting())
    assert told in refused.value.error + refused.value.cure and refused.value.cure


def test_nothing_is_drafted_for_a_stranger(tmp_path: Path) -> None:
    write_speculator(tmp_path, "IBM")
    drafter = Mlp.open(str(tmp_path), setting())
    assert drafter.propose([ROW], [8])[0].count == 0
    tell(drafter, tokens_of(1, 3), draw(7, 2, HIDDEN))
    drafter.forget([ROW, 77])
    assert drafter.propose([ROW], [8])[0].count == 0
