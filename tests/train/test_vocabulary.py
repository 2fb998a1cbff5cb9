"""A part of a vocabulary: frequent tokens and special ones, in a tokenizer that loads and means the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from forerun.engine.drafters.vocabulary import match
from forerun.train.shards import Record
from forerun.train.vocabulary import UNKNOWN, choose, token_ids, write_tokenizer


def text_of(tokens: list[int]) -> Record:
    generated = len(tokens) - 1
    candidates = np.array([[token] for token in tokens[1:]], np.uint32)
    return Record(0, 0, 1, np.array(tokens, np.uint32), candidates, np.zeros((generated, 1), np.float16))


def description(folder: Path) -> dict:
    return json.loads((folder / "tokenizer.json").read_text())


FREQUENT = [300, 301, 302, 303] * 5 + [400, 401]


def test_frequent_and_special_tokens_are_kept(folder: Path) -> None:
    found = choose([text_of(FREQUENT)], description(folder), "<|endoftext|>", 512, 8)
    assert found.kept.tolist() == [0, 1, 2, 3, 300, 301, 302, 303]
    assert found.unknown == 0 and found.size == 8
    assert found.covered == pytest.approx(1 - 2 / (len(FREQUENT) - 1))
    ids = found.to_draft()
    assert ids[301] == 5 and ids[400] == found.unknown


def test_a_target_without_an_unknown_token_gets_one(folder: Path, tmp_path: Path) -> None:
    found = choose([text_of(FREQUENT)], description(folder), None, 512, 8)
    assert len(found.kept) == 7 and found.unknown == 7 and found.size == 8
    write_tokenizer(folder, tmp_path, found)
    assert token_ids(description(tmp_path))[UNKNOWN] == 7
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["unk_token"] == UNKNOWN


def test_a_vocabulary_without_room_for_the_special_tokens_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="use --vocab 8"):
        choose([text_of(FREQUENT)], description(folder), None, 512, 3)


def test_the_tokenizer_of_a_part_loads_and_each_token_means_the_same(folder: Path, tmp_path: Path) -> None:
    found = choose([text_of(FREQUENT)], description(folder), "<|endoftext|>", 512, 200)
    write_tokenizer(folder, tmp_path, found)
    whole, part = Tokenizer.from_file(str(folder / "tokenizer.json")), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert part.get_vocab_size() == 200
    for draft, target in enumerate(found.kept.tolist()):
        assert part.id_to_token(draft) == whole.id_to_token(target)
    matched = match(folder, tmp_path, 512, 200)
    assert matched.to_target.tolist() == found.kept.tolist()
    assert matched.to_draft.tolist() == found.to_draft().tolist()


def test_a_vocabulary_that_is_small_enough_is_kept_whole(folder: Path, tmp_path: Path) -> None:
    found = choose([text_of(FREQUENT)], description(folder), "<|endoftext|>", 512, 4096)
    assert found.kept.tolist() == list(range(512))
    write_tokenizer(folder, tmp_path, found)
    assert match(folder, tmp_path, 512, 512).same


@pytest.mark.parametrize("merges", ["pairs", "words"])
def test_merges_whose_parts_are_gone_are_gone(folder: Path, tmp_path: Path, merges: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    whole = description(folder)
    if merges == "words":
        whole["model"]["merges"] = [" ".join(pair) for pair in whole["model"]["merges"]]
    (source / "tokenizer.json").write_text(json.dumps(whole))
    (source / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    every = [text_of(list(range(4, 260)) * 3 + list(range(260, 330)))]
    write_tokenizer(source, tmp_path, choose(every, whole, "<|endoftext|>", 512, 330))
    kept = description(tmp_path)["model"]
    assert 0 < len(kept["merges"]) < len(whole["model"]["merges"])
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("the server").ids


def test_a_vocabulary_that_is_a_list_is_cut_too(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    pieces = [["<unk>", 0.0], ["▁a", -1.0], ["▁b", -2.0], ["c", -3.0]]
    whole = {"version": "1.0", "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces}, "added_tokens": []}
    (source / "tokenizer.json").write_text(json.dumps(whole))
    (source / "tokenizer_config.json").write_text("{}")
    found = choose([text_of([0, 3, 3, 1])], whole, "<unk>", 4, 3)
    write_tokenizer(source, out, found)
    assert [piece for piece, _ in description(out)["model"]["vocab"]] == ["<unk>", "▁a", "c"]
