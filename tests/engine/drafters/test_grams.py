"""What the table says is what is guessed: the longest context that it knows, best first, nothing remembered of the text but its end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from forerun.drafting import fingerprint
from forerun.engine.drafters.draft import FREE, Commit, Draft, Terms
from forerun.engine.drafters.grams import FOLLOWERS, MOST_VOCAB, SURE, Grams, Table, extended
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.drafters.vocabulary import texts
from forerun.engine.errors import StartError
from tests.engine import tiny
from tests.engine.drafters.companions import setting, write_tiny

VOCAB = 50
Followers = list[tuple[int, float]]


def table(entries: dict[tuple[int, ...], Followers]) -> Table:
    keys, tokens, chances = [], [], []
    for context, followers in entries.items():
        key = 0
        for token in context:
            key = extended(key, token)
        padded = [*followers, *[(-1, 0.0)] * (FOLLOWERS - len(followers))]
        keys.append(key)
        tokens.append([token for token, _ in padded])
        chances.append([round(chance * SURE) for _, chance in padded])
    shape = (-1, FOLLOWERS)
    return Table(np.array(keys, np.int64), np.array(tokens, np.int32).reshape(shape), np.array(chances, np.uint8).reshape(shape), VOCAB)


SMALL = table({(1,): [(2, 0.6), (3, 0.4)], (2,): [(1, 0.5)], (0, 1): [(4, 0.8)], (7, 0, 1): [(5, 0.2)], (4,): [(0, 0.9)], (0,): [(4, 0.5)]})


def behind(drafter: Grams, text: list[int], most: int = 8, terms: Terms = FREE) -> Draft:
    drafter.absorb(Commit([0], [0], [text[:-1]], [text[-1]]))
    draft = drafter.propose([0], [most], terms)[0]
    drafter.forget([0])
    return draft


def test_the_longest_known_context_answers() -> None:
    drafter = Grams(SMALL)
    assert behind(drafter, [9, 9, 1], 2).token == [2, 3], "also where other tokens stand before it"
    assert behind(drafter, [9, 0, 1]).token[:3] == [4, 0, 4], "and so it is with guesses"
    assert behind(drafter, [7, 0, 1]).token == [5]
    assert behind(drafter, [1], 1).token == [2], "at the start of a text"
    assert behind(drafter, [1, 9]).count == 0


def test_a_tree_best_first_down_to_half_the_price() -> None:
    draft = behind(Grams(SMALL), [9, 1], 5)
    assert (draft.token, draft.parent) == ([2, 3, 1, 2, 3], [-1, -1, 0, 2, 2])
    assert draft.confidence == pytest.approx([0.6, 0.4, 0.5, 0.6, 0.4], abs=0.003)
    assert behind(Grams(SMALL), [9, 1], 5, Terms(price=0.7)).token == [2, 3]
    assert behind(Grams(SMALL, tree=False), [9, 1], 3).parent == [-1, 0, 1]


def test_a_row_is_its_last_tokens_however_it_was_told() -> None:
    """Portions, and a row number that begins anew without anybody having said that the other sequence left."""
    drafter = Grams(SMALL)
    drafter.absorb(Commit([0], [0], [[9, 9, 7]], [0]))
    drafter.absorb(Commit([0], [3], [[0]], [1]))
    assert drafter.propose([0], [4])[0].token == [5]
    drafter.absorb(Commit([0], [0], [[9, 9, 9, 0]], [1]))
    assert drafter.propose([0], [1])[0].token == [4]
    drafter.absorb(Commit([0], [0], [[]], [1]))
    assert drafter.propose([0], [1])[0].token == [2]
    assert drafter.propose([3], [1])[0].count == 0, "a row never heard of"
    drafter.forget([0, 3])
    assert not drafter._rows


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
        st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 1.0)), max_size=FOLLOWERS, unique_by=lambda pair: pair[0]),
        max_size=30,
    ),
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.integers(0, 12),
    st.booleans(),
)
def test_a_draft_is_a_well_formed_tree(entries: dict[tuple[int, ...], Followers], text: list[int], most: int, tree: bool) -> None:
    sorted_ = {context: sorted(followers, key=lambda pair: -pair[1]) for context, followers in entries.items()}
    draft = behind(Grams(table(sorted_), tree=tree), text, most)
    assert draft.count <= most and len(draft.parent) == len(draft.confidence) == len(draft.probe) == draft.count
    assert all(-1 <= parent < i for i, parent in enumerate(draft.parent)) and not any(draft.probe)
    assert len({tuple(path) for path in draft.paths()}) == draft.count, "no two siblings carry the same token"
    assert all(0 < confidence < 1 for confidence in draft.confidence) and all(0 <= token <= 4 for token in draft.token)
    if not tree:
        assert draft.parent == list(range(-1, draft.count - 1))
    for node, path in enumerate(draft.paths()):
        known = [*text, *path[:-1]]
        contexts: Iterable[tuple[int, ...]] = (tuple(known[-length:]) for length in (3, 2, 1) if length <= len(known))
        assert dict(next(sorted_[context] for context in contexts if context in sorted_)).keys() >= {draft.token[node]}


def written(folder: Path, whole: Table, **config: object) -> Path:
    folder.mkdir()
    save_file({"keys": whole.keys, "tokens": whole.tokens, "chances": whole.chances}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "grams", "vocab_size": whole.vocab} | config))
    return folder


def test_it_is_read_from_a_folder(tmp_path: Path) -> None:
    drafter = open_drafter(f"grams={written(tmp_path / 'table', SMALL)}", Setting(nodes=3))
    assert drafter.needs.most == 3 and drafter.needs.lazy and drafter.needs.weight_bytes == SMALL.bytes
    drafter.absorb(Commit([0], [0], [[7, 0]], [1]))
    assert drafter.propose([0], [3])[0].token == [5]


def test_what_is_no_table_for_this_target_is_refused_with_a_cure(tmp_path: Path) -> None:
    def refused(value: str, with_target: bool = False) -> StartError:
        with pytest.raises(StartError) as error:
            open_drafter(f"grams={value}", setting(target) if with_target else Setting())
        return error.value

    target = write_tiny(tmp_path / "target")
    assert "suffix+grams=DIR" in refused("").cure
    assert "--kind grams" in refused(str(tmp_path / "nowhere")).cure
    assert "no table" in str(refused(str(target)))
    assert "50 tokens" in str(refused(str(written(tmp_path / "other", SMALL)), with_target=True))
    own = Table(SMALL.keys[:0], SMALL.tokens[:0], SMALL.chances[:0], tiny.VOCAB)
    assert "another tokenizer" in str(refused(str(written(tmp_path / "words", own, tokenizer_fingerprint="?")), with_target=True))
    right = fingerprint(texts(target))
    assert open_drafter(f"grams={written(tmp_path / 'right', own, tokenizer_fingerprint=right)}", setting(target)).needs.weight_bytes == 0
    wide = written(tmp_path / "wide", own, vocab_size=MOST_VOCAB + 1)
    assert "fit into keys" in str(refused(str(wide)))
    assert "the target has" in str(refused(str(written(tmp_path / "bad", SMALL, vocab_size=5)), with_target=True)), "before values are read"
    assert "beyond its 5" in str(refused(str(written(tmp_path / "beyond", SMALL, vocab_size=5))))
    short = Table(SMALL.keys[:-1], SMALL.tokens, SMALL.chances, VOCAB)
    assert "damaged" in str(refused(str(written(tmp_path / "short", short))))
    for number, size in enumerate((None, "50", 50.5)):
        assert "damaged" in str(refused(str(written(tmp_path / str(number), SMALL, vocab_size=size))))
