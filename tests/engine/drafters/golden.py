"""For golden tests of heads: checkpoints written as their authors publish them, commits as the engine tells them, and the logits that a
drafter chose from. The implementations that these logits are compared with stand in each family's test, in plain torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.engine.drafters.draft import Commit, Draft, Drafter, Place
from forerun.engine.drafters.lattice import Lattice, Levels
from forerun.engine.drafters.registry import Setting
from forerun.engine.kv import Table
from tests.engine.drafters.companions import host
from tests.engine.tiny import VOCAB

HIDDEN = 32
LENGTHS = (1, 7, 64, 1000)
"""of the context: tokens that the target has computed"""
ROW = 3


def draw(seed: int, *shape: int, scale: float | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that a matrix of this shape keeps near 1, rounded to bf16 so that they are the same in any type."""
    size = shape[-1] ** -0.5 if scale is None else scale
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).bfloat16().to(dtype)


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def setting(nodes: int = 8, tree: bool = True) -> Setting:
    return Setting(nodes, tree, host())


def attached(drafter: Drafter, longest: int = 1200) -> tuple[Drafter, Table]:
    """The drafter with pools, and a table in which the test's row has pages in no order."""
    around = host()
    size = around.backend.caps.page_tokens
    table = Table(8, longest, size)
    pages = -(-longest // size)
    pools = tuple(around.backend.pool(spec, 2 * pages) for spec in drafter.needs.pools)
    for pool in pools:  # what lies in pages that nobody wrote must not matter
        pool.keys.fill_(float("nan"))
        pool.values.fill_(float("nan"))
    table.grant(ROW, torch.randperm(2 * pages, generator=torch.Generator().manual_seed(5))[:pages].tolist())
    drafter.needs.attach(Place(pools, table, 8, longest))
    return drafter, table


def tell(drafter: Drafter, tokens: Sequence[int], features: Tensor, chunks: Sequence[int] = (), prompt: int | None = None) -> None:
    """`tokens`: one more than `features` has rows, the last is the root. `chunks`: where the prompt was cut."""
    count = len(tokens) - 1
    cuts = [0, *(cut for cut in chunks if 0 < cut < count), count]
    for first, last in itertools.pairwise(cuts):
        newest = tokens[count] if last == count else None
        told = [count if prompt is None else prompt]
        drafter.absorb(Commit([ROW], [first], [list(tokens[first:last])], [newest], [features[first:last]], told))


def logits_of(monkeypatch: pytest.MonkeyPatch, drafter: Any, most: int = 8, row: int = ROW) -> tuple[Draft, list[Tensor]]:
    """A draft for the row, and the logits [V] that each level of it was chosen from."""
    levels: Levels = drafter.levels
    seen: list[Tensor] = []
    add = levels.add

    def spy(growing: Sequence[Lattice], logits: Tensor, *rest: Any, **named: Any) -> None:
        seen.append(logits[0].clone())
        add(growing, logits, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(levels, "add", spy)
        (draft,) = drafter.propose([row], [most])
    return draft, seen


def differ(ours: Sequence[Tensor], golden: Sequence[Tensor], tolerance: float = 1e-4) -> bool:
    """Whether any of them is not the same, for a mutant that must be found out."""
    return any(not torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(ours, golden, strict=True))


def same(ours: Sequence[Tensor], golden: Sequence[Tensor], tolerance: float = 1e-4) -> None:
    for level, (a, b) in enumerate(zip(ours, golden, strict=True)):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, level=level: f"level {level}: {text}")
