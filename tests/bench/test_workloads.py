"""The prompts of a sweep: enough different ones of each kind, the same every time; or a folder's; in the model's own form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.bench.errors import BenchError
from forerun.bench.prompts import PromptError
from forerun.bench.sweep import requests
from forerun.bench.template import chat_form
from forerun.bench.workloads import from_folder, made


def test_five_kinds_with_enough_prompts_for_the_largest_load() -> None:
    chosen = made()
    assert [one.name for one in chosen] == ["chat", "code", "maths", "repair", "copy"]
    assert all(len(set(one.prompts)) >= requests(32) for one in chosen)
    assert [one.prompts for one in made()] == [one.prompts for one in chosen]
    assert {one.name: one.wanted for one in chosen if one.wanted} == {"chat": 1.2, "code": 1.2, "copy": 2.2}


def test_some_of_them_by_name() -> None:
    assert [one.name for one in made(["copy", "chat"])] == ["copy", "chat"]
    with pytest.raises(ValueError, match="no workload poems"):
        made(["poems"])


def test_a_folder_of_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="jsonl"):
        from_folder(tmp_path)
    (tmp_path / "humaneval.jsonl").write_text('{"turns": ["one", "two"]}\n')
    (tmp_path / "a.jsonl").write_text('{"turns": ["x"]}\n{"turns": ["y"]}\n')
    assert [(one.name, list(one.prompts), one.wanted) for one in from_folder(tmp_path)] == [
        ("a", ["x", "y"], 0),
        ("humaneval", ["one"], 1.2),
    ]
    assert [one.name for one in from_folder(tmp_path, ["humaneval"])] == ["humaneval"]
    with pytest.raises(FileNotFoundError, match="no b, c; it has a, humaneval"):
        from_folder(tmp_path, ["c", "b"])
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(PromptError, match="line 1"):
        from_folder(tmp_path)


def test_a_message_in_the_models_form(tmp_path: Path) -> None:
    assert chat_form(tmp_path)("hello") == "hello"
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %} [me]{% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": {"content": "<s>"}}))
    assert chat_form(tmp_path)("hello") == "<s>[user] hello [me]"


def test_a_template_that_cannot_be_read_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for %}"}))
    with pytest.raises(BenchError, match=r"tokenizer_config\.json"):
        chat_form(tmp_path)
