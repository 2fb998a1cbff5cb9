"""A record is whole or not there, wherever the process that wrote it was killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.train.shards import Appender, Record, encode, read, records


def record(number: int, prompt: int = 2, count: int = 3, width: int = 2) -> Record:
    dice = np.random.default_rng(number)
    return Record(
        number,
        number % 2,
        prompt,
        dice.integers(0, 1 << 20, prompt + count).astype(np.uint32),
        dice.integers(0, 1 << 20, (count, width)).astype(np.uint32),
        -dice.random((count, width)).astype(np.float16),
    )


def same(left: Record, right: Record) -> bool:
    return encode(left) == encode(right)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)), max_size=4), st.integers(0, 400))
def test_a_file_that_is_cut_anywhere_keeps_its_whole_records(shapes: list[tuple[int, int, int]], cut: int) -> None:
    written = [record(number, *shape) for number, shape in enumerate(shapes)]
    ends = np.cumsum([len(encode(one)) for one in written])
    data = b"".join(map(encode, written))[:cut]
    found = list(records(data))
    assert len(found) == int((ends <= len(data)).sum())
    assert all(same(left, right) for (left, _), right in zip(found, written))


def test_what_a_killed_process_left_torn_is_cut_off_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(encode(record(0)) + encode(record(1))[:-1])
    file = Appender(path)
    assert [one.number for one in file.found] == [0]
    file.append(record(1))
    file.append(record(2))
    file.close()
    assert path.read_bytes() == b"".join(encode(record(number)) for number in range(3))
    assert [one.number for one in read(path)] == [0, 1, 2]


def test_a_file_that_is_not_there_has_no_records(tmp_path: Path) -> None:
    assert read(tmp_path / "none.bin") == []


@pytest.mark.parametrize("prompt", [1, 5])
def test_generated_tokens_are_those_behind_the_prompt(prompt: int) -> None:
    assert record(0, prompt, 4).generated == 4
