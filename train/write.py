"""The text to learn from: conversations that the target invents and answers.

    number 2i      turn     the target finishes an opening (temperature 1)
    number 2i + 1  answer   the target answers that turn, greedily or (a third of them) at temperature 1

Conversation i depends on the seed, the target and i alone, and is written by a process that may be killed at any time: the next one goes
on with what is missing. The text for N tokens is that of conversations 0 … n−1, with the least n whose answers have N tokens, whatever
else was begun.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.train.frame import Frame
from forerun.train.openings import Opening, choose
from forerun.train.progress import Say, Stage
from forerun.train.shards import Appender, Record, read
from forerun.train.states import Keeper
from forerun.train.target import Job, Target, Written

TURN, ANSWER = 0, 1
SAMPLED = 1 / 3
"""how many answers are sampled"""
ANSWER_TOKENS = 256


def record_of(written: Written, kind: int) -> Record:
    job = written.job
    tokens = np.array([*job.prompt, *written.tokens], np.uint32)
    return Record(job.number, kind, len(job.prompt), tokens, np.stack(written.candidates), np.stack(written.logprobs))


class Conversations:
    """What the conversations of a seed are: their jobs, once it is known what came before."""

    def __init__(self, frame: Frame, seed: int, room: int, limit: int = ANSWER_TOKENS) -> None:
        self._frame, self._seed, self._room, self._limit = frame, seed, room, limit

    def _dice(self, number: int) -> tuple[Opening, bool, int]:
        dice = random.Random(f"{self._seed}/{number}")
        return choose(dice), dice.random() < SAMPLED, dice.getrandbits(64)

    def turn(self, number: int) -> Job:
        opening, _, seed = self._dice(number)
        return Job(2 * number, self._cut(self._frame.begun(opening.text)), opening.limit, True, seed)

    def answer(self, turn: Record) -> Job:
        number = turn.number // 2
        opening, sample, seed = self._dice(number)
        invented = self._frame.text(turn.tokens[turn.prompt :].tolist())
        prompt = self._frame.asked((opening.text + invented).strip() + opening.closing)
        return Job(2 * number + 1, self._cut(prompt), self._limit, sample, seed ^ 1, states=True)

    def _cut(self, prompt: list[int]) -> list[int]:
        """A prompt that leaves no room loses its head: what is learnt is how the target goes on."""
        return prompt[-(self._room - 1) :]


class Gathered:
    """Which records there are, and how many answered tokens the conversations from 0 on have without a gap."""

    def __init__(self, found: list[Record]) -> None:
        self.turns = {record.number // 2: record for record in found if record.kind == TURN}
        self._answered = {record.number // 2: record.generated for record in found if record.kind == ANSWER}
        self.count = 0
        self.tokens = 0
        self._advance()

    def add(self, record: Record) -> None:
        if record.kind == TURN:
            self.turns[record.number // 2] = record
        else:
            self._answered[record.number // 2] = record.generated
        self._advance()

    def has_answer(self, number: int) -> bool:
        return number in self._answered

    @property
    def all_tokens(self) -> int:
        """Answered tokens, those behind a gap included."""
        return sum(self._answered.values())

    def _advance(self) -> None:
        while self.count in self._answered:
            self.tokens += self._answered[self.count]
            self.count += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """The text that is wanted: of the conversations of `seed`, until answers of at most `limit` tokens have `tokens` together."""

    seed: int
    tokens: int
    limit: int = ANSWER_TOKENS


def gather(open_target: Callable[[], Target], frame: Frame, path: Path, wanted: Wanted, say: Say, keeper: Keeper | None = None) -> None:
    """Write what is missing of the text. The target is opened only if something is. `keeper`: keeps the states of answers that the target
    hands out."""
    file = Appender(path)
    gathered = Gathered(file.found)
    try:
        if gathered.tokens < wanted.tokens:
            target = open_target()
            conversations = Conversations(frame, wanted.seed, target.longest, wanted.limit)
            progress = Stage("writing text", "tokens", wanted.tokens, min(gathered.all_tokens, wanted.tokens), say)
            for record, states in _written(target, conversations, gathered, wanted.tokens):
                file.append(record)
                if record.kind == ANSWER and keeper is not None:
                    keeper.keep(record, torch.cat(states))
                progress.reached(min(gathered.all_tokens, wanted.tokens))
    finally:
        file.close()


def _written(target: Target, conversations: Conversations, gathered: Gathered, tokens: int) -> Iterator[tuple[Record, list[Tensor]]]:
    """Records as they end, each with pieces of its states, until `gathered` has so many answered tokens."""
    waiting: deque[Job] = deque()
    following = gathered.count

    def next_job() -> Job | None:
        nonlocal following
        if waiting:
            return waiting.popleft()
        if gathered.tokens >= tokens:
            return None
        while gathered.has_answer(following):
            following += 1
        number, following = following, following + 1
        turn = gathered.turns.get(number)
        return conversations.turn(number) if turn is None else conversations.answer(turn)

    for written in target.write(next_job):
        record = record_of(written, written.job.number % 2)
        gathered.add(record)
        if record.kind == TURN:
            waiting.append(conversations.answer(record))
        yield record, written.states
        if gathered.tokens >= tokens:
            return


def conversations_of(path: Path, tokens: int) -> list[Record]:
    """Turns and answers, by number, of the first conversations that have so many answered tokens. ValueError where the file has fewer."""
    found = read(path)
    gathered = Gathered([])
    for record in sorted(found, key=lambda record: record.number):
        if gathered.tokens < tokens:
            gathered.add(record)
    if gathered.tokens < tokens:
        raise ValueError(f"{path} has {gathered.tokens} answered tokens, {tokens} are asked for")
    return sorted((record for record in found if record.number < 2 * gathered.count), key=lambda record: record.number)


def same_text(path: Path, target: Path, seed: int, longest: int) -> None:
    """Remembers what the text beside `path` is of. ValueError when it is of something else."""
    named = [target / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in named if file.exists()))
    weights = sorted((file.name, file.stat().st_size) for file in target.glob("*.safetensors"))
    described = {"target": digest.hexdigest(), "weights": [list(one) for one in weights], "seed": seed, "longest": longest}
    if not path.exists():
        path.write_text(json.dumps(described) + "\n")
    elif json.loads(path.read_text()) != described:
        raise ValueError(f"{path.parent} holds text of another target, seed or length: give another --work, or remove it to begin again")
