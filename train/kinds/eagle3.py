"""An EAGLE-3 head: `forerun serve --speculator eagle=DIR` (Li et al. 2503.01840).

    row i      reads the target's hidden states at token i (three layers) and token i + 1, and guesses token i + 2
    pass 0     every row of the text, from the target's states
    pass j     row i reads what the head itself made of row i − 1 in pass j − 1: it guesses as the (j + 1)-th guess of a draft that began
               j rows before it, and sees of the rows between what that draft would have made, of older ones what pass 0 made

Training through these passes is the paper's training-time test: the head learns from its own errors. The draft vocabulary is a part of the
target's (`d2t`, `t2d`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forerun.train.kinds.flat import Flat, distilled
from forerun.train.kinds.nets import Attention, Mlp, Norm, linear
from forerun.train.kinds.registry import Setting
from forerun.train.kinds.source import Source, facts, frequent, to_draft, write
from forerun.train.shards import Record
from forerun.train.vocabulary import Vocabulary

FADE = 0.8
"""weight of each further pass"""
Entries = tuple[Tensor, Tensor]


def taps_of(layers: int) -> tuple[int, ...]:
    """The layers behind which the states are taken: an early, a middle and a late one, as published heads do."""
    return tuple(sorted({min(1, layers - 1), max(layers // 2 - 1, 0), max(layers - 4, 0)}))


class Midlayer(nn.Module):
    def __init__(self, source: Source, inner: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(source.hidden, source.eps)
        self.hidden_norm = Norm(source.hidden, source.eps)
        self.post_attention_layernorm = Norm(source.hidden, source.eps)
        self.self_attn = Attention(source, 2 * source.hidden)
        self.mlp = Mlp(source.hidden, inner)


class Net(nn.Module):
    """Parameter names are those of the checkpoint."""

    def __init__(self, source: Source, taps: int, inner: int, vocab: int) -> None:
        super().__init__()
        self.fc = linear(taps * source.hidden, source.hidden)
        self.midlayer = Midlayer(source, inner)
        self.norm = Norm(source.hidden, source.eps)
        self.lm_head = linear(source.hidden, vocab)

    def layer(self, embedded: Tensor, features: Tensor, rows: Sequence[tuple[int, int]], before: list[Entries]) -> Tensor:
        """One pass: embedded, features [n, H] → [n, H]. `rows`: of each text; `before`: the entries of the passes before this, to which its
        own are added."""
        middle = self.midlayer
        x = torch.cat([middle.input_layernorm(embedded), middle.hidden_norm(features)], -1)
        positions = torch.cat([torch.arange(last - first) for first, last in rows])
        q = middle.self_attn.queries(x, positions)
        before.append(middle.self_attn.entries(x, positions))
        seen = [self._attend(q[first:last], first, last, before) for first, last in rows]
        x = features + middle.self_attn.o_proj(torch.cat(seen))
        out: Tensor = x + middle.mlp(middle.post_attention_layernorm(x))
        return out

    def _attend(self, q: Tensor, first: int, last: int, passes: list[Entries]) -> Tensor:
        """Pass 0 up to the row where the draft began, then one entry of each later pass: pass i's lies j − i rows before the row."""
        j = len(passes) - 1
        keys, values = (part[first:last] for part in passes[0])
        seen = torch.ones(last - first, last - first, dtype=torch.bool).tril(-j)
        seen[:j, 0] = True  # rows too early for this pass are never looked at, but must not be a softmax over nothing
        extra = [(torch.roll(k[first:last], j - i, 0), torch.roll(v[first:last], j - i, 0)) for i, (k, v) in enumerate(passes) if i]
        return self.midlayer.self_attn.over(q, keys, values, seen, extra)


class Eagle3:
    """`vocabulary`: the tokens it can guess. `passes`: guesses ahead that it learns."""

    def __init__(self, source: Source, net: Net, setting: Setting, vocabulary: Vocabulary, passes: int, inner: int) -> None:
        self.net = net
        self._source, self._vocabulary, self._passes, self._inner = source, vocabulary, passes, inner
        self._layers = taps_of(source.layers)
        self._taps = setting.taps(self._layers)
        self._embedding = source.embedding()
        self._to_draft = to_draft(vocabulary)
        self.facts = facts(net, "eagle", len(vocabulary.kept), vocabulary.covered) | {"passes": passes}

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("the EAGLE-3 head")
        group.add_argument("--vocab", type=int, default=8192, help="tokens that it can guess (default: %(default)s)")
        group.add_argument("--inner", type=int, default=0, help="width of its MLP (default: the target's)")
        group.add_argument("--passes", type=int, default=3, help="guesses ahead that it learns (default: %(default)s)")
        parser.set_defaults(rate=1e-3)

    @staticmethod
    def open(asked: argparse.Namespace, setting: Setting) -> Eagle3:
        source = Source.open(setting.target)
        if asked.passes < 1:
            raise ValueError(f"--passes {asked.passes} is none: use --passes 3")
        head = source.head()
        vocabulary = frequent(setting.target, list(setting.text), len(head), asked.vocab)
        inner = asked.inner or source.inner
        with torch.random.fork_rng():
            torch.manual_seed(setting.seed)
            net = Net(source, len(taps_of(source.layers)), inner, len(vocabulary.kept))
        _begin(net, source, head[torch.from_numpy(vocabulary.kept)])
        return Eagle3(source, net, setting, vocabulary, asked.passes, inner)

    def loss(self, batch: Sequence[Record]) -> Tensor:
        flat = Flat.of(batch)
        loss = torch.zeros(())
        for number, (hidden, goal) in enumerate(self._run(batch, flat, self._passes)):
            places = (goal >= 0).nonzero().flatten()
            logits = self.net.lm_head(self.net.norm(hidden[places]))
            rows = goal[places]
            loss = loss + FADE**number * distilled(logits, self._to_draft[flat.candidates[rows]], flat.logprobs[rows])
        return loss / sum(FADE**number for number in range(self._passes))

    def hits(self, record: Record, depth: int) -> NDArray[np.bool_]:
        """Pass d of the row before place p + d − 1 is guess d + 1 of a draft that starts at place p."""
        right = np.zeros((record.generated, depth), bool)
        with torch.inference_mode():
            flat = Flat.of([record])
            for d, (hidden, _) in enumerate(self._run([record], flat, depth)):
                first = record.prompt - 2 + d
                if first >= hidden.shape[0]:
                    break
                guesses = self.net.lm_head(self.net.norm(hidden[max(first, 0) : -1])).argmax(-1)
                held = guesses == self._to_draft[flat.tokens[max(first, 0) + 2 :]]
                skipped = max(0, -first)
                right[skipped : skipped + len(held), d] = held.numpy()
        return right

    def save(self, folder: Path) -> None:
        """The public EAGLE-3 layout. Its layer ids count what enters a layer."""
        kept = torch.from_numpy(self._vocabulary.kept)
        known = torch.zeros(self._vocabulary.vocab, dtype=torch.bool)
        known[kept] = True
        tensors = dict(self.net.state_dict()) | {"d2t": kept - torch.arange(len(kept)), "t2d": known}
        config = {"architectures": ["LlamaForCausalLMEagle3"]} | self._source.sizes()
        config |= {"intermediate_size": self._inner, "num_hidden_layers": 1, "vocab_size": self._vocabulary.vocab}
        config |= {"draft_vocab_size": len(kept), "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self._layers]}
        write(folder, config, tensors)

    def _run(self, batch: Sequence[Record], flat: Flat, passes: int) -> list[tuple[Tensor, Tensor]]:
        """For each pass what the head makes of all rows [n, H], and the goal of each row, −1 where it has none. Row k of a text is about
        its tokens k and k + 1; the last row of each text guesses beyond its end."""
        embedded, features, goals, rows, at = [], [], [], [], 0
        for (first, last, _), states in zip(flat.segments(), self._taps.read(batch)):
            embedded.append(self._embedding[flat.tokens[first + 1 : last]])
            features.append(states[:-1])
            goals.append(torch.cat([flat.goal[first + 2 : last], torch.tensor([-1])]))
            rows.append((at, at + last - first - 1))
            at += last - first - 1
        tokens, goal = torch.cat(embedded), torch.cat(goals)
        firsts = torch.tensor([first for first, _ in rows])
        before = torch.arange(-1, at - 1)
        before[firsts] = firsts
        hidden = self.net.fc(torch.cat(features))
        entries: list[Entries] = []
        made: list[tuple[Tensor, Tensor]] = []
        for number in range(passes):
            hidden = self.net.layer(tokens, hidden if not number else hidden[before], rows, entries)
            made.append((hidden, goal.clone()))
            for (first, last), prompt in zip(rows, flat.prompts):  # a draft of the next pass began at least so many rows before
                goal[first : min(last, first + max(prompt - 2, 0) + number + 1)] = -1
        return made


def _begin(net: Net, source: Source, head: Tensor) -> None:
    """From the target's last layer: the hidden half reads as that layer does, the embedding half is small at first."""
    layer = f"model.layers.{source.layers - 1}."
    for name, parameter in net.midlayer.mlp.named_parameters():
        source.begin(parameter, f"{layer}mlp.{name}")
    for name in "qkv":
        source.begin(getattr(net.midlayer.self_attn, f"{name}_proj").weight[:, source.hidden :], f"{layer}self_attn.{name}_proj.weight")
    source.begin(net.midlayer.self_attn.o_proj.weight, f"{layer}self_attn.o_proj.weight")
    source.begin(net.midlayer.post_attention_layernorm.weight, f"{layer}post_attention_layernorm.weight")
    source.begin(net.midlayer.hidden_norm.weight, f"{layer}input_layernorm.weight")
    source.begin(net.norm.weight, "model.norm.weight")
    with torch.no_grad():
        net.lm_head.weight.copy_(head)
        net.fc.weight.mul_(0.1)
        net.fc.weight[:, -source.hidden :] += torch.eye(source.hidden)
