"""Tokens are matched by the text they stand for, however it is spelled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.drafters.vocabulary import Vocabulary, match, texts, unknown_id
from forerun.engine.errors import StartError

BYTE_LEVEL = {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False}]}


def write(folder: Path, vocab: Any, added: list[str] | None = None, settings: dict[str, Any] | None = None, **model: Any) -> Path:
    """A tokenizer of these pieces, SentencePiece's way unless `pre` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    pre = model.pop("pre", None)
    size = len(vocab)
    tokens = [{"id": size + i, "content": content, "special": True} for i, content in enumerate(added or [])]
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": vocab, **model}, "added_tokens": tokens, "pre_tokenizer": pre, "decoder": None})
    )
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def pieces(*names: str) -> dict[str, int]:
    return {name: id for id, name in enumerate(names)}


def pair(tmp_path: Path, target: Any, draft: Any, **more: Any) -> Vocabulary:
    return match(write(tmp_path / "target", target), write(tmp_path / "draft", draft, **more), len(target), len(draft))


def test_equal_tables_need_no_translation(tmp_path: Path) -> None:
    found = pair(tmp_path, pieces("a", "b", "c"), pieces("a", "b", "c"))
    assert found.same and found.to_target.tolist() == found.to_draft.tolist() == [0, 1, 2]


def test_padded_heads_are_no_tokens(tmp_path: Path) -> None:
    """A head may have more rows than its tokenizer has ids: those are never proposed."""
    target, draft = write(tmp_path / "target", pieces("a", "b")), write(tmp_path / "draft", pieces("a", "b"))
    found = match(target, draft, 64, 128)
    assert found.to_target.tolist()[:3] == [0, 1, -1] and len(found.to_target) == 128 and len(found.to_draft) == 64
    assert found.shared == 2


def test_another_order_and_unknown_tokens(tmp_path: Path) -> None:
    found = pair(tmp_path, pieces("a", "b", "c", "d"), pieces("<unk>", "d", "b"), unk_token="<unk>")
    assert not found.same
    assert found.to_target.tolist() == [-1, 3, 1] and found.to_draft.tolist() == [0, 2, 0, 1]


def test_the_same_text_spelled_in_two_ways(tmp_path: Path) -> None:
    """Byte level against SentencePiece: spaces, newlines, umlauts."""
    target = write(tmp_path / "target", pieces("Ġthe", "Ċ", "Ã¼", "x"), pre=BYTE_LEVEL)
    draft = write(tmp_path / "draft", pieces("▁the", "<0x0A>", "ü", "x"))
    assert texts(target) == texts(draft) == [b" the", b"\n", "ü".encode(), b"x"]
    assert match(target, draft, 4, 4).same


def test_special_tokens_are_matched_by_their_content(tmp_path: Path) -> None:
    target = write(tmp_path / "target", pieces("a", "b"), added=["<|im_end|>"])
    draft = write(tmp_path / "draft", pieces("b"), added=["<|im_end|>", "<s>"])
    assert match(target, draft, 3, 3).to_target.tolist() == [1, 2, -1]


def test_a_unigram_table_is_a_list(tmp_path: Path) -> None:
    draft = write(tmp_path / "draft", [["<unk>", 0.0], ["▁a", -1.0], ["b", -2.0]], unk_id=0, type="Unigram")
    target = write(tmp_path / "target", pieces("b", "▁a", "c"))
    found = match(target, draft, 3, 3)
    assert found.to_target.tolist() == [-1, 1, 0] and found.to_draft.tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    "settings, id",
    [
        ({"unk_token": "c", "pad_token": "b"}, 2),
        ({"unk_token": None, "pad_token": {"content": "b"}}, 1),
        ({"unk_token": "nowhere", "eos_token": "a"}, 0),
        ({}, -1),
    ],
)
def test_what_stands_in_for_an_unknown_token(tmp_path: Path, settings: dict[str, Any], id: int) -> None:
    folder = write(tmp_path, pieces("a", "b", "c"), settings=settings)
    assert unknown_id(folder, texts(folder), 3) == id


@given(st.permutations(list("abcdefgh")), st.integers(4, 8), st.integers(0, 3))
def test_translation_there_and_back(order: list[str], known: int, more: int) -> None:
    """Whatever the order: a token that both know keeps its text both ways, all others map to nothing and to the unknown token."""
    import tempfile

    with tempfile.TemporaryDirectory() as home:
        target = write(Path(home) / "target", pieces(*"abcdefgh"))
        draft = write(Path(home) / "draft", pieces("<unk>", *order[:known], *(f"own{i}" for i in range(more))), unk_token="<unk>")
        found = match(target, draft, 8, 1 + known + more)
    for id, text in enumerate(order[:known], 1):
        assert "abcdefgh"[found.to_target[id]] == text and found.to_draft[found.to_target[id]] == id
    assert all(found.to_draft["abcdefgh".index(text)] == 0 for text in order[known:])
    assert found.to_target.tolist().count(-1) == 1 + more and found.shared == known


@pytest.mark.parametrize("draft", [("x", "y", "z"), ("a", "x", "y", "z"), ()])
def test_too_few_common_tokens_are_refused(tmp_path: Path, draft: tuple[str, ...]) -> None:
    with pytest.raises(StartError) as error:
        pair(tmp_path, pieces("a", "b", "c"), pieces(*draft))
    assert "the target's tokenizer" in error.value.cure


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"tokenizer\.json") as error:
        match(write(tmp_path / "target", pieces("a")), tmp_path, 1, 1)
    assert "save_pretrained" in error.value.cure
