"""Start message → model: number types, lengths, and what a server of this version does not do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.backends.base import Backend
from forerun.backends.registry import open_backend
from forerun.engine import testmodel
from forerun.engine.errors import StartError
from forerun.engine.models.load import choose_dtype, load_model, named_dtype
from forerun.messages import Start
from tests.engine.paging import Feeder, random_sequences


@pytest.fixture(scope="module")
def backend() -> Backend:
    return open_backend("cpu", 1, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    testmodel.write_model("llama", 0, folder)
    return folder


def load(folder: Path, backend: Backend, **options: Any) -> Any:
    return load_model(Start(model_id=str(folder), **options), backend, lambda *_: None)


class Offering:
    """A backend as far as the choice of a number type goes."""

    name = "device"

    def __init__(self, *dtypes: torch.dtype) -> None:
        self.caps = self
        self.dtypes = dtypes


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("stored", "offered", "chosen"),
    [
        (BF16, (BF16, F32), BF16),
        (BF16, (F32, BF16), F32),
        (F32, (BF16, F32), F32),
        (F16, (BF16, F32), F32),
        (F16, (F16, BF16, F32), F16),
        (F32, (BF16,), BF16),
    ],
)
def test_the_best_type_that_holds_the_checkpoint(stored: torch.dtype, offered: tuple[torch.dtype, ...], chosen: torch.dtype) -> None:
    backend: Any = Offering(*offered)
    assert choose_dtype(None, stored, backend) == chosen
    assert choose_dtype("bfloat16", stored, backend) == BF16 if BF16 in offered else True


def test_a_type_that_the_device_lacks() -> None:
    backend: Any = Offering(BF16, F32)
    with pytest.raises(StartError, match="--dtype float16 is not available on device; use one of bfloat16, float32"):
        choose_dtype("float16", F16, backend)


def test_both_spellings_of_the_type() -> None:
    assert named_dtype({"dtype": "bfloat16"}) == named_dtype({"torch_dtype": "bfloat16"}) == BF16
    assert named_dtype({"text_config": {"torch_dtype": "float16"}}) == F16
    assert named_dtype({}) is None


def test_a_checkpoint_that_names_no_type(folder: Path, tmp_path: Path, backend: Backend) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert load(tmp_path, backend).dtype == "float32"


def test_lengths(folder: Path, backend: Backend) -> None:
    assert load(folder, backend).max_tokens == 512
    assert load(folder, backend, max_total_tokens=100).max_tokens == 100
    with pytest.raises(StartError, match=r"max_total_tokens 600 is more than the model's 512 positions.*--rope-scaling dynamic"):
        load(folder, backend, max_total_tokens=600)
    assert load(folder, backend, max_total_tokens=600, rope_scaling="dynamic", rope_factor=2.0).max_tokens == 600


def test_kv_type(folder: Path, backend: Backend) -> None:
    assert load(folder, backend, kv_dtype="bfloat16").pool.dtype == BF16
    assert load(folder, backend).pool.dtype == F32
    model = load(folder, backend, kv_dtype="int8")
    assert model.pool.dtype == torch.int8 and model.facts["kv"] == "int8"
    near, plain = (Feeder(load(folder, backend, **options), backend, random_sequences(512)).run() for options in ({"kv_dtype": "int8"}, {}))
    for one, other in zip(near, plain):
        assert 0 < (one - other).square().mean() < 5e-3 * other.square().mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "awq"}, "--quantize awq needs a checkpoint that was quantised so"),
        ({"quantize": "bitsandbytes-nf4"}, "--quantize bitsandbytes-nf4 is not available"),
        ({"quantize": "fp8"}, "--quantize fp8 is not available; use --quantize int8"),
        ({"quantize": "exl2"}, "--quantize exl2 is not available"),
        ({"kv_dtype": "fp8_e4m3fn"}, "--kv-cache-dtype fp8_e4m3fn is not available on cpu; use one of bfloat16, float32, int8"),
        ({"kv_dtype": "float16"}, "--kv-cache-dtype float16 is not available"),
        ({"world": 2}, "over 2 workers"),
        ({"dtype": "int7"}, "--dtype int7"),
    ],
)
def test_what_is_not_there_is_said(options: dict[str, Any], message: str, folder: Path, backend: Backend) -> None:
    with pytest.raises(StartError, match=message) as raised:
        load(folder, backend, **options)
    assert raised.value.cure


def test_weights_without_their_configuration(folder: Path, tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(StartError, match=r"has no config\.json"):
        load(tmp_path, backend)


def test_the_hub_cache(folder: Path, tmp_path: Path, backend: Backend) -> None:
    """Snapshots of links, as the hub's own client leaves them; nothing asks the network."""
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert load(Path("someone/tiny"), backend, hub_cache=str(tmp_path)).max_tokens == 512
    with pytest.raises(StartError, match="no model someone/other"):
        load(Path("someone/other"), backend, hub_cache=str(tmp_path))


def test_the_own_decoder_needs_no_transformers(folder: Path) -> None:
    """The demo's path: a second of imports and 100 MB less."""
    code = (
        "import sys; from forerun.messages import Start; from forerun.backends.registry import open_backend\n"
        "from forerun.engine.models.load import load_model\n"
        f"load_model(Start(model_id={str(folder)!r}), open_backend('cpu', 1, 1.0), lambda *_: None)\n"
        "print('transformers' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
