"""An EAGLE-3 head: `forerun serve --speculator eagle=DIR` (Li et al. 2503.01840).

How it learns is `recursive.py`. The draft vocabulary is a part of the target's (`d2t`, `t2d`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.train.kinds.nets import Attention, Mlp, Norm, linear
from forerun.train.kinds.recursive import Passes
from forerun.train.kinds.registry import Setting
from forerun.train.kinds.source import Source, drafted, facts, reduction, to_draft, write
from forerun.train.vocabulary import Vocabulary


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

    def __init__(self, source: Source, taps: int, inner: int, kept: Tensor) -> None:
        super().__init__()
        self.kept = kept
        self.fc = linear(taps * source.hidden, source.hidden)
        self.midlayer = Midlayer(source, inner)
        self.norm = Norm(source.hidden, source.eps)
        self.lm_head = linear(source.hidden, len(kept))

    def first(self, states: Tensor) -> Tensor:
        out: Tensor = self.fc(states)
        return out

    @property
    def attention(self) -> Attention:
        return self.midlayer.self_attn

    def read(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        return features, torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(features)], -1)

    def made(self, residual: Tensor, seen: Tensor) -> Tensor:
        x = residual + self.attention.o_proj(seen)
        out: Tensor = x + self.midlayer.mlp(self.midlayer.post_attention_layernorm(x))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def best(self, hidden: Tensor) -> Tensor:
        return self.kept[self.logits(hidden).argmax(-1)]


class Eagle3:
    """`vocabulary`: the tokens it can guess. `passes`: guesses ahead that it learns."""

    def __init__(self, source: Source, net: Net, setting: Setting, vocabulary: Vocabulary, passes: int, inner: int) -> None:
        self.net = net
        self._source, self._vocabulary, self._inner = source, vocabulary, inner
        self._layers = taps_of(source.layers)
        self._passes = Passes(net, setting.taps(self._layers), source.embedding(), to_draft(vocabulary), passes)
        self.loss = self._passes.loss
        self.hits = self._passes.hits
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
        vocabulary = drafted(setting, len(head), asked.vocab)
        inner = asked.inner or source.inner
        with torch.random.fork_rng():
            torch.manual_seed(setting.seed)
            net = Net(source, len(taps_of(source.layers)), inner, torch.from_numpy(vocabulary.kept))
        _begin(net, source, head[net.kept])
        return Eagle3(source, net, setting, vocabulary, asked.passes, inner)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.net.state_dict()) | reduction(self.net.kept, self._vocabulary.vocab)

    def config(self) -> dict[str, Any]:
        """The public EAGLE-3 layout. Its layer ids count what enters a layer."""
        config = {"architectures": ["LlamaForCausalLMEagle3"]} | self._source.sizes()
        config |= {"intermediate_size": self._inner, "num_hidden_layers": 1, "vocab_size": self._vocabulary.vocab}
        return config | {"draft_vocab_size": len(self.net.kept), "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self._layers]}

    def save(self, folder: Path) -> None:
        write(folder, self.config(), self.tensors())


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
