"""A DFlash drafter: `forerun serve --speculator dflash=DIR` (2602.06036): a block of guesses in one forward.

    context    RMSNorm(W [states of some layers]) at every token: each layer makes keys and values of it, nothing else
    block      embeddings of (root, mask, mask, …) at the root's place and behind it: each row sees all context before the root and the
               whole block, and guesses the token at its own place; the root's row guesses nothing

Trained at random roots of the answers, their blocks side by side (`Blocks`, which `dspark.py` shares). The layout is z-lab's; with
`--reduced`, where an output head of its own knows the `--vocab` most frequent tokens alone, it is that of speculators.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from forerun.train.kinds.flat import Flat, distances
from forerun.train.kinds.nets import Attention, Mlp, Norm, linear
from forerun.train.kinds.registry import Setting
from forerun.train.kinds.source import Head, OwnHead, SharedHead, Source, facts, frequent, reduction, to_draft, write
from forerun.train.shards import Record
from forerun.train.taps import Taps
from forerun.train.vocabulary import Vocabulary

FADE_PLACES = 4.0
"""a guess counts e times less so many places further on"""
MEASURED = 128
"""roots whose blocks are computed side by side when acceptance is measured"""


def layers_of(count: int, layers: int) -> tuple[int, ...]:
    """`count` target layers, evenly spread as published drafts have them."""
    found = [layers // 2] if count == 1 else [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    return tuple(sorted({min(max(layer, 0), layers - 2) for layer in found}))


class Layer(nn.Module):
    def __init__(self, source: Source, inner: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(source.hidden, source.eps)
        self.self_attn = Attention(source, source.hidden, head_norms=True)
        self.post_attention_layernorm = Norm(source.hidden, source.eps)
        self.mlp = Mlp(source.hidden, inner)

    def forward(self, x: Tensor, positions: Tensor, context: Tensor, seen: Tensor) -> Tensor:
        """x [r, H] of blocks at `positions`, context [t, H] at 0 … t−1; seen [r, t + r]."""
        read = self.input_layernorm(x)
        keys, values = self.self_attn.entries(context, torch.arange(len(context)))
        own_keys, own_values = self.self_attn.entries(read, positions)
        q = self.self_attn.queries(read, positions)
        x = x + self.self_attn.o_proj(self.self_attn.over(q, torch.cat([keys, own_keys]), torch.cat([values, own_values]), seen, []))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class BlockNet(nn.Module):
    """Parameter names are those of the checkpoint. `draws`: how often roots were drawn, so that a run that goes on draws the next ones."""

    draws: Tensor

    def __init__(self, source: Source, taps: int, layers: int, inner: int, own: OwnHead | None = None) -> None:
        super().__init__()
        self.fc = linear(taps * source.hidden, source.hidden)
        self.hidden_norm = Norm(source.hidden, source.eps)
        self.layers = nn.ModuleList(Layer(source, inner) for _ in range(layers))
        self.norm = Norm(source.hidden, source.eps)
        if own is not None:
            self.lm_head = own
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))

    def block(self, states: Tensor, inputs: Tensor, roots: Tensor) -> Tensor:
        """states [t, taps · H] of a text; inputs [a, S, H]: embeddings of the blocks at these roots (places in the text, [a]) → [a, S, H],
        behind the last norm."""
        count, size, hidden = inputs.shape
        context = self.hidden_norm(self.fc(states))
        before = torch.arange(len(states)) < roots[:, None]
        own = torch.eye(count, dtype=torch.bool)
        seen = torch.cat([before.repeat_interleave(size, 0), own.repeat_interleave(size, 0).repeat_interleave(size, 1)], 1)
        x = inputs.reshape(-1, hidden)
        positions = (roots[:, None] + torch.arange(size)).flatten()
        for layer in self.layers:
            x = layer(x, positions, context, seen)
        out: Tensor = self.norm(x).view(count, size, hidden)
        return out


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in net.state_dict().items() if name != "draws"}


class Blocks:
    """What block drafters share. `shift`: 0 where a row guesses the token at its own place, 1 where the one behind it. `size`: rows of a
    block; `roots`: drawn from each text in a step."""

    def __init__(self, net: BlockNet, taps: Taps, embedding: Tensor, mask: int, size: int, shift: int, roots: int, seed: int) -> None:
        self.net, self.size, self.shift = net, size, shift
        self._taps, self._embedding, self._mask, self._roots, self._seed = taps, embedding, mask, roots, seed

    @property
    def first(self) -> int:
        """The first row of a block that guesses."""
        return 1 - self.shift

    def drawn(self, batch: Sequence[Record]) -> Iterator[tuple[Record, Tensor, Tensor]]:
        """Each text with its drawn roots [a] and its blocks' rows that guess [a, guesses, H]."""
        self.net.draws += 1
        for record, states in zip(batch, self._taps.read(batch)):
            # the first token of an answer comes with its prompt, and behind the last there is nothing to guess
            places = np.arange(record.prompt, len(record.tokens) - 1)
            dice = np.random.default_rng([self._seed, int(self.net.draws), record.number])
            chosen = np.sort(dice.permutation(places)[: self._roots])
            if len(chosen):
                roots = torch.from_numpy(chosen)
                yield record, roots, self.rows(states, record, roots)

    def every(self, record: Record) -> Iterator[tuple[Tensor, Tensor]]:
        """For measuring: roots in portions, and the blocks' rows that guess."""
        (states,) = self._taps.read([record])
        for roots in torch.split(torch.arange(max(record.prompt - 1, 1), len(record.tokens) - 1), MEASURED):
            yield roots, self.rows(states, record, roots)

    def rows(self, states: Tensor, record: Record, roots: Tensor) -> Tensor:
        tokens = torch.from_numpy(record.tokens.astype(np.int64))[roots]
        masks = self._embedding[self._mask].expand(len(roots), self.size - 1, -1)
        return self.net.block(states, torch.cat([self._embedding[tokens][:, None], masks], 1), roots)[:, self.first :]


def aims(flat: Flat, record: Record, roots: Tensor, guesses: int) -> tuple[Tensor, Tensor, Tensor]:
    """`flat` of this record alone. For each guess that has something to aim at: its block, its place in it (from 0), and its goal."""
    target = roots[:, None] + 1 + torch.arange(guesses)
    goal = flat.goal[target.clamp(max=len(record.tokens) - 1)]
    goal[target >= len(record.tokens)] = -1
    block, place = (goal >= 0).nonzero(as_tuple=True)
    return block, place, goal[block, place]


def fading(place: Tensor) -> Tensor:
    return torch.exp(-place / FADE_PLACES)


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
            net = BlockNet(sizes.source, len(sizes.taps), asked.draft_layers, sizes.inner, sizes.own)
        begin(net, sizes.source)
        return Dflash(sizes, net, sizes.blocks(net, setting, asked, 0))

    def loss(self, batch: Sequence[Record]) -> Tensor:
        head, to_draft = self._sizes.head, self._sizes.to_draft
        total, weight = 0.0 * self.net.norm.weight.sum(), torch.tensor(1e-9)  # also where all answers are too short for a root
        for record, roots, hidden in self._blocks.drawn(batch):
            flat = Flat.of([record])
            block, place, goal = aims(flat, record, roots, hidden.shape[1])
            scores = functional.log_softmax(head.logits(hidden[block, place]).float(), -1)
            share = fading(place)
            far = distances(scores, to_draft[flat.candidates[goal]], flat.logprobs[goal])
            total, weight = total + (share * far).sum(), weight + share.sum()
        return total / weight

    def hits(self, record: Record, depth: int) -> NDArray[np.bool_]:
        right = np.zeros((record.generated, depth), bool)
        with torch.inference_mode():
            for roots, hidden in self._blocks.every(record):
                guesses = self._sizes.head.best(hidden.flatten(0, 1)).view(hidden.shape[:2])
                hold(right, record, roots, guesses)
        return right

    def save(self, folder: Path) -> None:
        sizes = self._sizes
        own = {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {"target_layer_ids": list(sizes.taps), "mask_token_id": sizes.mask},
        }
        config = sizes.config(self._blocks) | own if sizes.own is None else sizes.reduced_config("dflash", self._blocks)
        write(folder, config, tensors_of(self.net) | sizes.reduction())


def hold(right: NDArray[np.bool_], record: Record, roots: Tensor, guesses: Tensor) -> None:
    """Marks the guesses [a, g] behind these roots that are the tokens of the text."""
    tokens = record.tokens.astype(np.int64)
    for root, guessed in zip(roots.tolist(), guesses.numpy()):
        place = root + 1 - record.prompt
        count = min(right.shape[1], len(guessed), len(tokens) - root - 1)
        right[place, :count] = guessed[:count] == tokens[root + 1 : root + 1 + count]


def block_options(group: argparse._ArgumentGroup, size: int) -> None:
    group.add_argument("--block", type=int, default=size, help="rows of a block (default: %(default)s)")
    group.add_argument("--draft-layers", type=int, default=2, help="layers of the drafter (default: %(default)s)")
    group.add_argument("--states", type=int, default=3, help="target layers whose states it reads (default: %(default)s)")
    group.add_argument("--roots", type=int, default=24, help="blocks that are learnt of each text in a step (default: %(default)s)")
    group.add_argument("--mask-token", type=int, default=-1, help="id that stands for a token to be guessed (default: the target's last)")
    group.add_argument("--vocab", type=int, default=8192, help="tokens that are learnt (default: %(default)s)")
    group.add_argument("--reduced", action="store_true", help="guess these alone, with an output head of its own: much cheaper to ask")
    group.add_argument("--inner", type=int, default=0, help="width of its MLPs (default: the target's)")


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What a block drafter is made of. `own`: its output head, if it is not the target's; `to_draft` [V]: the place of each target token
    among those that are learnt, −1 = none."""

    source: Source
    vocabulary: Vocabulary
    head: Head
    own: OwnHead | None
    taps: tuple[int, ...]
    mask: int
    inner: int
    to_draft: Tensor

    @classmethod
    def open(cls, asked: argparse.Namespace, setting: Setting) -> Sizes:
        """ValueError for sizes that make no drafter."""
        for name, least in (("block", 2), ("draft_layers", 1), ("states", 1), ("roots", 1)):
            if getattr(asked, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(asked, name)} is too small: use {least} or more")
        source = Source.open(setting.target)
        whole = source.head()
        if asked.mask_token >= len(whole):
            raise ValueError(f"--mask-token {asked.mask_token} is no token: the target has {len(whole)}")
        vocabulary = frequent(setting.target, list(setting.text), len(whole), asked.vocab)
        kept = torch.from_numpy(vocabulary.kept)
        own = OwnHead(whole, kept) if asked.reduced else None
        head = SharedHead(whole, kept) if own is None else own
        mask = asked.mask_token if asked.mask_token >= 0 else len(whole) - 1
        taps, inner = layers_of(asked.states, source.layers), asked.inner or source.inner
        return cls(source, vocabulary, head, own, taps, mask, inner, to_draft(vocabulary))

    def blocks(self, net: BlockNet, setting: Setting, asked: argparse.Namespace, shift: int) -> Blocks:
        return Blocks(net, setting.taps(self.taps), self.source.embedding(), self.mask, asked.block, shift, asked.roots, setting.seed)

    def config(self, blocks: Blocks) -> dict[str, Any]:
        """What every layout says."""
        sizes = self.source.sizes() | {"model_type": "qwen3", "num_hidden_layers": len(blocks.net.layers), "intermediate_size": self.inner}
        return sizes | {"vocab_size": self.vocabulary.vocab, "num_target_layers": self.source.layers, "block_size": blocks.size}

    def reduced_config(self, kind: str, blocks: Blocks) -> dict[str, Any]:
        """speculators' layout, whose layer ids count what enters a layer."""
        verifier = {"name_or_path": self.source.folder.name, "architectures": self.source.config.get("architectures", [])}
        proposal = {"proposal_type": "greedy", "speculative_tokens": blocks.size - blocks.first}
        return {
            "architectures": [f"{'DSpark' if kind == 'dspark' else 'DFlash'}Speculator"],
            "speculators_model_type": kind,
            "speculators_version": "0.3.0",
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": verifier,
            },
            "transformer_layer_config": self.config(blocks),
            "aux_hidden_state_layer_ids": [layer + 1 for layer in self.taps],
            "block_size": blocks.size,
            "mask_token_id": self.mask,
            "draft_vocab_size": self.head.size,
            "sample_from_anchor": blocks.shift == 1,
        }

    def reduction(self) -> dict[str, Tensor]:
        return {} if self.own is None else reduction(torch.from_numpy(self.vocabulary.kept), self.vocabulary.vocab)


def block_facts(kind: str, sizes: Sizes, blocks: Blocks) -> dict[str, Any]:
    covers = 1.0 if sizes.own is None else sizes.vocabulary.covered
    return facts(blocks.net, kind, sizes.head.size, covers) | {"block": blocks.size}


def begin(net: BlockNet, source: Source) -> None:
    """Every layer starts as the target's last, the context as the last of the states."""
    for layer in net.layers:
        source.begin_layer(layer)
    source.begin(net.norm.weight, "model.norm.weight")
    with torch.no_grad():
        net.fc.weight.mul_(0.1)
        net.fc.weight[:, -source.hidden :] += torch.eye(source.hidden)
