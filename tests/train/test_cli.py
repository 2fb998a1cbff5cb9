"""`forerun train-drafter` from end to end with a tiny target: killed, resumed, saved, loaded by others, reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.backends.registry import open_backend
from forerun.cli import main
from forerun.engine.build import build_engine
from forerun.engine.models.load import load_model
from forerun.messages import Start
from forerun.train.heldout import OWN, read_prompts
from forerun.train.kinds.registry import KINDS
from forerun.train.shards import read
from forerun.train.trainer import Trainer
from tests.engine.tiny import Front, Sequence_, params_for

TEXT = ["--tokens", "60", "--rows", "4", "--longest", "96", "--held-out", "2", "--held-out-tokens", "12"]
LEARNING = ["--epochs", "4", "--batch-tokens", "3000", "--rate", "0.01", "--threads", "1", "--float32"]
SMALL = [*TEXT, *LEARNING, "--layers", "1", "--hidden", "64", "--vocab", "200"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "chat.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"Say {word}."]}) + "\n" for word in ("this", "that", "more")))
    return path


@pytest.fixture(scope="module")
def command(folder: Path, prompts: Path) -> Callable[[Path], list[str]]:
    return lambda out: ["train-drafter", "--model-id", str(folder), "--out", str(out), "--prompts", str(prompts), *SMALL]


@pytest.fixture(scope="module")
def made(command: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "draft"
    assert main(command(out)) == 0
    return out


def test_the_report_says_what_came_out(made: Path, command: Callable[[Path], list[str]]) -> None:
    report = json.loads((made / "report.json").read_text())
    assert list(report["acceptance"]) == [OWN, "chat"]
    assert report["acceptance"]["chat"]["texts"] == 2
    assert set(report["acceptance"][OWN]["tokens_a_step"]) == {"1", "2", "4", "8"}
    losses = [point["loss"] for point in report["history"]]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert report["bytes"] == (made / "model.safetensors").stat().st_size
    assert all(path.stat().st_mode & 0o044 for path in made.iterdir()), "who serves it need not be who trained it"
    readme = (made / "README.md").read_text()
    assert " ".join(command(made)[:2]) in readme and "| chat | 2 |" in readme


def test_transformers_and_our_loader_read_the_draft_alike(made: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, loading = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert model.config.vocab_size == 200 == len(AutoTokenizer.from_pretrained(made))
    ours = load_model(Start(model_id=str(made), device="cpu", threads=1), open_backend("cpu", 1), lambda stage, done, total: None)
    assert (ours.vocab, ours.layers, ours.dtype) == (200, 1, "bfloat16")


def test_the_engine_guesses_with_the_draft_and_says_the_same(made: Path) -> None:
    prompt = read(made.parent / "draft.work" / "held-out.bin")[0].tokens[:12].tolist()
    answers = []
    for speculator, guess in (("none", 0), (f"model={made}", 4)):
        start = Start(model_id=str(target_of(made)), device="cpu", threads=1, max_rows=2, max_total_tokens=96, speculator=speculator)
        front = Front(build_engine(start, lambda stage, done, total: None))
        sequence = Sequence_(prompt, params_for(prompt, max_new_tokens=32))
        front.admit(sequence)
        front.run(guess=guess)
        answers.append(sequence.answer)
        assert (sequence.drafted > 0) == (guess > 0)
    assert answers[0] == answers[1]


def test_what_is_saved_is_what_was_measured(made: Path) -> None:
    """The guesses of the saved folder, in transformers, against the report."""
    from transformers import AutoModelForCausalLM

    from forerun.train.vocabulary import token_ids

    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    whole = token_ids(json.loads((Path(str(made)).parent / "draft" / "tokenizer.json").read_text()))
    target = token_ids(json.loads((target_of(made) / "tokenizer.json").read_text()))
    to_draft = {target[token]: place for token, place in whole.items()}
    right = total = 0
    for record in read(made.parent / "draft.work" / "held-out.bin"):
        ids = torch.tensor([[to_draft.get(token, 0) for token in record.tokens.tolist()]])
        with torch.inference_mode():
            guesses = model(ids).logits[0, record.prompt - 1 : -1].argmax(-1).numpy()
        known = np.array([token in to_draft for token in record.tokens[record.prompt :].tolist()])
        right += int(((guesses == ids[0, record.prompt :].numpy()) & known)[1:].sum())
        total += record.generated - 1
    reported = json.loads((made / "report.json").read_text())["acceptance"]["chat"]["first"]
    assert reported == pytest.approx(right / total, abs=0.05)


def target_of(made: Path) -> Path:
    command = json.loads((made / "report.json").read_text())["command"].split()
    return Path(command[command.index("--model-id") + 1])


def test_the_same_command_goes_on_after_a_kill(
    made: Path, command: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "draft"
    learn = Trainer._learn

    def stopped(self: Trainer, batch: object) -> float:
        if self.step == 2:
            raise KeyboardInterrupt
        return learn(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_learn", stopped)
    monkeypatch.setattr("forerun.train.trainer.SAVE_SECONDS", -1.0)
    assert main(command(out)) == 130
    assert not out.exists()
    monkeypatch.setattr(Trainer, "_learn", learn)
    assert main(command(out)) == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (made / name).read_bytes()


def test_wrong_words_are_explained(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "draft")]
    assert main(["train-drafter", "--model-id", "./nowhere", *out]) == 1
    assert "no folder ./nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["train-drafter", "--kind", "miracle", "--model-id", str(folder), *out])
    assert left.value.code == 2
    assert main(["train-drafter", "--model-id", str(folder), *out, *SMALL, "--hidden", "50"]) == 1
    assert "no multiple of 64" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [kind for kind in sorted(KINDS) if kind != "grams"])
def test_a_draft_that_would_learn_nothing_is_refused_before_a_text_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    with pytest.raises(SystemExit):
        main(["train-drafter", "--kind", kind, "--model-id", str(folder), "--out", str(tmp_path / "draft"), "--epochs", "0"])
    assert "use 1 or more" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_of_prompts_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["fine"]}\n{"prompt": "wrong"}\n')
    assert read_prompts(path, 1) == ["fine"]
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(path, 2)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(path, 2)


def test_a_head_to_go_on_from_is_the_same_however_it_is_spelled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train-drafter", "--kind", "medusa", "--heads", "1", "--model-id", str(folder), *TEXT, "--epochs", "1", "--threads", "1"]
    assert main([*words, "--out", "first"]) == 0
    assert main([*words, "--out", "second", "--from", "first"]) == 0
    plan = torch.load("second.work/medusa.pt", weights_only=True)["plan"]
    assert plan["begins"] == "first", "nothing of where this folder lies"
    Path("alias").symlink_to("first")
    for spelled in ("second/../first", str(tmp_path / "first"), "alias"):
        assert main([*words, "--out", "second", "--from", spelled]) == 0
    assert main([*words, "--out", "second"]) == 1
