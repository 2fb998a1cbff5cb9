"""A head that begins as one that exists: a published one, or an earlier one of ours, that is to learn more text.

What `save` would write is read instead, so whatever can be saved can be gone on from. Sizes and options are the caller's, and must be
those that the head was made with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.engine.weights import open_checkpoint


def go_on(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Each of these tensors, which lie in a net, becomes the one of its name in `folder`; one that is no weight (but of a vocabulary) must
    be the same there. ValueError for a head of another kind or other sizes."""
    checkpoint = open_checkpoint(folder)
    names = checkpoint.names()
    for name, value in tensors.items():
        found = checkpoint.read(name) if name in names else None
        if found is None or found.shape != value.shape:
            what = "is not there" if found is None else f"is {list(found.shape)}, not {list(value.shape)}"
            raise ValueError(f"--from {folder}: {name} {what}: give the --kind and the options that this head was made with")
        if value.is_floating_point():
            with torch.no_grad():
                value.copy_(found)
        elif not torch.equal(found, value):
            raise ValueError(f"--from {folder}: {name} is of another target or vocabulary")


def kept_by(folder: Path) -> NDArray[np.int64]:
    """The target ids that the head in `folder` can guess (`d2t`). ValueError for one without a vocabulary of its own."""
    checkpoint = open_checkpoint(folder)
    if "d2t" not in checkpoint.names():
        raise ValueError(f"--from {folder}: this head has no draft vocabulary (d2t): train one anew, without --from")
    offsets = checkpoint.read("d2t").numpy().astype(np.int64)
    return offsets + np.arange(len(offsets))
