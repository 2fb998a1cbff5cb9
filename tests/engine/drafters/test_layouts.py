"""Which drafter a folder is for, and where `auto` looks for one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forerun.engine.build import open_auto
from forerun.engine.drafters.draft import Needs
from forerun.engine.drafters.layouts import find_heads, kind_of
from forerun.engine.drafters.registry import Setting
from forerun.engine.errors import StartError
from tests.engine.drafters import fitted
from tests.engine.drafters.companions import host, write_target, write_tiny
from tests.engine.drafters.nets import write_eagle1, write_eagle3, write_mtp
from tests.engine.tiny import VOCAB

KINDS = {"modules": "mtp", "eagle3": "eagle", "peagle": "eagle", "eagle1": "eagle"}


@pytest.mark.parametrize("name", fitted.FOLDERS)
def test_every_layout_is_told(name: str, tmp_path: Path) -> None:
    """By being written for the identity tests."""
    assert kind_of(fitted.FOLDERS[name](tmp_path)) == KINDS.get(name, name)


@pytest.mark.parametrize("variant", ["plain", "speculators", "deepspec", "biased", "parallel"])
def test_every_eagle(variant: str, tmp_path: Path) -> None:
    assert kind_of(write_eagle3(tmp_path, variant)) == "eagle"


@pytest.mark.parametrize("family", ["deepseek", "mimo", "qwen", "latent"])
def test_every_mtp(family: str, tmp_path: Path) -> None:
    assert kind_of(write_mtp(tmp_path, family)) == "mtp"


def test_what_is_no_drafter(tmp_path: Path) -> None:
    assert kind_of(write_tiny(tmp_path / "model")) is None
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "broken" / "config.json").write_text("{")
    assert kind_of(tmp_path / "broken") is None and kind_of(tmp_path / "nowhere") is None
    assert find_heads(tmp_path / "model") == [] and find_heads(tmp_path / "model.gguf") == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"architectures": 5}'),
        ("config.json", "[]"),
        ("model.safetensors.index.json", "[]"),
        ("model.safetensors.index.json", '{"weight_map": 5}'),
        ("model.safetensors", "\1\0\0\0\0\0\0\0" + "5"),
    ],
)
def test_files_that_are_not_what_they_are_called(name: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model-heads").mkdir()
    (tmp_path / "model-heads" / name).write_text(text)
    assert find_heads(write_tiny(tmp_path / "model")) == []
    assert "model-heads cannot be read" in caplog.text


def test_where_nobody_may_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, look = write_tiny(tmp_path / "model"), Path.iterdir
    write_eagle3(model / "heads")

    def iterdir(self: Path) -> Iterator[Path]:
        if self == tmp_path:
            raise PermissionError(self)
        return look(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert find_heads(model) == [f"eagle={model / 'heads'}"]


def test_where_auto_looks(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model")
    write_eagle3(tmp_path / "other-eagle3")
    assert find_heads(model) == [], "heads of another model"
    write_eagle1(tmp_path / "model-eagle")
    assert find_heads(model) == [f"eagle={tmp_path / 'model-eagle'}"]
    write_eagle3(model / "heads")
    assert find_heads(model) == [f"eagle={model / 'heads'}"], "in the folder before beside it"
    fitted.write_grams(tmp_path / "model-grams")
    assert find_heads(model) == [f"grams={tmp_path / 'model-grams'}", f"eagle={model / 'heads'}"], "a table beside whatever else there is"


def test_modules_among_the_targets_tensors(tmp_path: Path) -> None:
    write_mtp(tmp_path / "apart")
    (tmp_path / "model").mkdir()
    tensors = {"model.embed_tokens.weight": torch.zeros(2, 2), "model.layers.2.eh_proj.weight": torch.zeros(2, 4)}
    save_file(tensors, tmp_path / "model" / "part-1.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "part-1.safetensors")}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_heads(tmp_path / "model") == [f"mtp={tmp_path / 'model'}"]


def anything(needs: Needs) -> None:
    return None


def test_auto_is_the_look_ups_and_what_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_target(tmp_path / "model")
    setting = Setting(4, True, host(model))
    assert open_auto(model, setting, anything)[0] == "suffix"
    write_eagle3(tmp_path / "model-eagle3")
    spec, drafter = open_auto(model, setting, anything)
    assert spec == f"suffix+eagle={tmp_path / 'model-eagle3'}" and drafter.needs.layers == (-1, 0, 1)
    config = json.loads((tmp_path / "model-eagle3" / "config.json").read_text())
    (tmp_path / "model-eagle3" / "config.json").write_text(json.dumps(config | {"target_hidden_size": 64}))
    assert open_auto(model, setting, anything)[0] == "suffix"
    assert "another target" in caplog.text and "cannot be used" in caplog.text


@pytest.mark.parametrize("spoilt", ["", "grams", "eagle"])
@pytest.mark.parametrize("read", [True, False])
def test_what_is_not_right_is_no_reason_to_do_without_the_rest(spoilt: str, read: bool, tmp_path: Path) -> None:
    model = write_target(tmp_path / "model")
    found = {"grams": fitted.write_grams(tmp_path / "model-grams"), "eagle": write_eagle3(tmp_path / "model-eagle3")}
    wrong = {"grams": {"vocab_size": VOCAB + 1}, "eagle": {"target_hidden_size": 64} if read else {"eagle_aux_hidden_state_layer_ids": 3}}
    if spoilt:
        path = found[spoilt] / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | wrong[spoilt]))
    spec, drafter = open_auto(model, Setting(4, True, host(model)), anything)
    assert spec.split("+") == ["suffix", *(f"{kind}={folder}" for kind, folder in found.items() if kind != spoilt)]
    assert bool(drafter.needs.layers) == (spoilt != "eagle") and (drafter.needs.weight_bytes > 0)

    def small(needs: Needs) -> None:
        if needs.layers:
            raise StartError("too large", "")

    assert "eagle" not in open_auto(model, Setting(4, True, host(model)), small)[0]


def test_heads_that_cannot_be_read_are_no_reason_not_to_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_target(tmp_path / "model")
    heads = write_eagle3(tmp_path / "model-eagle3")
    config = json.loads((heads / "config.json").read_text())
    (heads / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": 3}))
    setting = Setting(4, True, host(model))
    assert open_auto(model, setting, anything)[0] == "suffix"
    assert "ask for it by name" in caplog.text
