"""Heads that have learned a few of the tiny target's answers, so that tests can see them accepted: matrices fitted by least squares to what
the target computes and says, in the public layouts. Not what training would make, but made in a moment."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Terms
from tests.engine.drafters.golden import HIDDEN, draw, write
from tests.engine.drafters.plain import mlp_stage
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


FOLDERS = {"medusa": write_medusa, "mlp": write_mlp}
"""Names for specs to put in braces, and what writes the folder."""
