"""MTP modules against an independent implementation in plain torch, in every layout; and the trial of what files do not say."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from forerun.engine.drafters import mtp_trial
from forerun.engine.drafters.mtp_trial import Way, choose
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.errors import StartError
from tests.engine.drafters.nets import LATENT, MIXTURE, around, layout_of, told, write, write_mtp
from tests.engine.drafters.plain_eagle import EPS, Golden, rotate
from tests.engine.drafters.test_eagle import Heard, in_parts
from tests.engine.tiny import VOCAB, TinyModel

FAMILIES = ("deepseek", "mimo", "qwen", "latent", "gated", "accompanied", "fused")
MODULES = {"deepseek": (Way(chained=True), Way(pre=True, normed=True, chained=True), Way(chained=False))}
MODULES |= {"mimo": (Way(hidden_first=True, normed=True, chained=False),), "qwen": (Way(normed=True, chained=True),)}
"""family → the ways in which several of its modules are read here"""


class PlainMtp(Golden):
    """The module over one sequence, in float64."""

    def __init__(self, folder: Path, family: str, way: Way, mutant: str = "", place: int = 0) -> None:
        self.family, self.way, self.mutant, self.window = family, way, mutant, 0
        self.prefix, self.inside, self.project_name, self.names = layout_of(family, place)
        stored = load_file(folder / "model.safetensors")
        self.w = {name.removeprefix(self.prefix): tensor.double() for name, tensor in stored.items() if name.startswith(self.prefix)}
        target = TinyModel(around().backend)
        self.table = target.table.double()
        self.head = self.w.get("shared_head.head.weight", target.raw_head.double())
        self.first, self.carries_norm = False, way.normed

    def norm(self, x: Tensor, name: str) -> Tensor:
        if self.mutant == f"no {name.rpartition('.')[2]}":
            return x
        weight = self.w[f"{name}.weight"] + (1.0 if self.project_name == "fc" and self.mutant != "no offset" else 0.0)
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight

    def logits(self, tokens: list[int], features: Tensor, path: list[int]) -> Tensor:
        embedded = self.table[torch.tensor([*tokens[1:], *path])]
        rows = features.double()
        out = self.run(embedded[: len(rows)], rows)
        for _ in path:
            rows = torch.cat([rows, out[-1:]])
            out = self.run(embedded[: len(rows)], rows)
        return ((out[-1:] if self.way.normed else self.norm(out[-1:], self.names[2])) @ self.head.T)[0]

    def run(self, e: Tensor, g: Tensor) -> Tensor:
        e, g = self.norm(e, self.names[0]), self.norm(g, self.names[1])
        pair = [g, e] if self.way.hidden_first != (self.mutant == "order") else [e, g]
        residual = torch.cat(pair, 1) @ self.w[f"{self.project_name}.weight"].T
        x = self.norm(residual, f"{self.inside}input_layernorm")
        attend = {"latent": self.latent, "gated": self.gated, "accompanied": self.gated, "fused": self.gated}.get(self.family)
        residual = residual + (attend(x) if attend else self.attention(x, self.inside))
        x = self.norm(residual, f"{self.inside}post_attention_layernorm")
        block = {"latent": self.mixture, "accompanied": self.sparse, "fused": self.sparse}.get(self.family)
        residual = residual + (block(x) if block else self.mlp(x, f"{self.inside}mlp."))
        return self.norm(residual, self.names[2]) if self.way.normed else residual

    def gated(self, x: Tensor) -> Tensor:
        """Qwen3-Next's: of each head's 16 dimensions the first 4 turn; a gate for each of them lies behind its query."""
        n, at = len(x), f"{self.inside}self_attn."
        query, gate = (x @ self.w[f"{at}q_proj.weight"].T).view(n, 2, 32).split(16, -1)
        key, value = ((x @ self.w[f"{at}{part}_proj.weight"].T).view(n, 1, 16) for part in "kv")
        query, key = self.norm(query, f"{at}q_norm").transpose(0, 1), self.norm(key, f"{at}k_norm").transpose(0, 1)
        position = torch.arange(n).double()
        turned = 16 if self.mutant == "whole rotation" else 4
        query, key = ((torch.cat([part_rotated(each[..., :turned], position), each[..., turned:]], -1)) for each in (query, key))
        seen = torch.ones(n, n).tril().bool()
        shares = (query @ key.transpose(1, 2) / 4).masked_fill(~seen, -torch.inf).softmax(-1)
        attended = (shares @ value.transpose(0, 1)).transpose(0, 1).reshape(n, 32)
        opened = attended if self.mutant == "no gate" else attended * gate.reshape(n, 32).sigmoid()
        return opened @ self.w[f"{at}o_proj.weight"].T

    def sparse(self, x: Tensor) -> Tensor:
        """Qwen's mixture: two experts of four by softmax, and one that every row goes through, with a gate."""
        at = f"{self.inside}mlp."
        share = (x @ self.w[f"{at}shared_expert_gate.weight"].T).sigmoid()
        out = self.mlp(x, f"{at}shared_expert.") * (1.0 if self.mutant == "no shared gate" else share)
        for i, row in enumerate((x @ self.w[f"{at}gate.weight"].T).softmax(-1)):
            best = row.topk(2)
            for weight, expert in zip(best.values / best.values.sum(), best.indices.tolist()):
                if self.family == "fused":
                    gate, up = (x[i] @ self.w[f"{at}experts.gate_up_proj"][expert].T).chunk(2)
                    out[i] += weight * (torch.nn.functional.silu(gate) * up) @ self.w[f"{at}experts.down_proj"][expert].T
                else:
                    out[i] += weight * self.mlp(x[i : i + 1], f"{at}experts.{expert}.")[0]
        return out

    def mlp(self, x: Tensor, at: str) -> Tensor:
        gate, up = x @ self.w[f"{at}gate_proj.weight"].T, x @ self.w[f"{at}up_proj.weight"].T
        return (torch.nn.functional.silu(gate) * up) @ self.w[f"{at}down_proj.weight"].T

    def latent(self, x: Tensor) -> Tensor:
        """Attention as the paper writes it: neighbours are turned, one rotated key for all heads."""
        n, w = len(x), self.w
        q = (self.norm(x @ w["self_attn.q_a_proj.weight"].T, "self_attn.q_a_layernorm") @ w["self_attn.q_b_proj.weight"].T).view(n, 2, 20)
        latent, turned = (x @ w["self_attn.kv_a_proj_with_mqa.weight"].T).split((12, 8), 1)
        kv = (self.norm(latent, "self_attn.kv_a_layernorm") @ w["self_attn.kv_b_proj.weight"].T).view(n, 2, 22)
        position = torch.arange(n).double()
        scores = torch.einsum("ihd,jhd->hij", q[..., :12], kv[..., :12])
        scores = scores + torch.einsum("hid,jd->hij", neighbours(q[..., 12:].transpose(0, 1), position), neighbours(turned, position))
        seen = torch.ones(n, n).tril().bool()
        shares = (scores * 20**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", shares, kv[..., 12:]).reshape(n, 20) @ w["self_attn.o_proj.weight"].T

    def mixture(self, x: Tensor) -> Tensor:
        out = self.mlp(x, "mlp.shared_experts.")
        scores = (x @ self.w["mlp.gate.weight"].T).sigmoid()
        for i, row in enumerate(scores):
            choice = row + self.w["mlp.gate.e_score_correction_bias"]
            group = 0 if choice[:2].sum() > choice[2:].sum() else 2  # two experts a group, one group, two experts
            weights = row[group : group + 2] / row[group : group + 2].sum() * 1.7
            for weight, expert in zip(weights, (group, group + 1)):
                out[i] += weight * self.mlp(x[i : i + 1], f"mlp.experts.{expert}.")[0]
        return out


class PlainModules:
    """Several modules over one sequence, each over all positions again for every guess."""

    def __init__(self, folder: Path, family: str, way: Way, count: int, mutant: str = "") -> None:
        self.modules = [PlainMtp(folder, family, way, place=0 if mutant == "first again" else place) for place in range(count)]
        self.way, self.mutant = way, mutant

    def logits(self, tokens: list[int], features: Tensor, path: list[int]) -> Tensor:
        text, carried = [*tokens, *path], features.double()
        for place, module in enumerate(self.modules[: len(path) + 1]):
            behind = place if self.mutant == "token" and place else place + 1
            out = module.run(module.table[torch.tensor(text[behind : behind + len(features)])], carried)
            carried = out if self.way.chained != (self.mutant == "reads") else features.double()
        return ((out[-1:] if self.way.normed else module.norm(out[-1:], module.names[2])) @ module.head.T)[0]


def part_rotated(x: Tensor, position: Tensor) -> Tensor:
    """Half-split rotation of [heads, n, R]."""
    half = x.shape[-1] // 2
    angle = position[:, None] * 1e4 ** (-torch.arange(half).double() / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def neighbours(x: Tensor, position: Tensor) -> Tensor:
    """Rotation of pairs (0, 1), (2, 3), … of [.., n, 8]."""
    angle = position[:, None] * 1e4 ** (-torch.arange(4).double() / 4)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).flatten(-2)


def spec_of(folder: Path, way: Way) -> str:
    return f"mtp={folder},{way}"


USUAL = {
    "deepseek": Way(),
    "latent": Way(),
    "mimo": Way(hidden_first=True, normed=True),
} | dict.fromkeys(("qwen", "gated", "accompanied", "fused"), Way(normed=True))


@pytest.mark.parametrize("length, chunk", [(1, 1), (7, 3), (64, 16), (1000, 400)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_module(family: str, length: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way = USUAL[family]
    heard = Heard(monkeypatch)
    row = told(spec_of(write_mtp(tmp_path, family), way), length, nodes=3, tree=False)
    in_parts(row, chunk)
    draft = row.draft(3)
    for _ in range(4):
        draft = draft if draft.count else row.draft(3)
    assert draft.count == len(heard.said) == 3
    assert heard.off(PlainMtp(tmp_path, family, way), row) < 1e-4


@pytest.mark.parametrize("way", [Way(True, True, True), Way(False, True, False), Way(True, False, True)], ids=str)
def test_every_way_of_reading_is_what_it_says(way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(monkeypatch)
    row = told(spec_of(write_mtp(tmp_path), way), 20, nodes=3, tree=False)
    assert row.drafter.needs.layers == ((1,) if way.pre else (2,))
    in_parts(row, 20)
    row.draft(3)
    assert heard.off(PlainMtp(tmp_path, "deepseek", way), row) < 1e-4


@pytest.mark.parametrize(
    "family, mutant",
    [("deepseek", name) for name in ("position", "order", "no enorm", "no hnorm", "no norm", "no input_layernorm")]
    + [("mimo", "no final_layernorm"), ("qwen", "no offset"), ("qwen", "no q_norm"), ("latent", "no kv_a_layernorm")]
    + [("gated", name) for name in ("no gate", "whole rotation", "no k_norm")]
    + [("accompanied", "no shared gate")],
)
def test_a_mutant_is_found(family: str, mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(monkeypatch)
    row = told(spec_of(write_mtp(tmp_path, family), USUAL[family]), 40, nodes=3, tree=False)
    in_parts(row, 17)
    row.draft(3)
    assert heard.off(PlainMtp(tmp_path, family, USUAL[family], mutant), row) > 1e-2


@pytest.mark.parametrize("length, chunk", [(1, 1), (2, 1), (7, 3), (64, 16), (1000, 400)])
@pytest.mark.parametrize("family, way", [(family, way) for family, ways in MODULES.items() for way in ways], ids=str)
def test_several_modules_guess_each_for_its_own_place(
    family: str, way: Way, length: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard(monkeypatch)
    row = told(spec_of(write_mtp(tmp_path, family, modules=3), way), length, nodes=3, tree=False)
    in_parts(row, chunk)
    draft = row.draft(3)
    for _ in range(4):
        draft = draft if draft.count else row.draft(3)
    assert draft.count == len(heard.said) == 3 and draft.depths() == [1, 2, 3]
    assert heard.off(PlainModules(tmp_path, family, way, 3), row) < 1e-4  # type: ignore[arg-type]


@pytest.mark.parametrize("mutant", ["first again", "token", "reads"])
@pytest.mark.parametrize("family", MODULES)
def test_a_mutant_of_several_modules_is_found(family: str, mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, way = Heard(monkeypatch), MODULES[family][0]
    row = told(spec_of(write_mtp(tmp_path, family, modules=3), way), 40, nodes=3, tree=False)
    in_parts(row, 17)
    row.draft(3)
    assert heard.off(PlainModules(tmp_path, family, way, 3, mutant), row) > 1e-2  # type: ignore[arg-type]


@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_modules_keep_in_step_with_what_becomes_true(data: st.DataObject) -> None:
    """Runs of any length become true between drafts of any depth, and rounds without one: what is said is what whole modules say."""
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        way = data.draw(st.sampled_from(MODULES["deepseek"]))
        folder, heard = write_mtp(Path(place), modules=3), Heard(patch)
        row = told(spec_of(folder, way), 90, nodes=3, tree=False)
        golden = PlainModules(folder, "deepseek", way, 3)
        while row.known < 88:
            row.tell(data.draw(st.integers(1, min(30, 89 - row.known))), ends=True)
            most = data.draw(st.integers(0, 3))
            if most:
                row.draft(most)
                assert heard.off(golden, row) < 1e-4 and len(heard.said) == most  # type: ignore[arg-type]
                heard.said.clear()


@pytest.mark.parametrize("chained", [True, False])
def test_what_modules_behind_the_first_read_is_tried(chained: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second module's head was fitted to what the first makes of a position, or to the target's features there."""
    host = around(160)
    written, way = mtp_trial.write(host), Way(chained=chained)
    golden = PlainModules(write_mtp(tmp_path, modules=2), "deepseek", way, 2)
    states, wanted = [], []
    for row, tokens in enumerate(written.tokens):
        first, second = golden.modules
        features = written.behind[row].double()
        made = first.run(first.table[torch.tensor(tokens[1:])], features)
        out = second.run(second.table[torch.tensor(tokens[2:])], (made if chained else features)[:-1])
        states.append(second.norm(out[:-1], "shared_head.norm"))
        wanted += tokens[3:]
    x, y = torch.cat(states), torch.nn.functional.one_hot(torch.tensor(wanted), VOCAB).double()
    head = torch.linalg.solve(x.T @ x + 1e-3 * torch.eye(x.shape[1]), x.T @ y).T.float()
    tensors = load_file(tmp_path / "model.safetensors") | {"model.layers.3.shared_head.head.weight": head.contiguous()}
    write(tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors)
    opened = open_drafter(f"mtp={tmp_path},first=post,order=eh,carry=raw", Setting(3, True, host))
    assert opened.needs.pools[0].layers == 2
    assert ("reads=target" in caplog.text) == ("it is read so" in caplog.text) == (not chained)


def test_modules_that_are_stored_twice_are_kept_once(tmp_path: Path) -> None:
    write_mtp(tmp_path, modules=2)
    way = Way(chained=True)
    apart = open_drafter(spec_of(tmp_path, way), Setting(3, True, around())).needs.weight_bytes
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.layers.2.shared_head.head.weight"]
    write(tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors | {"model.layers.3.shared_head.head.weight": head.clone()})
    shared = open_drafter(spec_of(tmp_path, way), Setting(3, True, around())).needs.weight_bytes
    assert 4 * head.numel() <= apart - shared < 8 * head.numel()  # float32, in whole panels


def test_the_mixture_of_these_tests_has_the_shape_they_assume() -> None:
    assert (MIXTURE["n_routed_experts"], MIXTURE["n_group"], MIXTURE["topk_group"], MIXTURE["num_experts_per_tok"]) == (4, 2, 1, 2)
    assert LATENT["qk_rope_head_dim"] == 8 and rotate(torch.ones(1, 1, 16), torch.zeros(1)).shape == (1, 1, 16)


@pytest.mark.parametrize("right", [Way(), Way(pre=True), Way(hidden_first=True), Way(pre=True, normed=True)], ids=str)
def test_the_way_that_fits_what_the_target_writes_is_found(right: Way, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A module whose head was fitted to one way of reading: it is read so, and a warning says so where it is not the family's usual one."""
    write_mtp(tmp_path)
    host = around(160)
    host.model.ones = 1 + 0.7 * torch.randn(
        host.model.hidden, generator=torch.Generator().manual_seed(0)
    )  # or both sides of a norm look alike
    written = mtp_trial.write(host)
    plain = PlainMtp(tmp_path, "deepseek", right)
    states, wanted = [], []
    for row, tokens in enumerate(written.tokens):
        features = (written.before if right.pre else written.behind)[row].double()
        out = plain.run(plain.table[torch.tensor(tokens[1:])], features)
        for at in range(len(tokens) - 2):
            states.append(out[at] if right.normed else plain.norm(out[at], "shared_head.norm"))
            wanted.append(tokens[at + 2])
    x, y = torch.stack(states), torch.nn.functional.one_hot(torch.tensor(wanted), VOCAB).double()
    head = torch.linalg.solve(x.T @ x + 1e-3 * torch.eye(x.shape[1]), x.T @ y).T.float()
    tensors = load_file(tmp_path / "model.safetensors") | {"model.layers.2.shared_head.head.weight": head.contiguous()}
    write(tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors)
    options = ",carry=normed" if right.normed else ",carry=raw"
    drafter = open_drafter(f"mtp={tmp_path}{options}", Setting(3, True, host))
    assert drafter.needs.layers == ((1,) if right.pre else (2,))
    assert ("it is read so" in caplog.text) == (right.pre or right.hidden_first)
    assert not right.hidden_first or "order=he" in caplog.text


def test_the_usual_way_stays_unless_another_is_clearly_better() -> None:
    usual = Way(normed=True)
    scores = {usual: (0.50, 0.30), Way(pre=True, normed=True): (0.54, 0.1), Way(hidden_first=True, normed=True): (0.1, 0.1)}

    def chosen(other: float, fixed: tuple[str, ...] = ()) -> Way:
        return choose(usual, fixed, lambda way: scores.get(way, (0.0, 0.0))[0], lambda way: scores.get(way, (0.0, other))[1])[0]

    assert chosen(0.33) == usual
    scores[Way(pre=True, normed=True)] = (0.56, 0.1)
    assert chosen(0.0) == Way(pre=True, normed=True)
    assert chosen(0.33, ("pre",)) == usual
    assert chosen(0.36) == Way(pre=True, normed=False)


def test_modules_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path, {"num_nextn_predict_layers": 1}, {"model.embed_tokens.weight": torch.zeros(2, 2)})
    with pytest.raises(StartError, match="names MTP modules, but their tensors are not there"):
        open_drafter(f"mtp={tmp_path}", Setting(3, True, around()))
    names = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    write(tmp_path, {"num_nextn_predict_layers": 3}, {f"model.mtp.layers.0.{name}.weight": torch.zeros(2, 2) for name in names})
    with pytest.raises(StartError, match="MiMo-V2's are not read"):
        open_drafter(f"mtp={tmp_path}", Setting(3, True, around()))
    write_mtp(tmp_path, hidden_size=64)
    with pytest.raises(StartError, match="another target"):
        open_drafter(f"mtp={tmp_path}", Setting(3, True, around()))
