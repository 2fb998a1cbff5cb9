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


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [n, heads, D], half-split."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def block_hidden(tensors: Tensors, config: dict[str, Any], features: Tensor, root: int, table: Tensor, mutant: str = "") -> Tensor:
    """DFlash's backbone (2602.06036): the states [S, H] of a block behind n context tokens, from the target's features [n, taps · H].
    `config`: size, mask, layers, heads, kv_heads, dim, theta, eps, and for each layer a window (0 = none), causal, rooted."""
    n, size, eps = features.shape[0], config["size"], config["eps"]
    get = lambda name: tensors[f"{name}.weight"].float()  # noqa: E731
    if mutant == "tap order":
        width = features.shape[1] // config["taps"]
        features = torch.cat([features[:, width:], features[:, :width]], 1)
    context = F.linear(features.float(), get("fc"))
    context = context if mutant == "context norm" else rms(context, get("hidden_norm"), eps)
    x = table.float()[torch.tensor([root] + [config["mask"]] * (size - 1))]
    at, own = torch.arange(n), n + torch.arange(size) - int(mutant == "seeded early")
    for i in range(config["layers"]):
        name = lambda part: f"layers.{i}.{part}"  # noqa: B023, E731
        u = rms(x, get(name("input_layernorm")), eps)
        q = F.linear(u, get(name("self_attn.q_proj"))).view(size, config["heads"], config["dim"])
        source = torch.cat([context, x if mutant == "block keys" else u])
        k = F.linear(source, get(name("self_attn.k_proj"))).view(n + size, config["kv_heads"], config["dim"])
        v = F.linear(source, get(name("self_attn.v_proj"))).view(n + size, config["kv_heads"], config["dim"])
        if name("self_attn.q_norm.weight") in tensors:
            q = rms(q, get(name("self_attn.q_norm")), eps)
            k = k if mutant == "key norm" else rms(k, get(name("self_attn.k_norm")), eps)
        where = torch.cat([at + int(mutant == "context position"), own])
        q, k = turned(q, own, config["theta"]), turned(k, where, config["theta"])
        seen = torch.ones(size, n + size, dtype=torch.bool)
        window, causal, rooted = config["sights"][i]
        window += {"wider window": 1, "narrower window": -1}.get(mutant, 0) if window else 0
        place, mine = torch.arange(n + size), n + torch.arange(size)
        if window:
            seen &= (place >= n - window) if rooted else ((mine[:, None] - place).abs() < window)
        if causal != (mutant == "causal"):
            seen &= place <= mine[:, None]
        k, v = (each.repeat_interleave(config["heads"] // config["kv_heads"], 1) for each in (k, v))
        scores = torch.einsum("shd,thd->hst", q, k) * config["dim"] ** -0.5
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        x = x + F.linear(torch.einsum("hst,thd->shd", shares, v).flatten(1), get(name("self_attn.o_proj")))
        u = rms(x, get(name("post_attention_layernorm")), eps)
        x = x + F.linear(
            F.silu(F.linear(u, get(name("mlp.gate_proj")))) * F.linear(u, get(name("mlp.up_proj"))), get(name("mlp.down_proj"))
        )
    return x if mutant == "last norm" else rms(x, get("norm"), eps)


def spark_levels(
    tensors: Tensors, kind: str, hidden: Tensor, head: Tensor, tokens: list[int], mutant: str = ""
) -> tuple[list[Tensor], list[float]]:
    """DSpark's heads (2607.05147) over the rows that guess, hidden [places, H]: (logits of every place, confidences). `tokens`: the root
    and what was chosen, at the target's ids."""
    w1, w2 = (tensors.get(f"markov_head.markov_w{i}.weight") for i in (1, 2))
    state = torch.zeros(0 if w1 is None else w1.shape[1])
    levels, sure = [], []
    for k, h in enumerate(hidden):
        logits = F.linear(h, head.float())
        e = state
        if w1 is not None and w2 is not None:
            e = w1.float()[tokens[k + 1 if mutant == "shifted" and k + 1 < len(tokens) else k]]
            z = e
            if kind == "gated":
                z = (
                    torch.sigmoid(
                        F.linear(torch.cat([h, e]), tensors["markov_head.gate_proj.weight"], tensors["markov_head.gate_proj.bias"])
                    )
                    * e
                )
            if kind == "rnn":
                joint = F.linear(torch.cat([state, e, h]), tensors["markov_head.joint_proj.weight"], tensors["markov_head.joint_proj.bias"])
                g, c, o = joint.chunk(3)
                if mutant != "stateless":
                    state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
                z = torch.tanh(o)
            logits = logits + F.linear(z, w2.float())
        levels.append(logits)
        if "confidence_head.proj.weight" in tensors:
            weight, bias = tensors["confidence_head.proj.weight"].float()[0], tensors["confidence_head.proj.bias"].float()
            read = torch.cat([h, e]) if weight.shape[0] > h.shape[0] else h
            sure.append(float(torch.sigmoid(weight @ read + bias)))
    return levels, sure
