"""What acceptance is measured on: greedy answers of the target to prompts that are not learnt from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from forerun.train.frame import Frame
from forerun.train.progress import Say, Stage
from forerun.train.shards import Appender, Record
from forerun.train.target import Job, Target
from forerun.train.write import record_of

OWN = "own text"
EVERY = 40
"""of the target's own conversations one in so many is held out"""


def split(text: Sequence[Record]) -> tuple[list[Record], list[Record], list[Record]]:
    """(answers to learn from, the turns that these answer, answers that are held out). Heads learn from turns as far as answers follow
    them: users write them."""
    learnt = [record for record in text if record.number // 2 % EVERY]
    held = [record for record in text if not record.number // 2 % EVERY and record.number % 2]
    return [record for record in learnt if record.number % 2], [record for record in learnt if not record.number % 2], held


def read_prompts(path: Path, count: int) -> list[str]:
    """The first turns of the first `count` lines {"turns": ["…", …]}. ValueError where a line is something else."""
    found: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if len(found) < count and line.strip():
            try:
                found.append(str(json.loads(line)["turns"][0]))
            except (ValueError, KeyError, IndexError, TypeError) as wrong:
                raise ValueError(f'{path}, line {number}: expected {{"turns": ["first message", …]}}') from wrong
    if not found:
        raise ValueError(f"{path} has no prompts")
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Prompts:
    """The first `count` prompts of each of `files`, answered with at most `limit` tokens. A prompt that leaves no room for that among
    `longest` tokens loses its head."""

    files: tuple[Path, ...]
    count: int
    limit: int
    longest: int


def answered(open_target: Callable[[], Target], frame: Frame, path: Path, prompts: Prompts, say: Say) -> dict[str, list[Record]]:
    """Greedy answers, by the name of the prompts' file. What `path` holds already is not written again."""
    asked: dict[tuple[int, ...], str] = {}
    for file in prompts.files:
        for turn in read_prompts(file, prompts.count):
            asked.setdefault(tuple(frame.asked(turn)[-(prompts.longest - prompts.limit) :]), file.stem)
    store = Appender(path)
    try:
        found = {(tuple(record.tokens[: record.prompt].tolist()), record.kind): record for record in store.found}
        missing = [prompt for prompt in asked if (prompt, prompts.limit) not in found]
        if missing:
            jobs = iter([Job(number, list(prompt), prompts.limit, False, 0) for number, prompt in enumerate(missing)])
            progress = Stage("answering held-out prompts", "prompts", len(missing), 0, say)
            for done, written in enumerate(open_target().write(lambda: next(jobs, None)), 1):
                record = record_of(written, prompts.limit)
                found[tuple(written.job.prompt), prompts.limit] = record
                store.append(record)
                progress.reached(done)
    finally:
        store.close()
    groups: dict[str, list[Record]] = {}
    for prompt, name in asked.items():
        groups.setdefault(name, []).append(found[prompt, prompts.limit])
    return groups
