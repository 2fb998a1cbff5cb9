"""The EAGLE-3 head as it is trained, against a draft that is made step by step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from forerun.train.kinds.eagle3 import Eagle3
from forerun.train.kinds.registry import open_kind
from tests.train.kinds import asked, setting, texts

SMALL = ["--vocab", "300", "--passes", "2"]


class Plain:
    """The head of a saved folder, one row at a time: the equations, without batches or masks."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.at = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
        self.config = json.loads((folder / "config.json").read_text())
        self.embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"].float()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.config["rms_norm_eps"]).sqrt() * self.at[f"{name}.weight"]

    def rotated(self, x: Tensor, position: int) -> Tensor:
        half = self.config["head_dim"] // 2
        angle = position * self.config["rope_theta"] ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def step(self, token: int, feature: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The layer's output at the position behind those of `keys`, to which its own entry is added."""
        at = self.at
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        x = torch.cat([self.norm(self.embedding[token], "midlayer.input_layernorm"), self.norm(feature, "midlayer.hidden_norm")])
        q, k, v = (at[f"midlayer.self_attn.{name}_proj.weight"] @ x for name in "qkv")
        keys.append(self.rotated(k.view(kv, -1), len(keys)))
        values.append(v.view(kv, -1))
        q = self.rotated(q.view(heads, -1), len(keys) - 1)
        out = []
        for head in range(heads):
            group = head // (heads // kv)
            weight = torch.softmax(torch.stack([key[group] @ q[head] for key in keys]) * q.shape[1] ** -0.5, 0)
            out.append(weight @ torch.stack([value[group] for value in values]))
        x = feature + at["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)
        y = self.norm(x, "midlayer.post_attention_layernorm")
        gate, up = (at[f"midlayer.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        return x + at["midlayer.mlp.down_proj.weight"] @ (functional.silu(gate) * up)

    def draft(self, tokens: list[int], states: Tensor, depth: int) -> list[int]:
        """Target ids guessed behind `tokens`, whose states are known but for the newest."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for row in range(len(tokens) - 1):
            hidden = self.step(tokens[row + 1], self.at["fc.weight"] @ states[row], keys, values)
        found = []
        for _ in range(depth):
            guess = int((self.at["lm_head.weight"] @ self.norm(hidden, "norm")).argmax())
            found.append(guess + int(self.at["d2t"][guess]))
            hidden = self.step(found[-1], hidden, keys, values)
        return found


def test_hits_are_those_of_drafts_made_one_by_one(folder: Path, tmp_path: Path) -> None:
    """Also whether they hold is not known in advance: some texts are made of the head's own guesses."""
    world = setting(folder)
    head = open_kind("eagle3", asked("eagle3", SMALL), world)
    head.save(tmp_path)
    for name, value in load_file(tmp_path / "model.safetensors").items():
        if value.is_floating_point():  # measure what was saved, rounding included
            head.net.state_dict()[name].copy_(value)
    plain = Plain(tmp_path, folder)
    held = 0
    for record in texts(3):
        tokens = record.tokens.tolist()
        (states,) = world.taps((0, 1)).read([record])
        for place in range(1, 4):  # the text says what the head guesses there
            at = record.prompt + 2 * place
            tokens[at : at + 2] = plain.draft(tokens[:at], states, 2)
            record.tokens[:] = np.array(tokens, np.uint32)
            (states,) = world.taps((0, 1)).read([record])
        hits = head.hits(record, 3)
        for place in range(1, record.generated):
            at = record.prompt + place
            draft = plain.draft(tokens[:at], states, 3)
            expected = [guess == token for guess, token in zip(draft, tokens[at:])]
            for depth in range(len(expected)):
                if all(expected[:depth]):
                    assert hits[place, depth] == expected[depth], (place, depth)
                    held += expected[depth]
    assert held > 6


def test_the_folder_has_the_public_layout(folder: Path, tmp_path: Path) -> None:
    head = open_kind("eagle3", asked("eagle3", SMALL), setting(folder))
    head.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] == 300 and config["vocab_size"] == 512 and config["num_hidden_layers"] == 1
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert tensors["fc.weight"].shape == (64, 2 * 64) and tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool and int(tensors["t2d"].sum()) == 300
    targets = tensors["d2t"] + torch.arange(300)
    assert torch.equal(targets, tensors["t2d"].nonzero().flatten())
    floating = [value for value in tensors.values() if value.is_floating_point()]
    assert all(value.dtype == torch.bfloat16 for value in floating)


def test_it_learns_each_guess_of_a_draft(folder: Path) -> None:
    """On one text, until it knows it by heart: the first guess and those that it makes of its own guesses."""
    world = setting(folder)
    head: Eagle3 = open_kind("eagle3", asked("eagle3", SMALL), world)  # type: ignore[assignment]
    batch = texts(2)
    optimizer = torch.optim.AdamW(head.net.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        torch.autograd.backward(head.loss(batch))
        optimizer.step()
    hits = np.concatenate([head.hits(record, 2)[1:-1] for record in batch])
    assert hits[:, 0].mean() > 0.9 and hits.all(1).mean() > 0.8
