"""A DSpark drafter: `forerun serve --speculator dspark=DIR` (2607.05147): DFlash's block, with guesses that know each other.

    rows       as DFlash's, but each guesses the token behind its own place, the root's row too
    Markov     behind token x:  logits + W2 W1[x], of rank r
    confidence σ(w [h; W1[x]] + b), trained towards the share of the target's distribution that the guess covers, Σ min(p, q)

Learnt with the true token before each place, as one that is right so far has it. The layout is DeepSpec's; copies of the target's embedding
and output head, which it has, are left out unless `--with-ends` asks for them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from forerun.train.kinds.dflash import BlockNet, Blocks, aims, begin, block_config, block_options, fading, hold, opened, tensors_of
from forerun.train.kinds.flat import Flat, distances
from forerun.train.kinds.registry import Setting
from forerun.train.kinds.source import SharedHead, Source, facts, to_draft, write
from forerun.train.shards import Record
from forerun.train.vocabulary import Vocabulary

SURE = 0.3
"""weight of the confidence beside the guess"""


class Markov(nn.Module):
    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)


class Confidence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class Net(BlockNet):
    def __init__(self, source: Source, taps: int, layers: int, vocab: int, rank: int) -> None:
        super().__init__(source, taps, layers, source.inner)
        self.markov_head = Markov(vocab, rank)
        self.confidence_head = Confidence(source.hidden + rank)


class Dspark:
    def __init__(
        self,
        source: Source,
        net: Net,
        blocks: Blocks,
        vocabulary: Vocabulary,
        head: SharedHead,
        taps: tuple[int, ...],
        mask: int,
        ends: bool,
    ) -> None:
        self.net: Net = net
        self._source, self._blocks, self._head, self._layers, self._mask, self._ends = source, blocks, head, taps, mask, ends
        self._vocab = vocabulary.vocab
        self._kept = torch.from_numpy(vocabulary.kept)
        self._to_draft = to_draft(vocabulary)
        self.facts = facts(net, "dspark", vocabulary.vocab, 1.0) | {"block": blocks.size}

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("the block drafter")
        block_options(group, 7)
        group.add_argument("--rank", type=int, default=64, help="of the Markov head (default: %(default)s)")
        group.add_argument("--with-ends", action="store_true", help="write copies of the target's embedding and output head too")
        parser.set_defaults(rate=1e-3)

    @staticmethod
    def open(asked: argparse.Namespace, setting: Setting) -> Dspark:
        source, vocabulary, head, taps, mask = opened(asked, setting)
        if asked.rank < 1:
            raise ValueError(f"--rank {asked.rank} is too small: use --rank 64")
        with torch.random.fork_rng():
            torch.manual_seed(setting.seed)
            net = Net(source, len(taps), asked.draft_layers, vocabulary.vocab, asked.rank)
        begin(net, source)
        blocks = Blocks(net, setting.taps(taps), source.embedding(), mask, asked.block, 1, asked.roots, setting.seed)
        return Dspark(source, net, blocks, vocabulary, head, taps, mask, asked.with_ends)

    def loss(self, batch: Sequence[Record]) -> Tensor:
        total, weight = 0.0 * self.net.norm.weight.sum(), torch.tensor(1e-9)  # also where all answers are too short for a root
        for record, roots, hidden in self._blocks.drawn(batch):
            flat = Flat.of([record])
            block, place, goal = aims(flat, record, roots, hidden.shape[1])
            h = hidden[block, place]
            e = self.net.markov_head.markov_w1(flat.tokens[roots[block] + place])
            scores = functional.log_softmax((self._head.logits(h) + e @ self.net.markov_head.markov_w2.weight[self._kept].T).float(), -1)
            candidates, target = self._to_draft[flat.candidates[goal]], flat.logprobs[goal].exp()
            likely = scores.gather(1, candidates.clamp(min=0)).exp() * (candidates >= 0)
            covered = torch.minimum(likely, target).sum(-1).detach().clamp(0.0, 1.0)
            sure = self.net.confidence_head.proj(torch.cat([h.float(), e], -1))[:, 0].float()
            each = distances(scores, candidates, flat.logprobs[goal]) + SURE * functional.binary_cross_entropy_with_logits(
                sure, covered, reduction="none"
            )
            share = fading(place)
            total, weight = total + (share * each).sum(), weight + share.sum()
        return total / weight

    def hits(self, record: Record, depth: int) -> NDArray[np.bool_]:
        right = np.zeros((record.generated, depth), bool)
        tokens = torch.from_numpy(record.tokens.astype(np.int64))
        with torch.inference_mode():
            for roots, hidden in self._blocks.every(record):
                guesses = []
                for place in range(hidden.shape[1]):
                    before = tokens[(roots + place).clamp(max=len(tokens) - 1)]
                    added = self.net.markov_head.markov_w2(self.net.markov_head.markov_w1(before))
                    guesses.append((self._head.whole(hidden[:, place]) + added).argmax(-1))
                hold(right, record, roots, torch.stack(guesses, 1))
        return right

    def save(self, folder: Path) -> None:
        net = self.net
        config = block_config(self._source, self._blocks, self._vocab) | {"architectures": ["Qwen3DSparkModel"]}
        config |= {"target_layer_ids": list(self._layers), "mask_token_id": self._mask, "markov_head_type": "vanilla"}
        config |= {
            "markov_rank": net.markov_head.markov_w1.embedding_dim,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        tensors = tensors_of(net)
        if self._ends:
            tensors |= {"embed_tokens.weight": self._source.embedding(), "lm_head.weight": self._source.head()}
        write(folder, config, tensors)
