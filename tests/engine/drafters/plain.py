"""Heads in plain torch, written from their papers (reference implementations for golden tests): float32, one sequence, nothing cached.

`mutant` names a mistake to make, so that tests can show that they would notice it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def mlp_stage(tensors: Tensors, config: dict[str, Any], i: int, token: Tensor, state: Tensor, mutant: str = "") -> Tensor:
    """MLPSpeculator (2404.19124): the state behind stage i, whose input token is `token`."""
    count, inner = config["n_predict"], config["inner_dim"] or config["emb_dim"]
    tied, deep = config.get("tie_weights", False), ".0" if "emb.0.0.weight" in tensors else ""
    own = 0 if tied else i
    keep = 0.5 ** (0.5 / count)
    alpha = math.sqrt((1 - keep**2) * (inner / 2)) / (1.0 if mutant == "weight" else keep)
    if i == 0 and config.get("scale_input") and mutant != "input norm":
        state = rms(state) / math.sqrt(2)
    name = f"proj.{min(i, 1) if tied else i}{deep}.weight"
    mixed = F.linear(state, tensors[name].float()) + alpha * tensors[f"emb.{own}{deep}.weight"].float()[token]
    norm = f"ln.{own}{deep}"
    normed = mixed if mutant == "norm" else rms(mixed, tensors[f"{norm}.weight"].float()) + tensors[f"{norm}.bias"].float()
    return F.gelu(normed)


def mlp_logits(tensors: Tensors, config: dict[str, Any], state: Tensor, tokens: list[int], mutant: str = "") -> list[Tensor]:
    """Logits [V] of every stage. state [H]: the newest row's final hidden state; `tokens`: the root, then what each stage chose."""
    if config.get("method") == "sum_lstm":
        return lstm_logits(tensors, config, state, tokens, mutant)
    found = []
    for i in range(config["n_predict"]):
        token = torch.tensor(tokens[max(0, i - 1) if mutant == "position" else i])
        state = mlp_stage(tensors, config, i, token, state.float(), mutant)
        found.append(F.linear(state, tensors[f"head.{0 if config.get('tie_weights') else i}.weight"].float()))
    return found


def lstm_logits(tensors: Tensors, config: dict[str, Any], state: Tensor, tokens: list[int], mutant: str = "") -> list[Tensor]:
    """Arctic's variant: one tied LSTM cell, fed with the root and then with its own choices."""
    count, inner = config["n_predict"], int(config["inner_dim"])
    keep = 0.5 ** (0.5 / count)
    alpha = math.sqrt((1 - keep**2) * (inner / 2)) / (1.0 if mutant == "weight" else keep)
    if config.get("scale_input") and mutant != "input norm":
        state = rms(state) / math.sqrt(2)
    cell = torch.zeros(inner)
    found = []

    def norm(name: str, x: Tensor) -> Tensor:
        return x if mutant == "norm" else rms(x, tensors[f"{name}.0.weight"]) + tensors[f"{name}.0.bias"]

    for i in range(count):
        token = tokens[max(0, i - 1) if mutant == "position" else i]
        z = alpha * tensors["forget_emb.0.weight"][token]
        f, r, w, g = (F.linear(state, tensors[f"{gate}_proj.{min(i, 1)}.weight"]) + z for gate in ("forget", "input", "output", "cell"))
        cell = torch.sigmoid(f) * cell + torch.sigmoid(r) * F.gelu(norm("cell_ln", g))
        state = torch.sigmoid(w) * F.gelu(norm("state_ln", cell))
        found.append(F.linear(state, tensors["head.0.weight"]))
    return found
