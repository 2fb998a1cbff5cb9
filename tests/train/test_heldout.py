"""What acceptance is measured on is never learnt from, and is answered once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from forerun.train.frame import Frame
from forerun.train.heldout import EVERY, Prompts, answered, split
from forerun.train.shards import Record, encode
from forerun.train.target import Target
from tests.train.conftest import open_tiny


def test_one_conversation_in_so_many_is_held_out_and_turns_stand_apart() -> None:
    empty = np.zeros((1, 1))
    text = [
        Record(number, number % 2, 1, np.zeros(2, np.uint32), empty.astype(np.uint32), empty.astype(np.float16))
        for number in range(8 * EVERY)
    ]
    learnt, turns, held = split(text)
    assert {record.kind for record in learnt + held} == {1} and {record.kind for record in turns} == {0}
    assert len(held) == 4 and len(learnt) == 4 * EVERY - 4
    assert [record.number + 1 for record in turns] == [record.number for record in learnt], "turns of held out answers are not learnt from"
    assert not {record.number for record in learnt} & {record.number for record in held}


def test_prompts_are_answered_greedily_and_once(folder: Path, tmp_path: Path) -> None:
    files = []
    for name, words in (("one", ["red", "green", "blue"]), ("two", ["green", "black"])):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"turns": [word]}) + "\n" for word in words))
    frame, path, said = Frame(folder), tmp_path / "held.bin", []

    def ask(count: int) -> dict[str, list[Record]]:
        prompts = Prompts(tuple(files), count, 10, 60)
        return answered(lambda: open_tiny(folder), frame, path, prompts, said.append)

    first = ask(1)
    assert {name: len(found) for name, found in first.items()} == {"one": 1, "two": 1}
    more = ask(3)
    assert {name: len(found) for name, found in more.items()} == {"one": 3, "two": 1}, "a prompt counts once"
    assert encode(more["one"][0]) == encode(first["one"][0])
    for record in more["one"]:
        assert record.tokens[record.prompt :].tolist() == record.candidates[:, 0].tolist()
    size = path.stat().st_size

    def never() -> Target:
        raise AssertionError("the target was opened")

    again = answered(never, frame, path, Prompts(tuple(files), 3, 10, 60), said.append)
    assert path.stat().st_size == size and encode(again["two"][0]) == encode(more["two"][0])


def test_a_long_prompt_loses_its_head(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"turns": ["word " * 100]}) + "\n")
    found = answered(lambda: open_tiny(folder), Frame(folder), tmp_path / "held.bin", Prompts((file,), 1, 8, 50), lambda line: None)
    record = found["long"][0]
    assert record.prompt == 42 and record.tokens[:42].tolist() == Frame(folder).asked("word " * 100)[-42:]
