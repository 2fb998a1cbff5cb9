"""What other people's grammars do to streams that have none: the pauses between their tokens while grammars are read, compiled and
followed, and without, in turns.

Everything runs on the cores of this machine, the attackers too. Other programs can only lengthen a pause, so of each kind the round with
the shortest counts: it is what the server itself does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from forerun.bench import prompts
from forerun.bench.apis import APIS, Ask
from forerun.bench.bars import Bar
from forerun.bench.errors import BenchError
from forerun.bench.http import Connection
from forerun.bench.launched import Launched, ours
from forerun.bench.load import Amount, Load, Target
from forerun.bench.records import Shape
from forerun.bench.stats import Summary, summarize

PROMPT_TOKENS, TOKENS = 32, 150
MOST = 2.0
"""A bystander's 99th percentile pause beside grammars, in those without: a step may lose one of two cores, and no more."""


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"type": "json", "value": nested(90)},
    "exponential": {"type": "regex", "value": "(.*a.{20}){30}b"},
    "a million": {"type": "regex", "value": "a{1000000}"},
    "later a million": {"type": "regex", "value": "[ab]a{1000000}"},
    "many values": {"type": "json", "value": {"properties": {"a": {"enum": [f"{i} of many" for i in range(12_000)]}}}},
    "loop": {"type": "json", "value": {"$ref": "#"}},
    "two loops": {"type": "json", "value": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    "endless": {"type": "json", "value": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    "contradiction": {"type": "json", "value": {"properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["a"]}},
    "a megabyte": {"type": "json", "value": {"properties": {"a": {"const": "x" * 1_000_000}}}},
    "a long text": {"type": "json", "value": {"properties": {"a": {"const": "x" * 200_000}}, "required": ["a"]}},
    "combinations": {
        "type": "json",
        "value": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(9)]} for i in range(9)]},
    },
    "unreadable": {"type": "regex", "value": "(((("},
    "a lot of text": {"type": "json", "value": '{"properties":' * 50_000},
}
"""bad, huge and contradictory"""
WIDE = {f"field_{i}": {"type": "string"} for i in range(100)}
HONEST: dict[str, dict[str, Any]] = {
    "a hundred fields": {"type": "json", "value": {"type": "object", "properties": WIDE, "required": list(WIDE)}},
    "an address": {"type": "regex", "value": r"[a-z]+@[a-z]+\.(com|org)"},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    rounds: int = 5
    seconds: float = 6.0
    streams: int = 4
    attackers: int = 4

    @classmethod
    def quick(cls) -> Settings:
        return cls(rounds=2, seconds=3.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """`gaps`: milliseconds between tokens of the bystanders. `answers`: of the grammars, by status; none in a turn without."""

    beside: bool
    gaps: Summary
    answers: dict[str, int]


class Grammars:
    """Measures one server of our own; without guesses unless `flags` ask for them, so that every pause is one token's."""

    def __init__(self, model_id: str, flags: Sequence[str], settings: Settings, progress: Callable[[str], None]) -> None:
        self._program = ours(model_id, [*([] if "--speculator" in flags else ["--speculator", "none"]), *flags])
        self._settings = settings
        self._progress = progress
        self._numbers = itertools.count()
        self.turns: list[Turn] = []

    async def run(self) -> list[Bar]:
        async with Launched(self._program) as server:
            await server.settled()
            for number in range(self._settings.rounds):
                for beside in (False, True) if number % 2 else (True, False):
                    self.turns.append(await self._turn(server, beside))
                    gaps = self.turns[-1].gaps
                    self._progress(f"round {number + 1}, {'with' if beside else 'without'} grammars: {gaps.p50:.1f} / {gaps.p99:.1f} ms")
        return bars(self.turns)

    async def _turn(self, server: Launched, beside: bool) -> Turn:
        target = Target(server.origin, APIS["tgi"])
        load = Load(target, Ask(TOKENS), prompts.synthetic(PROMPT_TOKENS, seed=next(self._numbers)))
        answers: Counter[str] = Counter()
        attackers = [asyncio.create_task(self._attack(server, answers)) for _ in range(self._settings.attackers if beside else 0)]
        try:
            records = await load.run(Shape(streams=self._settings.streams), Amount(seconds=self._settings.seconds, cut=True))
        finally:
            for attacker in attackers:
                attacker.cancel()
            await asyncio.gather(*attackers, return_exceptions=True)
        if failed := [record.error for record in records if record.error]:
            raise BenchError(f"a bystander failed: {failed[0]}")
        return Turn(beside, summarize((gap for record in records for gap in record.gaps), 1000), dict(answers))

    async def _attack(self, server: Launched, answers: Counter[str]) -> None:
        while True:
            connection = Connection(server.origin, {})
            status = await connection.exchange("POST", "/generate", self._body(next(self._numbers)), lambda data: None)
            answers[str(status)] += 1
            connection.close()

    def _body(self, number: int) -> bytes:
        """A grammar that the server has not seen, so that nothing of it is remembered."""
        kinds = [*HOSTILE.values(), *HONEST.values()]
        grammar = dict(kinds[number % len(kinds)])
        value = grammar["value"]
        grammar["value"] = value | {"title": str(number)} if grammar["type"] == "json" and type(value) is dict else f"{value}{number}"
        return json.dumps({"inputs": "hello", "parameters": {"max_new_tokens": 12, "grammar": grammar}}).encode()


def bars(turns: Sequence[Turn]) -> list[Bar]:
    """Of each kind of turn the one with the shortest pauses. Raises ValueError where one kind has none."""
    beside, without = (min((turn.gaps for turn in turns if turn.beside == kind), key=lambda gaps: gaps.p99) for kind in (True, False))
    answered = dict(sum((Counter(turn.answers) for turn in turns), Counter()))
    pauses = f"p99 {beside.p99:.1f} against {without.p99:.1f} ms, p50 {beside.p50:.1f} against {without.p50:.1f}"
    note = f"{pauses}; grammars by status: {answered}"
    return [Bar("bystanders' p99 gap beside grammars", beside.p99 / without.p99, "≤", MOST, "of without", note)]
