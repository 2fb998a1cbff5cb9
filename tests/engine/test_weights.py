"""Reading a model's tensors from disk: layouts, formats, damage, and what memory it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from forerun.engine.errors import StartError
from forerun.engine.weights import SAFETENSORS_TYPES, Safetensors, open_checkpoint, read_config

TENSORS = {"a.weight": torch.arange(12.0).view(3, 4), "b.bias": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(2.5)}


def write(folder: Path, name: str = "model.safetensors", tensors: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(TENSORS if tensors is None else tensors, folder / name)
    return folder


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path))
    assert checkpoint.names() == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.read(name).dtype == tensor.dtype and torch.equal(checkpoint.read(name), tensor)


@settings(max_examples=20, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5), data=st.data())
def test_safetensors_of_any_shape_and_type(shapes: list[list[int]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    kinds = sorted(SAFETENSORS_TYPES.values(), key=str)
    tensors = {
        f"t{i}": torch.randint(0, 2, shape).to(data.draw(st.sampled_from(kinds))) if 0 not in shape else torch.empty(shape)
        for i, shape in enumerate(shapes)
    }
    checkpoint = open_checkpoint(write(tmp_path_factory.mktemp("any"), tensors=tensors))
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape and torch.equal(read.double(), tensor.double())


def test_views_survive_a_release(tmp_path: Path) -> None:
    """Released pages are read again from the file: nothing that is still held changes."""
    checkpoint = open_checkpoint(write(tmp_path))
    view = checkpoint.read("a.weight")
    checkpoint.release()
    assert torch.equal(view, TENSORS["a.weight"])


def test_release_gives_memory_back(tmp_path: Path) -> None:
    size = 64 << 20
    checkpoint = open_checkpoint(write(tmp_path, tensors={"big": torch.ones(size // 4)}))
    assert resident(tmp_path) < size // 4
    checkpoint.read("big").sum()
    assert resident(tmp_path) > size // 2
    checkpoint.release()
    assert resident(tmp_path) < size // 4


def resident(folder: Path) -> int:
    """Bytes in memory of the files of a folder that are mapped: those of this process depend on what else runs in it."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            ours = f" {folder}/" in line
        elif name == "Rss:" and ours:
            found += int(rest[0]) << 10
    return found


def test_shards(tmp_path: Path) -> None:
    write(tmp_path, "model-1.safetensors", {"a.weight": TENSORS["a.weight"]})
    write(tmp_path, "model-2.safetensors", {"b.bias": TENSORS["b.bias"]})
    index = {"weight_map": {"a.weight": "model-1.safetensors", "b.bias": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names() == {"a.weight", "b.bias"} and checkpoint.shape("b.bias") == (5,)
    assert torch.equal(checkpoint.read("a.weight"), TENSORS["a.weight"])
    checkpoint.release()
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(StartError, match=r"lacks model-2.safetensors, which model.safetensors.index.json names; finish the download"):
        open_checkpoint(tmp_path)


def test_a_link_whose_file_is_gone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(StartError, match=r"model.safetensors cannot be read: No such file.*fetch the model again"):
        open_checkpoint(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, "one.safetensors")
    assert open_checkpoint(tmp_path).names() == set(TENSORS)
    write(tmp_path, "two.safetensors")
    with pytest.raises(StartError, match="several weight files and no index"):
        open_checkpoint(tmp_path)


def test_pickles_need_permission(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    with pytest.raises(StartError, match=r"pickle, which may carry code.*--allow-pickle"):
        open_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path, allow_pickle=True)
    assert torch.equal(checkpoint.read("a.weight"), TENSORS["a.weight"]) and checkpoint.shape("b.bias") == (5,)
    write(tmp_path)
    assert type(open_checkpoint(tmp_path)) is Safetensors


def test_a_pickle_with_code_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (str(tmp_path / "sprung"),))

    torch.save({"a": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(StartError, match="not a plain pickle of tensors"):
        open_checkpoint(tmp_path, allow_pickle=True)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("keep", [0, 4, 7, 60, -1])
def test_a_file_cut_short_is_named(keep: int, tmp_path: Path) -> None:
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StartError, match=r"model\.safetensors .*fetch the model again"):
        open_checkpoint(tmp_path)


def test_other_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(StartError, match="git lfs pull"):
        open_checkpoint(tmp_path)
    path.write_bytes((9).to_bytes(8, "little") + b"{broken!}" + bytes(30))
    with pytest.raises(StartError, match="broken header"):
        open_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(StartError, match="has no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "weights.onnx").write_bytes(b"x")
    with pytest.raises(StartError, match="no kind of weights"):
        open_checkpoint(tmp_path / "weights.onnx")


def test_config_is_read_or_refused(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert read_config(tmp_path) == {"hidden_size": 3}
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(StartError, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartError, match="not JSON"):
        read_config(tmp_path)
