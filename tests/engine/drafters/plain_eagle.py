"""EAGLE's networks in plain torch over whole sequences, from the papers' and the repositories' description: what the drafter is held to."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.drafters.nets import HIDDEN, around
from tests.engine.tiny import VOCAB, TinyModel

EPS = 1e-5


class Golden:
    """The network over one sequence, in float64. `mutant`: what is wrong with it."""

    def __init__(self, folder: Path, variant: str, mutant: str = "", window: int = 0) -> None:
        self.w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.first = variant.startswith("first")
        self.at = "layers.{}." if variant not in ("plain", "biased") else "midlayer."
        self.normed_residual = self.carries_norm = variant.startswith(("speculators", "parallel"))
        self.layers = 2 if variant == "deepspec" else 1
        self.mutant, self.window = mutant, window
        target = TinyModel(around().backend)
        self.table = self.w.get("embed_tokens.weight", target.table.double())
        self.head = self.w.get("lm_head.weight", target.raw_head.double())
        self.ids = self.w["d2t"].long() + torch.arange(len(self.head)) if "d2t" in self.w else torch.arange(VOCAB)

    def norm(self, x: Tensor, name: str) -> Tensor:
        if self.mutant == f"no {name.rpartition('.')[2]}":
            return x
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.w[f"{name}.weight"]

    def logits(self, tokens: list[int], features: Tensor, path: list[int]) -> Tensor:
        """Behind the root (an empty path) or a guess: [V']."""
        features = features.double()
        if self.mutant == "layers":
            features = features.roll(HIDDEN, 1)
        if self.mutant == "feature":
            features = features.roll(1, 0)
        after = tokens[1:] if self.mutant != "token" else tokens[:-1]
        embedded = self.table[torch.tensor([*after, *path])]
        g = self.fuse(features)
        rows = g
        out = self.run(embedded[: len(rows)], rows)
        for _ in path:
            rows = torch.cat([rows, out[-1:]])
            out = self.run(embedded[: len(rows)], rows)
        hidden = out[-1:] if self.first or self.carries_norm else self.norm(out[-1:], "norm")
        return (hidden @ self.head.T)[0]

    def masked(self, tokens: list[int], features: Tensor, places: int, token: int = 90) -> list[Tensor]:
        """P-EAGLE: [V'] of each place behind the root, from one forward."""
        mask = self.w["mask_hidden"].reshape(1, -1)
        mask = mask if mask.shape[1] == HIDDEN else self.fuse(mask)
        token = token if self.mutant != "mask token" else token - 1
        embedded = self.table[torch.tensor([*tokens[1:], *[token] * (places - 1)])]
        rows = [self.fuse(features.double()), *[mask if self.mutant != "mask" else 0 * mask] * (places - 1)]
        return list((self.run(embedded, torch.cat(rows)) @ self.head.T)[len(features) - 1 :])

    def fuse(self, features: Tensor) -> Tensor:
        if self.first:
            return features
        if "fc_norm.0.weight" in self.w:
            parts = features.chunk(3, 1)
            features = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], 1)
        if "input_norm.weight" in self.w:
            features = self.norm(features, "input_norm")
        return features @ self.w["fc.weight"].T

    def run(self, e: Tensor, g: Tensor) -> Tensor:
        """What is carried on, for every row."""
        at = self.at.format(0)
        if self.first:
            x = torch.cat([e, g], 1) @ self.w["fc.weight"].T + self.w.get("fc.bias", torch.zeros(1))
            residual = x
        else:
            u = self.norm(g, f"{at}hidden_norm")
            x, residual = torch.cat([self.norm(e, f"{at}input_layernorm"), u], 1), u if self.normed_residual else g
        for layer in range(self.layers):
            at = self.at.format(layer)
            if layer:
                x = self.norm(residual, f"{at}input_layernorm")
            residual = residual + self.attention(x, at)
            x = self.norm(residual, f"{at}post_attention_layernorm")
            gate, up = x @ self.w[f"{at}mlp.gate_proj.weight"].T, x @ self.w[f"{at}mlp.up_proj.weight"].T
            residual = residual + (torch.nn.functional.silu(gate) * up) @ self.w[f"{at}mlp.down_proj.weight"].T
        return self.norm(residual, "norm") if self.carries_norm else residual

    def attention(self, x: Tensor, at: str) -> Tensor:
        n = len(x)
        q, k, v = (self.project(x, f"{at}self_attn.{part}_proj").view(n, -1, 16).transpose(0, 1) for part in "qkv")
        if f"{at}self_attn.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{at}self_attn.q_norm"), self.norm(k, f"{at}self_attn.k_norm")
        position = torch.arange(n).double() * (2 if self.mutant == "position" else 1)
        q, k = rotate(q, position), rotate(k, position)
        back = torch.arange(n)[:, None] - torch.arange(n)
        seen = (back >= 0) & ((back < self.window) if self.window else True)
        shares = (q @ k.transpose(1, 2) / 4).masked_fill(~seen, -torch.inf).softmax(-1)
        return (shares @ v).transpose(0, 1).reshape(n, -1) @ self.w[f"{at}self_attn.o_proj.weight"].T

    def project(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", torch.zeros(1))


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Half-split rotation of [heads, n, 16]."""
    angle = position[:, None] * 1e4 ** (-torch.arange(8).double() / 8)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
