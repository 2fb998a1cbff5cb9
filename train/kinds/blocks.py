"""What block drafters share (`dflash.py`, `dspark.py`): a block of guesses in one forward, learnt at many roots of a text at once.

context    RMSNorm(W [states of some layers]) at every token: each layer makes keys and values of it, nothing else
block      embeddings of (root, mask, mask, …) at the root's place and behind it: each row sees all context before the root and the
           whole block

           context 0 … root−1    root  mask  mask
  root     ■ ■ ■ ■ ■ ■ ■ ■        ■     ■     ■       the blocks of a text share its context's keys and values, and no block sees
  mask     ■ ■ ■ ■ ■ ■ ■ ■        ■     ■     ■       another; linear layers read the blocks of all texts of a batch at once
  mask     ■ ■ ■ ■ ■ ■ ■ ■        ■     ■     ■
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forerun.train.kinds.flat import Flat
from forerun.train.kinds.nets import Attention, Mlp, Norm, linear
from forerun.train.kinds.registry import Setting
from forerun.train.kinds.source import Head, OwnHead, SharedHead, Source, drafted, facts, frequent, reduction, to_draft
from forerun.train.shards import Record
from forerun.train.taps import Taps
from forerun.train.vocabulary import Vocabulary

FADE_PLACES = 4.0
"""a guess counts e times less so many places further on"""
CONTEXT = 5.0
"""size of the normed values that a layer's keys and values are made of, at first. Larger ones are learnt from in larger steps: AdamW's are
of one size for all weights"""
HANDED_ON = 2.0
"""by which values and their results are multiplied in the first layer: 5 · 2 · 2 is the usual size of a late state"""
MEASURED = 128
"""roots whose blocks are computed side by side when acceptance is measured"""


def layers_of(count: int, layers: int) -> tuple[int, ...]:
    """`count` target layers, evenly spread as published drafts have them."""
    found = [layers // 2] if count == 1 else [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    return tuple(sorted({min(max(layer, 0), layers - 2) for layer in found}))


class Texts(NamedTuple):
    """Where the rows of a batch stand. `lengths`: known tokens of each text, all but its last; `roots`: of each text, places [a] at which
    its blocks begin; `size`: rows of a block. In what is flat, texts and blocks lie one behind the other."""

    lengths: list[int]
    roots: list[Tensor]
    size: int

    def known(self) -> Tensor:
        """[t]: the positions of all known tokens."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    def guessed(self) -> Tensor:
        """[r]: the positions of all rows of blocks."""
        return (torch.cat(self.roots)[:, None] + torch.arange(self.size)).flatten()

    def parts(self, context: Sequence[Tensor], rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor]]]:
        """For each text its roots [a], its part of each [t, …] and its part of each [r, …] as [a, S, …]."""
        counts = [len(roots) * self.size for roots in self.roots]
        known = zip(*(torch.split(part, self.lengths) for part in context))
        own = zip(*(torch.split(part, counts) for part in rows))
        for roots, of_text, of_blocks in zip(self.roots, known, own):
            yield roots, list(of_text), [part.view(len(roots), self.size, *part.shape[1:]) for part in of_blocks]


class Layer(nn.Module):
    """`window`: places of the context before the root that its blocks see, 0 = all."""

    def __init__(self, source: Source, inner: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.input_layernorm = Norm(source.hidden, source.eps)
        self.self_attn = Attention(source, source.hidden, head_norms=True)
        self.post_attention_layernorm = Norm(source.hidden, source.eps)
        self.mlp = Mlp(source.hidden, inner)

    def forward(self, x: Tensor, context: Tensor, texts: Texts) -> Tensor:
        """x [r, H] of blocks, context [t, H] → [r, H]."""
        read, positions, attention = self.input_layernorm(x), texts.guessed(), self.self_attn
        before = attention.entries(context, texts.known())
        rows = attention.queries(read, positions), *attention.entries(read, positions)
        seen = [attention.over_blocks(own, known, roots, self.window) for roots, known, own in texts.parts(before, rows)]
        x = x + attention.o_proj(torch.cat(seen))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class BlockNet(nn.Module):
    """Parameter names are those of the checkpoint. `draws`: how often roots were drawn, so that a run that goes on draws the next ones."""

    draws: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        source = sizes.source
        self.fc = linear(len(sizes.taps) * source.hidden, source.hidden)
        self.hidden_norm = Norm(source.hidden, source.eps)
        self.layers = nn.ModuleList(Layer(source, sizes.inner, window) for window in sizes.windows)
        self.norm = Norm(source.hidden, source.eps)
        if sizes.own is not None:
            self.lm_head = sizes.own
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))

    def block(self, states: Tensor, inputs: Tensor, texts: Texts) -> Tensor:
        """states [t, taps · H] of all texts; inputs [A, S, H]: embeddings of all blocks → [A, S, H], behind the last norm."""
        context = self.hidden_norm(self.fc(states))
        x = inputs.flatten(0, 1)
        for layer in self.layers:
            x = layer(x, context, texts)
        out: Tensor = self.norm(x).view_as(inputs)
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

    def drawn(self, batch: Sequence[Record]) -> tuple[list[Tensor], Tensor]:
        """The drawn roots [a] of each text, and all blocks' rows that guess [A, guesses, H]."""
        self.net.draws += 1
        roots = [torch.from_numpy(self._draw(record)) for record in batch]
        return roots, self.rows(self._taps.read(batch), batch, roots)

    def _draw(self, record: Record) -> NDArray[np.int64]:
        """The first token of an answer comes with its prompt, and behind the last there is nothing to guess."""
        dice = np.random.default_rng([self._seed, int(self.net.draws), record.number])
        return np.sort(dice.permutation(np.arange(record.prompt, len(record.tokens) - 1))[: self._roots])

    def every(self, record: Record) -> Iterator[tuple[Tensor, Tensor]]:
        """For measuring: roots in portions, and the blocks' rows that guess."""
        states = self._taps.read([record])
        for roots in torch.split(torch.arange(max(record.prompt - 1, 1), len(record.tokens) - 1), MEASURED):
            yield roots, self.rows(states, [record], [roots])

    def rows(self, states: Sequence[Tensor], batch: Sequence[Record], roots: list[Tensor]) -> Tensor:
        tokens = torch.cat([torch.from_numpy(record.tokens.astype(np.int64))[at] for record, at in zip(batch, roots)])
        masks = self._embedding[self._mask].expand(len(tokens), self.size - 1, -1)
        inputs = torch.cat([self._embedding[tokens][:, None], masks], 1)
        texts = Texts([len(known) for known in states], roots, self.size)
        return self.net.block(torch.cat(list(states)), inputs, texts)[:, self.first :]


class Aims(NamedTuple):
    """Guesses that have something to aim at, [n] each: the block, the place in it (from 0), the row of `candidates` that says what could
    stand there, and the token before."""

    block: Tensor
    place: Tensor
    goal: Tensor
    before: Tensor

    @classmethod
    def of(cls, flat: Flat, roots: Sequence[Tensor], guesses: int) -> Aims:
        """`roots` [a] of each text."""
        segments = list(zip(flat.segments(), roots))
        aimed = torch.cat([first + at + 1 for (first, _, _), at in segments])[:, None] + torch.arange(guesses)
        ends = torch.cat([torch.full((len(at),), last) for (_, last, _), at in segments])[:, None]
        goal = flat.goal[aimed.clamp(max=len(flat.goal) - 1)].masked_fill(aimed >= ends, -1)
        block, place = (goal >= 0).nonzero(as_tuple=True)
        return cls(block, place, goal[block, place], flat.tokens[aimed[block, place] - 1])


def faded(each: Tensor, place: Tensor) -> Tensor:
    """The mean of [n], where a guess at `place` [n] of its block counts exp(−place / FADE_PLACES). 0 where there is none."""
    share = torch.exp(-place / FADE_PLACES)
    return (share * each).sum() / share.sum().clamp(min=1e-9)


def block_options(group: argparse._ArgumentGroup, size: int) -> None:
    group.add_argument("--block", type=int, default=size, help="rows of a block (default: %(default)s)")
    group.add_argument("--draft-layers", type=int, default=2, help="layers of the drafter (default: %(default)s)")
    group.add_argument("--states", type=int, default=3, help="target layers whose states it reads (default: %(default)s)")
    group.add_argument("--roots", type=int, default=24, help="blocks that are learnt of each text in a step (default: %(default)s)")
    group.add_argument("--mask-token", type=int, default=-1, help="id that stands for a token to be guessed (default: the target's last)")
    group.add_argument("--vocab", type=int, default=8192, help="tokens that are learnt (default: %(default)s)")
    group.add_argument("--reduced", action="store_true", help="guess these alone, with an output head of its own: much cheaper to ask")
    group.add_argument("--inner", type=int, default=0, help="width of its MLPs (default: the target's)")
    group.add_argument("--kv-heads", type=int, default=0, help="heads of its keys and values (default: the target's)")
    group.add_argument("--window", type=int, default=0, help="places before the root that its first layer sees (default: 0, all of them)")


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What a block drafter is made of. `own`: its output head, if it is not the target's; `to_draft` [V]: the place of each target token
    among those that are learnt, −1 = none; `windows`: of each layer, 0 = it sees all."""

    source: Source
    vocabulary: Vocabulary
    head: Head
    own: OwnHead | None
    taps: tuple[int, ...]
    mask: int
    inner: int
    windows: tuple[int, ...]
    to_draft: Tensor

    @classmethod
    def open(cls, asked: argparse.Namespace, setting: Setting) -> Sizes:
        """ValueError for sizes that make no drafter."""
        for name, least in (("block", 2), ("draft_layers", 1), ("states", 1), ("roots", 1), ("window", 0)):
            if getattr(asked, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(asked, name)} is too small: use {least} or more")
        target = Source.open(setting.target)
        kv_heads = asked.kv_heads or target.kv_heads
        if kv_heads < 1 or target.heads % kv_heads:
            raise ValueError(f"--kv-heads {kv_heads} does not divide the target's {target.heads} heads: use {target.heads}")
        if asked.window and not asked.reduced:
            raise ValueError("--window is written in speculators' layout, which has an output head of its own: give --reduced too")
        source, whole = dataclasses.replace(target, kv_heads=kv_heads), target.head()
        if asked.mask_token >= len(whole):
            raise ValueError(f"--mask-token {asked.mask_token} is no token: the target has {len(whole)}")
        choose = drafted if asked.reduced else frequent
        vocabulary = choose(setting, len(whole), asked.vocab)
        kept = torch.from_numpy(vocabulary.kept)
        own = OwnHead(whole, kept) if asked.reduced else None
        head = SharedHead(whole, kept) if own is None else own
        mask = asked.mask_token if asked.mask_token >= 0 else len(whole) - 1
        taps, inner = layers_of(asked.states, source.layers), asked.inner or source.inner
        windows = (asked.window, *[0] * (asked.draft_layers - 1))
        return cls(source, vocabulary, head, own, taps, mask, inner, windows, to_draft(vocabulary))

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
            "transformer_layer_config": self.config(blocks) | self._sliding(),
            "sliding_window_non_causal": True,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in self.taps],
            "block_size": blocks.size,
            "mask_token_id": self.mask,
            "draft_vocab_size": self.head.size,
            "sample_from_anchor": blocks.shift == 1,
        }

    def _sliding(self) -> dict[str, Any]:
        if not any(self.windows):
            return {}
        types = ["sliding_attention" if window else "full_attention" for window in self.windows]
        return {"layer_types": types, "sliding_window": max(self.windows), "use_sliding_window": True}

    def reduction(self) -> dict[str, Tensor]:
        return {} if self.own is None else reduction(torch.from_numpy(self.vocabulary.kept), self.vocabulary.vocab)


def block_facts(kind: str, sizes: Sizes, blocks: Blocks) -> dict[str, Any]:
    covers = 1.0 if sizes.own is None else sizes.vocabulary.covered
    return facts(blocks.net, kind, sizes.head.size, covers) | {"block": blocks.size}


def hold(right: NDArray[np.bool_], record: Record, roots: Tensor, guesses: Tensor) -> None:
    """Marks the guesses [a, g] behind these roots that are the tokens of the text."""
    tokens = record.tokens.astype(np.int64)
    for root, guessed in zip(roots.tolist(), guesses.numpy()):
        place = root + 1 - record.prompt
        count = min(right.shape[1], len(guessed), len(tokens) - root - 1)
        right[place, :count] = guessed[:count] == tokens[root + 1 : root + 1 + count]


def begin(net: BlockNet, source: Source) -> None:
    """The context begins as the last of the states; every layer as the target's last, its keys and values repeated where there are more
    heads of them. With as many of these as query heads, the first layer hands on what it sees, of the size that it has in the target:
    the rows begin as a mixture of the states before the root and the embeddings of the block."""
    with torch.no_grad():
        net.fc.weight.mul_(0.1)
        net.fc.weight[:, -source.hidden :] += torch.eye(source.hidden)
        net.hidden_norm.weight.fill_(CONTEXT)
        source.begin(net.norm.weight, "model.norm.weight")
        layers = cast("list[Layer]", list(net.layers))
        for layer in layers:
            source.begin_layer(layer)
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.weight.mul_(layer.input_layernorm.weight / CONTEXT)
            layer.input_layernorm.weight.fill_(CONTEXT)
        first = layers[0]
        if source.kv_heads == source.heads:
            for projection in (first.self_attn.v_proj, first.self_attn.o_proj):
                nn.init.eye_(projection.weight).mul_(HANDED_ON)
            first.input_layernorm.weight.fill_(1.0)
