"""Attached, a drafter is warm: the first time that it is asked about anybody costs what every other time does.

The controller measures what asking takes, and a slow first time would keep it from asking again for long. No clock tells here: every op
that an ask makes was made before, of as many rows, while the drafter was opened and attached. Replays of what was recorded then are no ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from forerun.backends.base import Backend, Weight
from forerun.backends.registry import open_backend
from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Terms
from forerun.engine.drafters.layouts import TABLES
from forerun.engine.drafters.registry import Host, Setting, open_drafter
from forerun.messages import Start
from tests.engine.test_identity import prompt_of
from tests.engine.test_registered import ALL, PYTHON, folders
from tests.engine.tiny import ROWS, Front, Sequence_, TinyModel, params_for, tiny_engine

HERE = [spec for spec in ALL if not spec.startswith("remote")]
"""what computes in the worker, if anywhere"""
Op = tuple[str, *tuple[tuple[int, ...], ...]]
"""its name, and the shape of each operand without its rows"""


def shapes(operands: Iterable[Any]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(rows, what a row is) of what has rows; a weight is a row."""
    for operand in operands:
        if isinstance(operand, torch.Tensor) and operand.ndim:
            yield operand.shape[0], tuple(operand.shape[1:])
        elif isinstance(operand, Weight):
            yield 1, operand.shape
        elif isinstance(operand, list):
            yield from shapes(operand)


class Heard:
    """Ops, of which it is written down how many rows each was made of at the most: `before` anybody is asked about, and in `asks`."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.before: dict[Op, int] = {}
        self.asks: dict[Op, int] = {}
        self.asking = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._ops, name)

        def heard(*operands: Any, **named: Any) -> Any:
            known = self.asks if self.asking else self.before
            rows, each = zip(*shapes([*operands, *named.values()]))
            known[name, *each] = max(known.get((name, *each), 0), rows[0])
            return function(*operands, **named)

        return heard


class Ear:
    """A backend whose ops are heard."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.ops = Heard(backend.ops)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class Asked:
    """A drafter that is attached already, and asked from now on."""

    def __init__(self, drafter: Drafter, ops: Heard) -> None:
        self._drafter, self._ops = drafter, ops
        self.needs = drafter.needs
        self.guesses = 0

    def absorb(self, commit: Commit) -> None:
        self._ops.asking = True
        self._drafter.absorb(commit)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        drafts = self._drafter.propose(rows, budget, terms)
        self.guesses += sum(draft.guesses for draft in drafts)
        return drafts

    def forget(self, rows: list[int]) -> None:
        self._drafter.forget(rows)


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("spec", HERE)
def test_the_first_ask_makes_nothing_new(spec: str, rows: int) -> None:
    ear = Ear(open_backend("cpu", 1))
    models = folders()[1]
    host = Host(Start(str(models["itself"]), max_rows=ROWS), ear, TinyModel(ear), lambda *progress: None)
    ear.ops.before.clear()
    around = Setting(8, True, host, native=not spec.startswith(PYTHON))
    drafter = open_drafter(spec.removeprefix(PYTHON).format(**models), around)
    asked = Asked(drafter, ear.ops)
    front = Front(tiny_engine(asked))
    for seed in range(rows):
        prompt = prompt_of(seed, 21)
        front.admit(Sequence_(prompt, params_for(prompt, max_new_tokens=12)))
    front.run(guess=8)
    new = {op: count for op, count in ear.ops.asks.items() if count > ear.ops.before.get(op, 0)}
    assert not new
    assert asked.guesses
    looks_up = {part.partition("=")[0] for part in spec.removeprefix(PYTHON).split("+")} <= {"suffix", *TABLES}
    assert ear.ops.before or looks_up or not drafter.needs.weight_bytes, "whoever has weights to multiply uses them beforehand"
