"""The machine of a simulation: what a step really takes, which the controller may only infer.

Shapes of real devices, in units of a plain step of one row: see docs/controller.md for where they come from.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from forerun.router.controller.cost import Costs

Weather = Callable[[float, int], float]
"""(seconds since the start, rows) → factor by which a step of so many rows is slower just now"""


def fair(now: float, rows: int) -> float:
    return 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """`steps`: (rows, seconds), on lines between and in proportion beyond. `draft_step`, `draft_each`: seconds of drafting whatever it is
    asked, and for each sequence asked about. `draft_node`: for each level of the deepest draft, where a drafter computes them one after
    the other. `draft_read`: for each token, prompt included, that a drafter which reads everything has not read yet.
    `noise`: relative deviation of step times; one in fifty takes three times as long on top."""

    name: str
    steps: tuple[tuple[int, float], ...]
    score_seconds: float = 0.0
    read_seconds: float = 0.0
    draft_step: float = 0.0
    draft_each: float = 3e-5
    draft_node: float = 0.0
    draft_read: float = 0.0
    noise: float = 0.03
    weather: Weather = fair

    def seconds(self, rows: int, read: int, scored: int, now: float = 0.0) -> float:
        """Of a step, on average."""
        return (_line(self.steps, rows) + read * self.read_seconds + scored * self.score_seconds) * self.weather(now, rows)

    def seen(self, seconds: float, dice: random.Random) -> float:
        """What a clock says about a step that takes so long on average."""
        outlier = 3.0 if self.noise and dice.random() < 0.02 else 1.0
        return seconds * max(0.5, dice.gauss(1.0, self.noise)) * outlier

    def drafting(self, asked: int, depth: int, unread: int) -> float:
        if not asked:
            return 0.0
        return self.draft_step + self.draft_each * asked + self.draft_node * depth + self.draft_read * unread

    def profile(self, dice: random.Random) -> Costs:
        """What a worker would measure at start."""
        counts = [*range(1, 33), 40, 48, 64, 96, 128, 192, 256, 384, 512]
        return Costs(
            [(rows, _line(self.steps, rows) * dice.uniform(0.97, 1.03)) for rows in counts],
            contexts=[(512, self.read_seconds * dice.uniform(0.8, 1.2), self.score_seconds * dice.uniform(0.8, 1.2))],
        )


def _line(steps: tuple[tuple[int, float], ...], rows: int) -> float:
    (low, low_seconds), *rest = steps
    for high, high_seconds in rest:
        if rows <= high:
            return low_seconds + (high_seconds - low_seconds) * max(0, rows - low) / (high - low)
        low, low_seconds = high, high_seconds
    return low_seconds * rows / low


CPU = Machine(
    "cpu bf16",
    ((1, 6.0e-3), (4, 6.3e-3), (8, 6.8e-3), (12, 8.6e-3), (16, 10.5e-3), (32, 18.5e-3), (64, 35e-3)),
    score_seconds=4e-7,
    read_seconds=6e-7,
)
"""two cores, a model of 135M parameters: eight rows for the price of one, then in proportion"""
STAIR = Machine("cpu f32", ((1, 10e-3), (2, 22e-3), (8, 24e-3), (16, 31e-3), (32, 52e-3), (64, 100e-3)), score_seconds=4e-7)
"""a single row takes a path of its own: two cost more than twice as much, and then six more are nearly free"""
GPU = Machine("gpu", ((1, 12e-3), (64, 12.4e-3), (128, 13.5e-3), (256, 19e-3), (512, 36e-3)), draft_each=2e-5)
"""a large model on a large device: two hundred rows before arithmetic counts"""
NATIVE = Machine(
    "native bf16",
    (
        (1, 10.3e-3),
        (8, 11.6e-3),
        (12, 13.2e-3),
        (13, 15.6e-3),
        (16, 17.0e-3),
        (24, 21.8e-3),
        (32, 27.9e-3),
        (64, 51.8e-3),
        (128, 100.5e-3),
    ),
    score_seconds=4.6e-7,
    read_seconds=1.1e-6,
    draft_each=1.2e-4,
)
"""the same model in our own kernels on two cores, as the profile at start measured it; a look-up takes what it takes in a worker"""
