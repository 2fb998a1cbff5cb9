"""The file that text is gathered in: one record after another, each whole or not there.

    record   number, kind, prompt, count, width      five uint32
             prompt + count token ids                uint32
             count × width candidate ids             uint32     the target's most likely next tokens at each generated place
             count × width log-probabilities         float16

Records are appended as they are finished, so their order is that of time; `number` says which piece of text it is. A process that is
killed in the middle of a record leaves a torn one, which is cut off when the file is opened again. Knows nothing of what the text is for.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

HEADER = 5
WORD = np.dtype("<u4")
HALF = np.dtype("<f2")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One piece of text that the target wrote. `tokens`: the prompt's ids, then the generated ones. `candidates`, `logprobs`
    [generated, width]: what the target thought most likely at each generated place, best first, and how likely."""

    number: int
    kind: int
    prompt: int
    tokens: NDArray[np.uint32]
    candidates: NDArray[np.uint32]
    logprobs: NDArray[np.float16]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt


def encode(record: Record) -> bytes:
    width = record.candidates.shape[1]
    header = np.array([record.number, record.kind, record.prompt, record.generated, width], WORD)
    parts = (header, record.tokens.astype(WORD), record.candidates.astype(WORD), record.logprobs.astype(HALF))
    return b"".join(part.tobytes() for part in parts)


def records(data: bytes) -> Iterator[tuple[Record, int]]:
    """Every whole record, and where it ends."""
    at = 0
    while at + HEADER * WORD.itemsize <= len(data):
        number, kind, prompt, count, width = np.frombuffer(data, WORD, HEADER, at).tolist()
        at += HEADER * WORD.itemsize
        if at + WORD.itemsize * (prompt + count + count * width) + HALF.itemsize * count * width > len(data):
            return
        tokens = np.frombuffer(data, WORD, prompt + count, at)
        at += tokens.nbytes
        candidates = np.frombuffer(data, WORD, count * width, at).reshape(count, width)
        at += candidates.nbytes
        logprobs = np.frombuffer(data, HALF, count * width, at).reshape(count, width)
        at += logprobs.nbytes
        yield Record(number, kind, prompt, tokens, candidates, logprobs), at


def read(path: Path) -> list[Record]:
    """The whole records of a file, in the order they were written; none if it is not there."""
    return [record for record, _ in records(path.read_bytes())] if path.exists() else []


class Appender:
    """Opens a file for more records; what a killed process left torn is cut off. `found`: the records that are there."""

    def __init__(self, path: Path) -> None:
        pairs = list(records(path.read_bytes())) if path.exists() else []
        self.found = [record for record, _ in pairs]
        self._file: BinaryIO = path.open("ab")
        self._file.truncate(pairs[-1][1] if pairs else 0)

    def append(self, record: Record) -> None:
        self._file.write(encode(record))
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
