"""Answers that a model wrote, and tracks that replay them before a real drafter.

An answer is recorded once, by a server that does not guess, and says for every place what any guess is worth. What look-ups such as
`suffix` guess there depends on what other requests have written by then, so nothing of it is recorded: the drafter itself runs inside the
simulation and hears of what became true when the policy lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from forerun.bench.errors import BenchError
from forerun.bench.http import Connection
from forerun.bench.launched import Launched, ours
from forerun.bench.traces import Offer, Track
from forerun.bench.workloads import Workload
from forerun.engine.drafters.draft import Commit, Drafter
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.verify import walk


class Answer(msgspec.Struct, frozen=True):
    """Token ids of a prompt and of what the model answered."""

    workload: str
    prompt: list[int]
    output: list[int]


def load(file: Path) -> list[Answer]:
    return [msgspec.json.decode(line, type=Answer) for line in file.read_bytes().splitlines() if line]


def save(file: Path, answers: Sequence[Answer]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers))


async def record(
    model_id: str, workloads: Sequence[Workload], count: int, tokens: int, form: Callable[[str], str], say: Callable[[str], None]
) -> list[Answer]:
    """One run for each of `count` prompts of each workload, on a server that does not guess. Raises BenchError when none starts or a
    request fails."""
    answers: list[Answer] = []
    async with Launched(ours(model_id, ["--speculator", "none"])) as server:
        connection = Connection(server.origin)
        for workload in workloads:
            for number, prompt in enumerate(workload.prompts[:count], 1):
                say(f"{workload.name}: {number} of {count}")
                inputs = form(prompt)
                parameters = {"max_new_tokens": tokens, "details": True}
                answer = await _post(connection, "/generate", {"inputs": inputs, "parameters": parameters})
                known = await _post(connection, "/tokenize", {"inputs": inputs})
                output = [token["id"] for token in answer["details"]["tokens"]]
                answers.append(Answer(workload.name, [token["id"] for token in known], output))
        connection.close()
    return answers


async def _post(connection: Connection, path: str, body: dict[str, Any]) -> Any:
    pieces: list[bytes] = []
    status = await connection.exchange("POST", path, msgspec.json.encode(body), pieces.append)
    answer = msgspec.json.decode(b"".join(pieces))
    if status != 200:
        raise BenchError(f"{path} answered {status}: {answer}")
    return answer


class Shelf:
    """A drafter, and the tracks of a simulation that it drafts for. Made anew for each simulation: it learns from what it sees."""

    def __init__(self, spec: str, most: int) -> None:
        self._drafter: Drafter = open_drafter(spec, Setting(nodes=most))
        self._rows = 0

    def tracks(self, answers: Sequence[Answer]) -> list[Track]:
        return [Replayed(self, answer) for answer in answers if len(answer.output) > 1]

    def row(self) -> int:
        self._rows += 1
        return self._rows - 1

    def ask(self, row: int, answer: Answer, heard: int, place: int, most: int) -> Offer:
        """What the drafter proposes when `place` tokens of the answer are known, after it was told what it had not heard."""
        known = [*answer.prompt, *answer.output[:place]]
        self._drafter.absorb(Commit([row], [heard], [known[heard:-1]], [known[-1]], prompt=[len(answer.prompt)]))
        (draft,) = self._drafter.propose([row], [most])
        picks = [answer.output[place], *([-1] * draft.count)]
        held = [False] * draft.count
        reached: list[int] = []
        for node, (token, parent) in enumerate(zip(draft.token, draft.parent)):
            depth = 0 if parent < 0 else reached[parent]
            truth = depth >= 0 and place + depth < len(answer.output) and token == answer.output[place + depth]
            reached.append(depth + 1 if truth else -1)
            if truth:
                picks[1 + node] = answer.output[place + depth + 1] if place + depth + 1 < len(answer.output) else -1
        for node in walk(draft, picks):
            held[node] = True
        return Offer(draft.parent, draft.confidence, held)

    def forget(self, row: int) -> None:
        self._drafter.forget([row])


class Replayed:
    """An answer as a track."""

    def __init__(self, shelf: Shelf, answer: Answer) -> None:
        self.prompt = len(answer.prompt)
        self.length = len(answer.output)
        self._shelf = shelf
        self._answer = answer
        self._row = shelf.row()
        self._heard = 0

    def offer(self, place: int, most: int) -> Offer:
        if most < 1:
            return Offer([], [], [])
        offer = self._shelf.ask(self._row, self._answer, self._heard, place, most)
        self._heard = self.prompt + place - 1
        return offer

    def close(self) -> None:
        if self._heard:
            self._shelf.forget(self._row)
