"""Hidden states that were computed once, on disk: `WORK/states/TEXT-LAYER`, bfloat16 [tokens − 1, hidden], a file for each text and layer.

They outlive the process, so that the next epoch, a run that goes on and a kind that reads the same layers read them instead of running
the target. The files are the operating system's to keep in memory. Nothing here may be relied on: what is missing is computed anew, and
the folder may be removed at any time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.train.shards import Record

ITEM = 2
"""bytes of a value"""


class Shelf:
    """`room`: bytes that may lie in `folder`, those of earlier runs included."""

    def __init__(self, folder: Path, room: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._left = room - sum(file.stat().st_size for file in folder.iterdir())

    def get(self, record: Record, layer: int, hidden: int) -> Tensor | None:
        """bfloat16 [tokens − 1, hidden], None where there is none."""
        try:
            found = np.fromfile(self._file(record, layer), np.uint16)
        except FileNotFoundError:
            return None
        states = torch.from_numpy(found).view(torch.bfloat16).view(-1, hidden)
        return states[: len(record.tokens) - 1]  # older files have a row for the last token too

    def put(self, record: Record, layer: int, states: Tensor) -> None:
        """Kept if there is room. Under another name first: a process that is killed here leaves no half of them."""
        file = self._file(record, layer)
        if ITEM * states.numel() > self._left or file.exists():
            return
        self._left -= ITEM * states.numel()
        fresh = file.with_suffix(f".{os.getpid()}")
        states.contiguous().view(torch.int16).numpy().tofile(fresh)
        os.replace(fresh, file)

    def _file(self, record: Record, layer: int) -> Path:
        return self._folder / f"{hashlib.sha256(record.tokens.tobytes()).hexdigest()[:24]}-{layer}"


@dataclasses.dataclass(frozen=True, slots=True)
class Keeper:
    """A shelf for the states behind some layers, which lie beside each other in this order."""

    shelf: Shelf
    layers: Sequence[int]

    def kept(self, record: Record, hidden: int) -> Tensor | None:
        """bfloat16 [tokens − 1, layers · hidden], None where one of the layers is missing."""
        parts = []
        for layer in self.layers:
            part = self.shelf.get(record, layer, hidden)
            if part is None:
                return None
            parts.append(part)
        return torch.cat(parts, 1)

    def keep(self, record: Record, states: Tensor) -> None:
        for layer, part in zip(self.layers, torch.chunk(states, len(self.layers), 1)):
            self.shelf.put(record, layer, part)
