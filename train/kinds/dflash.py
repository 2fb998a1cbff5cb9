"""A DFlash drafter: `forerun serve --speculator dflash=DIR` (2602.06036): a block of guesses in one forward.

Each row of a block (`blocks.py`) guesses the token at its own place; the root's row guesses nothing. The layout is z-lab's; with
`--reduced`, where an output head of its own knows the `--vocab` most frequent tokens alone, it is that of speculators.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from forerun.train.kinds.blocks import Aims, BlockNet, Blocks, Sizes, begin, block_facts, block_options, faded, hold, tensors_of
from forerun.train.kinds.flat import Flat, distances
from forerun.train.kinds.registry import Setting
from forerun.train.kinds.source import write
from forerun.train.shards import Record


class Dflash:
    def __init__(self, sizes: Sizes, net: BlockNet, blocks: Blocks) -> None:
        self.net = net
        self._sizes, self._blocks = sizes, blocks
        self.facts = block_facts("dflash", sizes, blocks)

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        block_options(parser.add_argument_group("the block drafter"), 8)
        parser.set_defaults(rate=1e-3)

    @staticmethod
    def open(asked: argparse.Namespace, setting: Setting) -> Dflash:
        sizes = Sizes.open(asked, setting)
        with torch.random.fork_rng():
            torch.manual_seed(setting.seed)
            net = BlockNet(sizes)
        begin(net, sizes.source)
        return Dflash(sizes, net, sizes.blocks(net, setting, asked, 0))

    def loss(self, batch: Sequence[Record]) -> Tensor:
        head, to_draft = self._sizes.head, self._sizes.to_draft
        flat = Flat.of(batch)
        roots, hidden = self._blocks.drawn(batch)
        aims = Aims.of(flat, roots, hidden.shape[1])
        scores = functional.log_softmax(head.logits(hidden[aims.block, aims.place]).float(), -1)
        return faded(distances(scores, to_draft[flat.candidates[aims.goal]], flat.logprobs[aims.goal]), aims.place)

    def hits(self, record: Record, depth: int) -> NDArray[np.bool_]:
        right = np.zeros((record.generated, depth), bool)
        with torch.inference_mode():
            for roots, hidden in self._blocks.every(record):
                guesses = self._sizes.head.best(hidden.flatten(0, 1)).view(hidden.shape[:2])
                hold(right, record, roots, guesses)
        return right

    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.net) | self._sizes.reduction()

    def config(self) -> dict[str, Any]:
        sizes = self._sizes
        own = {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {"target_layer_ids": list(sizes.taps), "mask_token_id": sizes.mask},
        }
        return sizes.config(self._blocks) | own if sizes.own is None else sizes.reduced_config("dflash", self._blocks)

    def save(self, folder: Path) -> None:
        write(folder, self.config(), self.tensors())
