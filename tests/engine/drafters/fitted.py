"""Heads that have learned a few of the tiny target's answers, so that tests can see them accepted: matrices fitted by least squares to what
the target computes and says, in the public layouts. Not what training would make, but made in a moment."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Terms
from forerun.train.kinds.grams import Grams
from forerun.train.shards import Record
from tests.engine.drafters.blocks import LAYOUTS, Layout, plain_config, target, tensors_of
from tests.engine.drafters.golden import HIDDEN, draw, write
from tests.engine.drafters.nets import write_eagle1, write_eagle3, write_mtp
from tests.engine.drafters.plain import block_hidden, mlp_stage
from tests.engine.drafters.plain_eagle import Golden
from tests.engine.test_identity import KINDS, prompt_of
from tests.engine.tiny import VOCAB, Front, Sequence_, params_for, tiny_engine

LEARNED = [(kind, seed, length) for kind in ("greedy", "temperature", "top-k") for seed, length in ((1, 21), (2, 5))]
"""requests whose answers are learned"""


class Listener:
    """Hears all and says nothing. For each row the tokens and the features at them."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.needs = Needs(layers=layers, most=1, lazy=False)
        self.tokens: list[int] = []
        self.features: list[Tensor] = []

    def absorb(self, commit: Commit) -> None:
        assert commit.features is not None
        self.tokens += commit.tokens[0]
        self.features.append(commit.features[0].clone())

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        return [Draft.none() for _ in rows]

    def forget(self, rows: list[int]) -> None:
        return None


@functools.cache
def heard(layers: tuple[int, ...]) -> list[tuple[list[int], Tensor, int]]:
    """Of each learned request: its tokens and the answer's, the target's features of these layers at all but the last, the prompt's
    length."""
    found = []
    for kind, seed, length in LEARNED:
        prompt = prompt_of(seed, length)
        listener = Listener(layers)
        front = Front(tiny_engine(listener))
        front.admit(sequence := Sequence_(prompt, params_for(prompt, **KINDS[kind])))
        front.run()
        found.append((prompt + sequence.tokens, torch.cat(listener.features), length))
    return found


def fit(inputs: Tensor, tokens: list[int]) -> Tensor:
    """[V, width]: logits that are high at the right token."""
    wanted = F.one_hot(torch.tensor(tokens), VOCAB).float() - 1 / VOCAB
    gram = inputs.T @ inputs + 1e-3 * len(tokens) * torch.eye(inputs.shape[1])
    return 12 * torch.linalg.solve(gram, inputs.T @ wanted).T.contiguous()


def examples(ahead: int) -> list[tuple[Tensor, list[int]]]:
    """(final hidden state at p, tokens at p + 1 … p + 1 + ahead) of the answers."""
    return [
        (features[p], tokens[p + 1 : p + 2 + ahead])
        for tokens, features, prompt in heard((2,))
        for p in range(prompt - 1, len(tokens) - 1 - ahead)
    ]


def write_medusa(folder: Path, heads: int = 3) -> Path:
    """Medusa-1's layout."""
    tensors: dict[str, Tensor] = {}
    for i in range(heads):
        weight, bias = draw(i, HIDDEN, HIDDEN, scale=0.4), draw(i + 9, HIDDEN, scale=0.4)
        states, tokens = zip(*examples(i + 1))
        x = torch.stack(states)
        tensors |= {f"{i}.0.linear.weight": weight, f"{i}.0.linear.bias": bias}
        tensors[f"{i}.1.weight"] = fit(x + F.silu(F.linear(x, weight, bias)), [each[-1] for each in tokens])
    return write(folder, tensors, {"medusa_num_heads": heads, "medusa_num_layers": 1}, "medusa_lm_head.safetensors")


def write_mlp(folder: Path, stages: int = 3, inner: int = 64) -> Path:
    """IBM's layout."""
    config = {"n_predict": stages, "emb_dim": HIDDEN, "inner_dim": inner, "vocab_size": VOCAB, "tie_weights": False, "scale_input": True}
    tensors: dict[str, Tensor] = {}
    seeds = iter(range(100))
    for i in range(stages):
        tensors[f"emb.{i}.weight"] = draw(next(seeds), VOCAB, inner, scale=0.4)
        tensors[f"proj.{i}.weight"] = draw(next(seeds), inner, inner if i else HIDDEN)
        tensors |= {f"ln.{i}.weight": torch.ones(inner), f"ln.{i}.bias": torch.zeros(inner)}
    for i in range(stages):
        states, wanted = [], []
        for state, tokens in examples(i + 1):
            for stage in range(i + 1):
                state = mlp_stage(tensors, config, stage, torch.tensor(tokens[stage]), state)
            states.append(state)
            wanted.append(tokens[-1])
        tensors[f"head.{i}.weight"] = fit(torch.stack(states), wanted)
    return write(folder, {f"speculator.{name}": value for name, value in tensors.items()}, config)


def write_fitted_eagle3(folder: Path, variant: str = "plain") -> Path:
    """A random network whose output head knows the answers."""
    write_eagle3(folder, variant)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    golden = Golden(folder, variant)
    states, wanted = [], []
    for tokens, features, _ in heard((-1, 0, 1) if variant == "plain" else (0, -1, 1)):
        pairs = len(tokens) - 2
        out = golden.run(golden.table[torch.tensor(tokens[1 : pairs + 1])], golden.fuse(features[:pairs].double()))
        states.append(out if golden.carries_norm else golden.norm(out, "norm"))
        wanted += tokens[2:]
    ids = torch.tensor(sorted({*wanted, *range(0, VOCAB, 3)}))
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    tensors |= {"lm_head.weight": fit(torch.cat(states).float(), wanted)[ids], "d2t": ids - torch.arange(len(ids)), "t2d": known}
    return write(folder, tensors, config | {"draft_vocab_size": len(ids)})


def write_dflash(folder: Path) -> Path:
    """Speculators' layout, which has an output head of its own: a random net, whose head is fitted to what its rows should say."""
    layout = dataclasses.replace(LAYOUTS["speculators"], config=LAYOUTS["speculators"].config | {"draft_vocab_size": VOCAB})
    tensors = tensors_of(dataclasses.replace(layout, reduced=False))
    tensors["lm_head.weight"] = fit(*blocks(layout, tensors))
    return write(folder, tensors | {"d2t": torch.zeros(VOCAB, dtype=torch.int64)}, layout.config)


def write_dspark(folder: Path) -> Path:
    """The same with a Markov head that knows which token follows which, and a confidence head that says 0.6 of everything."""
    layout = LAYOUTS["speculators, DSpark"]
    layout = dataclasses.replace(layout, config=layout.config | {"draft_vocab_size": VOCAB, "markov_rank": 64})
    tensors = tensors_of(dataclasses.replace(layout, reduced=False, markov=""))
    before = draw(3, VOCAB, 64)
    pairs = [pair for tokens, _, prompt in heard((2,)) for pair in itertools.pairwise(tokens[prompt - 1 :])]
    tensors["markov_head.markov_w1.weight"] = before
    tensors["markov_head.markov_w2.weight"] = fit(before[[first for first, _ in pairs]], [second for _, second in pairs])
    tensors["lm_head.weight"] = 0.3 * fit(*blocks(layout, tensors))
    tensors["confidence_head.proj.weight"] = torch.zeros(1, HIDDEN + 64)
    tensors["confidence_head.proj.bias"] = torch.tensor([0.4])
    return write(folder, tensors | {"d2t": torch.zeros(VOCAB, dtype=torch.int64)}, layout.config)


def blocks(layout: Layout, tensors: dict[str, Tensor], places: int = 3) -> tuple[Tensor, list[int]]:
    """(states of the first rows that guess, the tokens there) of blocks at every place of the answers."""
    states, wanted = [], []
    for tokens, features, prompt in heard(layout.taps):
        for root in range(prompt, len(tokens) - places):
            hidden = block_hidden(tensors, plain_config(layout), features[:root], tokens[root], target().table)
            states.append(hidden[not layout.anchor :][:places])
            wanted += tokens[root + 1 : root + 1 + places]
    return torch.cat(states), wanted


def write_grams(folder: Path) -> Path:
    """A table of what the target said, as its trainer counts."""
    records = [
        Record(number, 1, length, np.array(tokens, np.uint32), np.array(tokens[length:], np.uint32)[:, None], np.zeros((1, 1), np.float16))
        for number, (tokens, _, length) in enumerate(heard((2,)))
    ]
    Grams(records, VOCAB, 1).save(folder)
    return folder


FOLDERS = {
    "grams": write_grams,
    "medusa": write_medusa,
    "mlp": write_mlp,
    "eagle3": write_fitted_eagle3,
    "peagle": functools.partial(write_fitted_eagle3, variant="parallel"),
    "eagle1": write_eagle1,
    "mtp": write_mtp,
    "modules": functools.partial(write_mtp, modules=3),
    "dflash": write_dflash,
    "dspark": write_dspark,
}
"""Names for specs to put in braces, and what writes the folder."""
