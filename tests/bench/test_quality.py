"""The quality table: its arithmetic, and loose bounds for what fewer bits may cost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from forerun.bench import quality
from forerun.bench.quality import FORMS, choose_texts, compare, main, measure

MODEL = Path(__file__).parents[2] / "models/smollm2-135m-instruct"


def test_a_form_against_itself_and_against_another() -> None:
    truth = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]))
    other = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]))
    logprobs, same, divergence = compare(truth, truth, [0, 1, 2])
    assert logprobs.exp().tolist() == pytest.approx([0.25, 0.1]) and same.all() and not divergence.any()
    logprobs, same, divergence = compare(truth, other, [0, 1, 2])
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.1]) and same.tolist() == [False, True]
    assert divergence.tolist() == pytest.approx([0.5 * math.log(2) - 0.25 * math.log(2), 0.0])


def test_texts_come_from_each_file_in_turns(tmp_path: Path) -> None:
    for name, texts in (("a", ["1", "3", "5"]), ("b", ["2"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    assert list(choose_texts(tmp_path, 10)) == ["1", "2", "3", "5"]
    assert len(list(choose_texts(None, 12))) == 12


@pytest.mark.skipif(not MODEL.is_dir(), reason="run `make model` first")
def test_fewer_bits_cost_little(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A format that is broken anywhere (an order of codes, a scale, a zero) is far outside of these bounds."""
    main(["--model", str(MODEL), "--texts", "4", "--tokens", "80", "--json", str(tmp_path / "lines.json")])
    lines = {line["form"]: line for line in json.loads((tmp_path / "lines.json").read_text())}
    assert list(lines) == list(FORMS)
    assert all(form in capsys.readouterr().out for form in ["| int4, int8 KV | "])
    bounds = {"float32": (1.0, 0.0), "bfloat16": (0.95, 0.01), "int8": (0.93, 0.02), "int4": (0.6, 0.5)}
    for form, line in lines.items():
        same, divergence = bounds[form.partition(",")[0]]
        assert line["same"] >= same - 0.03 * ("KV" in form) and line["divergence"] <= divergence + 0.02 * ("KV" in form), line
        assert line["perplexity"] == pytest.approx(lines["float32"]["perplexity"], rel=0.4 if "int4" in form else 0.05)
    assert lines["int4"]["weight_bytes"] < lines["int8"]["weight_bytes"] < 0.75 * lines["bfloat16"]["weight_bytes"]
    assert lines["bfloat16, int8 KV"]["position_bytes"] == lines["bfloat16"]["position_bytes"] * 68 // 128


def test_a_model_of_random_weights_is_measured_too(tmp_path: Path) -> None:
    from forerun.engine import testmodel

    testmodel.write_model("llama", 0, tmp_path, hidden_size=128, intermediate_size=256)
    lines = measure(tmp_path, [[5, 9, 300, 44, 12], [7, 8]], {name: FORMS[name] for name in ("float32", "int8")})
    assert lines[0].divergence == 0 < lines[1].divergence < 0.1 and lines[0].same == 1
    assert quality.table(lines).count("\n") == 3
