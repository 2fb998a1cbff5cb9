"""What is counted, how it is smoothed, and that the engine guesses what counting said."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from forerun.cli import main
from forerun.engine.drafters.draft import Commit
from forerun.engine.drafters.grams import FOLLOWERS, MOST_VOCAB, SURE, extended
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.train.kinds import registry
from forerun.train.kinds.grams import DISCOUNT, LEAST_CHANCE, Grams
from forerun.train.shards import Record

VOCAB = 8
Text = tuple[list[int], list[int]]
"""prompt and answer; in `texts` of as many tokens as are remembered behind a context, so that ties decide nothing"""
texts = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=25)), min_size=1, max_size=4
)


def records(pieces: list[Text]) -> list[Record]:
    """(prompt, answer) each, every token of an answer the target's own choice."""
    found = []
    for number, (prompt, answer) in enumerate(pieces):
        tokens = np.array([*prompt, *answer], np.uint32)
        found.append(Record(number, 1, len(prompt), tokens, tokens[len(prompt) :, None], np.zeros((len(answer), 1), np.float16)))
    return found


def plain(pieces: list[Text], least: int) -> dict[tuple[int, ...], dict[int, float]]:
    """The same by the formula, one context after the other."""
    found: dict[tuple[int, ...], dict[int, float]] = {}
    for order in (1, 2, 3):
        counts: dict[tuple[int, ...], Counter[int]] = {}
        for prompt, answer in pieces:
            whole = [*prompt, *answer]
            for place in range(max(len(prompt), order), len(whole)):
                counts.setdefault(tuple(whole[place - order : place]), Counter())[whole[place]] += 1
        for context, seen in counts.items():
            total = sum(seen.values())
            if total >= (least if order > 1 else 1):
                chances = {token: (times - DISCOUNT) / total for token, times in seen.items()}
                lower = sorted(found.get(context[1:], {}).items(), key=lambda pair: -pair[1])[:FOLLOWERS]
                for token, chance in lower:
                    chances[token] = chances.get(token, 0.0) + DISCOUNT * len(seen) / total * chance
                found[context] = chances
    return found


@settings(deadline=None, max_examples=60)
@given(texts, st.integers(1, 3))
def test_the_table_is_the_formula(pieces: list[Text], least: int) -> None:
    table = Grams(records(pieces), VOCAB, least)._table
    wanted = plain(pieces, least)
    assert len(set(table.keys.tolist())) == len(table.keys) and sorted(table.keys.tolist()) == table.keys.tolist()
    keys = {key: place for place, key in enumerate(table.keys.tolist())}
    for context, chances in wanted.items():
        key = 0
        for token in context:
            key = extended(key, token)
        best = sorted((chance for chance in chances.values() if chance >= LEAST_CHANCE), reverse=True)[:FOLLOWERS]
        if not best:
            assert key not in keys
            continue
        place = keys.pop(key)
        stored = table.chances[place].tolist()
        assert stored == sorted(stored, reverse=True)
        assert [chance / SURE for chance in stored[: len(best)]] == pytest.approx(best, abs=0.003) and not any(stored[len(best) :])
        for token, chance in zip(table.tokens[place].tolist(), stored):
            assert (token < 0) == (chance == 0) and (token < 0 or chances[token] == pytest.approx(chance / SURE, abs=0.003))
    assert not keys, "nothing else"


def test_the_engine_guesses_what_counting_said(tmp_path: Path) -> None:
    dice = np.random.default_rng(2)
    pieces = [([1, 2], dice.integers(0, 6, 60).tolist()) for _ in range(5)]
    draft = Grams(records(pieces), VOCAB, 1)
    draft.save(tmp_path)
    drafter = open_drafter(f"grams={tmp_path}", Setting(nodes=3, tree=False))
    held = 0
    for record, (prompt, answer) in itertools.islice(zip(records(pieces), pieces), 2):
        hits = draft.hits(record, 3)
        for place in range(1, len(answer)):
            known = [*prompt, *answer[:place]]
            drafter.absorb(Commit([0], [0], [known[:-1]], [known[-1]]))
            chain = drafter.propose([0], [3])[0].token
            for depth, (guess, token) in enumerate(zip(chain, answer[place:])):
                assert hits[place, depth] == (guess == token)
                held += guess == token
                if guess != token:
                    break
        assert not hits[-1, 1:].any(), "nothing holds behind the end"
    assert held > 50


def test_the_command_counts_without_training(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "table"
    words = ["--tokens", "20", "--rows", "2", "--longest", "48", "--held-out", "1", "--threads", "1", "--least", "1"]
    assert main(["train-drafter", "--kind", "grams", "--model-id", str(folder), "--out", str(out), *words]) == 0
    report = json.loads((out / "report.json").read_text())
    assert (report["kind"], report["speculator"], report["steps"]) == ("grams", "grams", 0)
    assert report["parameters"] == int((load_file(out / "model.safetensors")["tokens"] >= 0).sum()) > 0
    assert open_drafter(f"grams={out}", Setting()).needs.weight_bytes > 0
    assert all(path.stat().st_mode & 0o044 for path in out.iterdir())


def test_a_context_that_was_never_seen_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--tokens", "20", "--rows", "2", "--longest", "48", "--held-out", "1", "--threads", "1", "--least", "0"]
    assert main(["train-drafter", "--kind", "grams", "--model-id", str(folder), "--out", str(tmp_path / "table"), *words]) == 1
    assert "use --least 1" in capsys.readouterr().err


def test_a_vocabulary_that_is_too_large_for_keys_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": MOST_VOCAB + 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = argparse.Namespace(least=1)
    with pytest.raises(ValueError, match="use a head"):
        Grams.open(asked, registry.Setting(tmp_path, records([([1], [2])]), 0, lambda layers: pytest.fail("nothing is computed")))


def test_turns_are_counted_like_answers(folder: Path) -> None:
    asked = argparse.Namespace(least=1)
    answers, turns = records([([1], [2, 2])]), records([([3], [4, 4])])
    setting = registry.Setting(folder, answers, 0, lambda layers: pytest.fail("nothing is computed"), turns=turns)
    assert sorted(Grams.open(asked, setting)._table.keys.tolist()) == sorted(Grams(answers + turns, VOCAB, 1)._table.keys.tolist())
