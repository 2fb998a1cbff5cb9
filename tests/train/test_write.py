"""Text is written once: a run that was stopped and one that was not end with the same conversations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.messages import Start
from forerun.train.frame import Frame
from forerun.train.shards import Record, encode, read
from forerun.train.states import Keeper, Shelf
from forerun.train.taps import Taps
from forerun.train.target import Target
from forerun.train.write import ANSWER, TURN, Conversations, Gathered, Wanted, conversations_of, gather, same_text
from tests.train.conftest import open_tiny

TOKENS, LIMIT = 260, 20


class Killed(Exception):
    pass


def run(folder: Path, path: Path, tokens: int = TOKENS, rows: int = 5, seed: int = 3, stop_after: int = 1 << 30) -> int:
    """Returns how many lines were said. `stop_after`: texts after which the process dies."""
    said: list[str] = []

    def opened() -> Target:
        target = open_tiny(folder, rows)
        write = target.write

        def mortal(next_job):  # type: ignore[no-untyped-def]
            for count, text in enumerate(write(next_job)):
                if count == stop_after:
                    raise Killed
                yield text

        target.write = mortal  # type: ignore[method-assign]
        return target

    gather(opened, Frame(folder), path, Wanted(seed, tokens, LIMIT), said.append)
    return len(said)


def data(records: list[Record]) -> list[bytes]:
    return [encode(record) for record in records]


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    path = tmp_path_factory.mktemp("whole") / "text.bin"
    run(folder, path)
    return data(conversations_of(path, TOKENS))


@pytest.mark.parametrize("stops", [[3], [1, 9, 14]])
def test_a_run_that_was_killed_ends_with_the_same_text(folder: Path, tmp_path: Path, whole: list[bytes], stops: list[int]) -> None:
    path = tmp_path / "text.bin"
    for rows, stop in enumerate(stops, 2):
        with pytest.raises(Killed):
            run(folder, path, rows=rows, stop_after=stop)
        with path.open("ab") as file:
            file.write(b"torn")
    run(folder, path)
    assert data(conversations_of(path, TOKENS)) == whole


def test_more_text_begins_with_the_same_text(folder: Path, tmp_path: Path, whole: list[bytes]) -> None:
    path = tmp_path / "text.bin"
    run(folder, path, tokens=2 * TOKENS, rows=3)
    assert data(conversations_of(path, TOKENS)) == whole
    longer = data(conversations_of(path, 2 * TOKENS))
    assert longer[: len(whole)] == whole and len(longer) > len(whole)


def test_what_is_there_is_not_written_again(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    run(folder, path)
    before = path.read_bytes()

    def never() -> Target:
        raise AssertionError("the target was opened")

    gather(never, Frame(folder), path, Wanted(3, TOKENS, LIMIT), lambda line: None)
    assert path.read_bytes() == before


def test_another_seed_is_another_text(folder: Path, tmp_path: Path, whole: list[bytes]) -> None:
    path = tmp_path / "text.bin"
    run(folder, path, seed=4)
    assert data(conversations_of(path, TOKENS)) != whole


def test_an_answer_follows_its_turn(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    run(folder, path)
    frame = Frame(folder)
    found = conversations_of(path, TOKENS)
    assert [record.number for record in found] == list(range(len(found)))
    assert [record.kind for record in found] == [TURN, ANSWER] * (len(found) // 2)
    jobs = Conversations(frame, 3, 192, LIMIT)
    for turn, answer in zip(found[::2], found[1::2]):
        assert turn.tokens[: turn.prompt].tolist() == jobs.turn(turn.number // 2).prompt
        assert answer.tokens[: answer.prompt].tolist() == jobs.answer(turn).prompt
        assert answer.generated <= LIMIT
    samples = [jobs.answer(turn).sample for turn in found[::2]]
    assert any(samples) and not all(samples)


def test_too_little_text_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    run(folder, path)
    with pytest.raises(ValueError, match="answered tokens"):
        conversations_of(path, 100 * TOKENS)


def test_conversations_behind_a_gap_do_not_count() -> None:
    def answer(number: int) -> Record:
        return Record(2 * number + 1, ANSWER, 1, np.zeros(11, np.uint32), np.zeros((10, 1), np.uint32), np.zeros((10, 1), np.float16))

    gathered = Gathered([answer(0), answer(2)])
    assert (gathered.count, gathered.tokens, gathered.all_tokens) == (1, 10, 20)
    gathered.add(answer(1))
    assert (gathered.count, gathered.tokens) == (3, 30)


def test_text_of_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    same_text(path, folder, 0, 512)
    same_text(path, folder, 0, 512)
    for seed, longest in ((1, 512), (0, 256)):
        with pytest.raises(ValueError, match="another --work"):
            same_text(path, folder, seed, longest)


def test_records_are_flushed_as_they_are_made(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    with pytest.raises(Killed):
        run(folder, path, stop_after=4)
    assert len(read(path)) == 4


def test_states_that_are_kept_while_text_is_written_are_those_that_are_read(folder: Path, tmp_path: Path) -> None:
    """Of answers, whose prompts were read in one step and whose tokens one by one, beside other texts. The target is not run again."""
    shelf, start = Shelf(tmp_path / "states", 1 << 30), Start(model_id=str(folder), device="cpu", threads=1)
    path, layers = tmp_path / "text.bin", (1, 0, 2)
    gather(
        lambda: Target(start, 5, 192, 8, layers), Frame(folder), path, Wanted(3, TOKENS, LIMIT), lambda line: None, Keeper(shelf, layers)
    )
    answers = [record for record in conversations_of(path, TOKENS) if record.kind == ANSWER]
    for expected, record in zip(Taps(start, layers).read(answers), answers, strict=True):
        found = Keeper(shelf, layers).kept(record, 64)
        assert found is not None and torch.equal(found.float(), expected)


def test_a_layer_that_the_target_has_not_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no layer 3: it has 0 to 2, .*and -1"):
        Target(Start(model_id=str(folder), device="cpu", threads=1), 5, 192, 8, (1, 3))
