"""A DSpark drafter: `forerun serve --speculator dspark=DIR` (2607.05147): DFlash's block, with guesses that know each other.

    rows       as DFlash's, but each guesses the token behind its own place, the root's row too
    Markov     behind token x:  logits + W2 W1[x], of rank r
    confidence σ(w [h; W1[x]] + b), trained towards the share of the target's distribution that the guess covers, Σ min(p, q)

Learnt with the true token before each place, as one that is right so far has it. The layout is DeepSpec's; copies of the target's embedding
and output head, which it has, are left out unless `--with-ends` asks for them. With `--reduced` it is that of speculators.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from forerun.train.kinds.blocks import Aims, BlockNet, Blocks, Sizes, begin, block_facts, block_options, faded, hold, tensors_of
from forerun.train.kinds.flat import Flat, distances
from forerun.train.kinds.model import compressed
from forerun.train.kinds.registry import Setting
from forerun.train.kinds.source import write
from forerun.train.shards import Record

SURE = 0.3
"""weight of the confidence beside the guess"""


class Markov(nn.Module):
    """`read`: tokens that may stand before a guess, which begin as the principal components of their embeddings; `guessed`: tokens that it
    may be."""

    def __init__(self, read: int, guessed: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(read, rank)
        self.markov_w2 = nn.Linear(rank, guessed, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class Confidence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class Net(BlockNet):
    def __init__(self, sizes: Sizes, rank: int) -> None:
        super().__init__(sizes)
        self.markov_head = Markov(sizes.vocabulary.vocab, sizes.head.size, rank)
        self.confidence_head = Confidence(sizes.source.hidden + rank)


class Dspark:
    """`ends`: copies of the target's embedding and output head are written too."""

    def __init__(self, sizes: Sizes, net: Net, blocks: Blocks, ends: bool) -> None:
        self.net: Net = net
        self._sizes, self._blocks, self._ends = sizes, blocks, ends
        self.facts = block_facts("dspark", sizes, blocks)

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("the block drafter")
        block_options(group, 7)
        group.add_argument("--rank", type=int, default=64, help="of the Markov head (default: %(default)s)")
        group.add_argument("--with-ends", action="store_true", help="write copies of the target's embedding and output head too")
        parser.set_defaults(rate=1e-3)

    @staticmethod
    def open(asked: argparse.Namespace, setting: Setting) -> Dspark:
        sizes = Sizes.open(asked, setting)
        if asked.rank < 1:
            raise ValueError(f"--rank {asked.rank} is too small: use --rank 64")
        if asked.with_ends and asked.reduced:
            raise ValueError("--reduced has an output head of its own: leave out --with-ends")
        with torch.random.fork_rng():
            torch.manual_seed(setting.seed)
            net = Net(sizes, asked.rank)
        begin(net, sizes.source)
        with torch.no_grad():
            start = compressed(sizes.source.embedding(), asked.rank)
            net.markov_head.markov_w1.weight.copy_(start / start.std())
        return Dspark(sizes, net, sizes.blocks(net, setting, asked, 1), asked.with_ends)

    def loss(self, batch: Sequence[Record]) -> Tensor:
        head, markov, to_draft = self._sizes.head, self.net.markov_head, self._sizes.to_draft
        flat = Flat.of(batch)
        roots, hidden = self._blocks.drawn(batch)
        aims = Aims.of(flat, roots, hidden.shape[1])
        h, e = hidden[aims.block, aims.place], markov.markov_w1(aims.before)
        scores = functional.log_softmax((head.logits(h) + e @ head.learnt(markov.markov_w2.weight).T).float(), -1)
        candidates, likely = to_draft[flat.candidates[aims.goal]], flat.logprobs[aims.goal]
        wrong = distances(scores, candidates, likely)
        guessed = scores.detach().gather(1, candidates.clamp(min=0)).exp() * (candidates >= 0)
        covered = torch.minimum(guessed, likely.exp()).sum(-1).clamp(0.0, 1.0)
        sure = self.net.confidence_head.proj(torch.cat([h.float(), e], -1))[:, 0].float()
        unsure = functional.binary_cross_entropy_with_logits(sure, covered, reduction="none")
        return faded(wrong + SURE * unsure, aims.place)

    def hits(self, record: Record, depth: int) -> NDArray[np.bool_]:
        right = np.zeros((record.generated, depth), bool)
        tokens = torch.from_numpy(record.tokens.astype(np.int64))
        with torch.inference_mode():
            for roots, hidden in self._blocks.every(record):
                guesses = []
                for place in range(hidden.shape[1]):
                    before = tokens[(roots + place).clamp(max=len(tokens) - 1)]
                    added = self.net.markov_head.markov_w2(self.net.markov_head.markov_w1(before))
                    guesses.append(self._sizes.head.best(hidden[:, place], added))
                hold(right, record, roots, torch.stack(guesses, 1))
        return right

    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.net) | self._sizes.reduction()

    def config(self) -> dict[str, Any]:
        sizes, net = self._sizes, self.net
        own = {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": list(sizes.taps), "mask_token_id": sizes.mask}
        config = sizes.config(self._blocks) | own if sizes.own is None else sizes.reduced_config("dspark", self._blocks)
        config |= {"markov_head_type": "vanilla", "markov_rank": net.markov_head.markov_w1.embedding_dim}
        return config | {"enable_confidence_head": True, "confidence_head_with_markov": True}

    def save(self, folder: Path) -> None:
        source, tensors = self._sizes.source, self.tensors()
        if self._ends:
            tensors |= {"embed_tokens.weight": source.embedding(), "lm_head.weight": source.head()}
        write(folder, self.config(), tensors)
