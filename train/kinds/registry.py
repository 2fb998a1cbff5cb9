"""The kinds of drafts that can be trained.

A kind is one file and one line in `KINDS`. Its class has `options(parser)`, which adds what it wants to be asked, and
`open(asked, setting) -> Draft`, which raises ValueError (with the cure) for what it cannot do. Text, held-out answers, the training
loop, its checkpoints and the report are the same for all.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from forerun.train.shards import Record
from forerun.train.taps import Taps

KINDS = {
    "dflash": "forerun.train.kinds.dflash:Dflash",
    "dspark": "forerun.train.kinds.dspark:Dspark",
    "eagle3": "forerun.train.kinds.eagle3:Eagle3",
    "grams": "forerun.train.kinds.grams:Grams",
    "medusa": "forerun.train.kinds.medusa:Medusa",
    "mtp": "forerun.train.kinds.mtp:Mtp",
    "model": "forerun.train.kinds.model:ModelDraft",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What every kind may want to know. `target`: the target's folder; `text`: what there is to learn from; `taps`: opens the target as a
    reader that gives the hidden states of these layers, for kinds that need them; `begins`: the folder of a head to go on from; `turns`:
    what the answers in `text` answer, invented by the target too, for kinds that learn from what users write."""

    target: Path
    text: Sequence[Record]
    seed: int
    taps: Callable[[Sequence[int]], Taps]
    begins: Path | None = None
    turns: Sequence[Record] = ()


class Draft(Protocol):
    """Something that is being trained. `net` holds all its parameters; `facts` are for the report: `parameters`, `vocabulary`,
    `vocabulary_covers`, `speculator` (what `--speculator` calls it) and the kind's own."""

    net: nn.Module
    facts: dict[str, Any]

    def loss(self, batch: Sequence[Record]) -> Tensor:
        """The mean over the batch's generated places of what is to become small."""
        ...

    def hits(self, record: Record, depth: int) -> NDArray[np.bool_]:
        """[generated, depth]: would guess d + 1 of a greedy draft that starts at generated place p be the token that stands there, given
        that those before it were? False behind the end of the text."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What `save` writes, under its names, as it lies in `net`: a head that goes on from a folder is read into them. A kind that always
        begins anew has none."""
        ...

    def config(self) -> dict[str, Any]:
        """What `save` writes as config.json. A head that goes on from a folder must be described alike there."""
        ...

    def save(self, folder: Path) -> None:
        """Write a folder that `--speculator` and other programs can load."""
        ...


def options(kind: str, parser: argparse.ArgumentParser) -> None:
    _class(kind).options(parser)


def open_kind(kind: str, asked: argparse.Namespace, setting: Setting) -> Draft:
    """ValueError, with the cure, for options that make no draft, and for `setting.begins` of other ones."""
    draft: Draft = _class(kind).open(asked, setting)
    if setting.begins is not None:
        from forerun.train.kinds.begun import go_on  # imports this file, as the kinds do

        if not draft.tensors():
            raise ValueError(f"--kind {kind} always begins anew: leave out --from")
        go_on(draft, asked, setting.target, setting.begins)
    return draft


def _class(kind: str) -> Any:
    module, _, name = KINDS[kind].partition(":")
    return getattr(importlib.import_module(module), name)
