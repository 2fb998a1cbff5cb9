"""Tiny test models: the same seed gives the same files, and their text is as awkward as it is meant to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from forerun.engine import testmodel


def test_the_command_writes_an_ordinary_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert testmodel.main(["--arch", "qwen2", "--seed", "7", "--layers", "2", "--dtype", "bfloat16", "--out", str(tmp_path / "m")]) == 0
    assert str(tmp_path / "m") in capsys.readouterr().out
    files = {path.name for path in (tmp_path / "m").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert model.config.num_hidden_layers == 2 and model.dtype == torch.bfloat16
    assert json.loads((tmp_path / "m" / "generation_config.json").read_text())["eos_token_id"] == 2


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert testmodel.main(["--arch", "perceptron", "--out", str(tmp_path)]) == 2
    assert "no test model perceptron; there are apertus, " in capsys.readouterr().err


def test_seeds_decide_everything(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(3)  # the process's own generator has no part in it
        testmodel.write_model("llama", seed, tmp_path / name)

    def content(name: str) -> list[bytes]:
        return [path.read_bytes() for path in sorted((tmp_path / name).iterdir())]

    assert content("a") == content("b") != content("c")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """More only wait for each other on models this small."""
    torch.set_num_threads(1)


def test_greedy_text_wanders() -> None:
    """Not one token over and over: a test that compares such streams would prove little."""
    for arch in ("llama", "mistral", "qwen3", "granite"):
        model = testmodel.make_model(arch, 0)
        ids = model.generate(torch.tensor([[1, 40, 77]]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=3)[0]
        assert len(set(ids[3:].tolist())) >= 8


def test_tokenizer_is_byte_level(tmp_path: Path) -> None:
    testmodel.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == testmodel.VOCAB
    for text in ("The capital of France", "naïve 🙂 čaj", "\x00\x7f\n\t", "<|im_start|>user\nhi<|im_end|>", "  two  spaces "):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert max(ids) < testmodel.VOCAB
    assert tokenizer.decode([4 + 0xF0]) == "\ufffd"  # a byte that starts a character and ends nowhere
    assert [tokenizer.token_to_id(token) for token in testmodel.SPECIAL] == [0, 1, 2, 3]
    assert len(tokenizer.encode("The capital of France is Paris.").ids) < 12


def test_chat_template(tmp_path: Path) -> None:
    testmodel.write_model("llama", 0, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 3)


def test_byte_alphabet_is_a_bijection() -> None:
    assert len(set(testmodel.byte_alphabet())) == 256
