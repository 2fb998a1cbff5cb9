"""A folder that cannot be loaded is told before anything is loaded, with what to do."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from forerun.modelfolder import inspect


def safetensors(path: Path, size: int = 64, cut: int = 0) -> None:
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size - cut))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    safetensors(tmp_path / "model.safetensors")
    return tmp_path


def fault(path: Path, **more: bool) -> str:
    (found,) = inspect(path, **more).faults
    return found


def test_a_whole_folder(model: Path) -> None:
    found = inspect(model)
    assert found.faults == ()
    assert (found.architecture, found.weights, found.context_tokens, found.chat_template) == (
        "LlamaForCausalLM",
        "1 safetensors",
        512,
        True,
    )
    assert found.weight_bytes == (model / "model.safetensors").stat().st_size


def test_no_config(model: Path) -> None:
    (model / "config.json").unlink()
    assert "config.json is missing" in fault(model)


def test_a_broken_config(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "cannot be read" in fault(model)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_link_of_the_hub_cache_whose_file_is_gone(model: Path, name: str) -> None:
    (model / name).unlink()
    (model / name).symlink_to(model / "blobs" / "gone")
    assert f"{model / name} is a link to a file that is not there" in " ".join(inspect(model).faults)


def test_a_file_that_cannot_be_read(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("/proc/self/mem")
    assert "cannot be read" in fault(model)


def test_no_weights_but_a_folder_inside(model: Path) -> None:
    (model / "model.safetensors").rename(model / "x.txt")
    assert "has no weights" in fault(model)
    (model / "sub").mkdir()
    safetensors(model / "sub" / "model.safetensors")
    assert f"{model / 'sub'} has some" in fault(model)


def test_pickles_need_their_flag(model: Path) -> None:
    """E06."""
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "--allow-pickle" in fault(model)
    assert inspect(model, allow_pickle=True).faults == ()


def test_missing_shards(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "not there: model-2.safetensors" in fault(model)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_large_file_pointers(model: Path, name: str) -> None:
    (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in fault(model)


def test_a_cut_download(model: Path) -> None:
    safetensors(model / "model.safetensors", cut=1)
    assert "is cut short" in fault(model)


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]", bytes(8) + b"x"])
def test_no_safetensors_at_all(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert "model.safetensors is" in fault(model)


def test_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    assert "--tokenizer-name" in fault(model)


def test_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert inspect(tmp_path / "m.gguf").faults == ()
    assert inspect(tmp_path).faults == ()
