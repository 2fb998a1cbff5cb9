"""A multi-token-prediction module: `forerun serve --speculator mtp=DIR` (DeepSeek-V3's layout, 2412.19437).

    x = W [enorm(embedding of token i + 1) ; hnorm(h_i)]        h_i: the target's state behind its final norm at token i
    y = one decoder layer of the target's own kind (x);   logits = output head of the target (shared_head.norm(y)), for token i + 2
    the next guess reads y in place of h

How it learns is `recursive.py`. Published modules are trained with their target; this one afterwards, and the target stays as it is.
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
from forerun.train.kinds.source import SharedHead, Source, facts, frequent, to_draft, write


class Ending(nn.Module):
    def __init__(self, source: Source) -> None:
        super().__init__()
        self.norm = Norm(source.hidden, source.eps)


class Net(nn.Module):
    """Parameter names are those of the checkpoint, behind `model.layers.L.`."""

    def __init__(self, source: Source, head: SharedHead) -> None:
        super().__init__()
        self.enorm, self.hnorm = Norm(source.hidden, source.eps), Norm(source.hidden, source.eps)
        self.eh_proj = linear(2 * source.hidden, source.hidden)
        self.input_layernorm = Norm(source.hidden, source.eps)
        self.self_attn = Attention(source, source.hidden)
        self.post_attention_layernorm = Norm(source.hidden, source.eps)
        self.mlp = Mlp(source.hidden, source.inner)
        self.shared_head = Ending(source)
        self.head = head

    def first(self, states: Tensor) -> Tensor:
        return states

    @property
    def attention(self) -> Attention:
        return self.self_attn

    def read(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(features)], -1))
        return x, self.input_layernorm(x)

    def made(self, residual: Tensor, seen: Tensor) -> Tensor:
        x = residual + self.attention.o_proj(seen)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(self.shared_head.norm(hidden))

    def best(self, hidden: Tensor) -> Tensor:
        return self.head.best(self.shared_head.norm(hidden))


class Mtp:
    def __init__(self, source: Source, net: Net, passes: Passes, vocab: int) -> None:
        self.net = net
        self._source = source
        self._vocab = vocab
        self.loss = passes.loss
        self.hits = passes.hits
        self.facts = facts(net, "mtp", vocab, 1.0)

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("the MTP module")
        group.add_argument("--vocab", type=int, default=8192, help="tokens that are learnt (default: %(default)s)")
        group.add_argument("--passes", type=int, default=3, help="guesses ahead that it learns (default: %(default)s)")
        parser.set_defaults(rate=1e-3)

    @staticmethod
    def open(asked: argparse.Namespace, setting: Setting) -> Mtp:
        if asked.passes < 1:
            raise ValueError(f"--passes {asked.passes} is none: use --passes 3")
        source = Source.open(setting.target)
        whole = source.head()
        vocabulary = frequent(setting, len(whole), asked.vocab)
        with torch.random.fork_rng():
            torch.manual_seed(setting.seed)
            net = Net(source, SharedHead(whole, torch.from_numpy(vocabulary.kept)))
        source.begin_layer(net)
        source.begin(net.shared_head.norm.weight, "model.norm.weight")
        with torch.no_grad():
            net.eh_proj.weight.mul_(0.1)
            net.eh_proj.weight[:, source.hidden :] += torch.eye(source.hidden)
        passes = Passes(net, setting.taps((source.layers,)), source.embedding(), to_draft(vocabulary), asked.passes)
        return Mtp(source, net, passes, vocabulary.vocab)

    def tensors(self) -> dict[str, Tensor]:
        return {f"model.layers.{self._source.layers}.{name}": value for name, value in self.net.state_dict().items()}

    def config(self) -> dict[str, Any]:
        """As it would lie in the target's own folder, behind its last layer; embedding and output head are the target's."""
        config = self._source.sizes() | {"architectures": ["LlamaForCausalLM"], "intermediate_size": self._source.inner}
        return config | {"num_hidden_layers": self._source.layers, "num_nextn_predict_layers": 1, "vocab_size": self._vocab}

    def save(self, folder: Path) -> None:
        write(folder, self.config(), self.tensors())
