"""Prompt files and synthetic prompts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from forerun.bench.prompts import PromptError, from_file, synthetic


def test_first_turns_over_and_over(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a", "more"]}\n\n{"turns": ["ü"]}\n', encoding="utf-8")
    assert list(itertools.islice(from_file(path), 5)) == ["a", "ü", "a", "ü", "a"]


@pytest.mark.parametrize(
    ("text", "words"), [("", "no prompts"), ('{"turns": ["a"]}\n{"prompt": "b"}\n', "line 2"), ("{", "line 1"), ('{"turns": []}', "line 1")]
)
def test_a_file_of_another_form_names_the_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=words):
        from_file(path)


@pytest.mark.parametrize("words", [1, 2, 64])
def test_synthetic_prompts_have_their_length_and_no_common_start(words: int) -> None:
    prompts = list(itertools.islice(synthetic(words, seed=1), 20))
    assert {len(prompt.split()) for prompt in prompts} == {words}
    assert len({prompt.split()[0] for prompt in prompts}) == 20
    assert prompts == list(itertools.islice(synthetic(words, seed=1), 20))
