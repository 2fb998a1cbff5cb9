"""Scenarios that nobody chose: machine, load, text and answers are drawn from a seed.

They say how a policy does beyond the scenarios that its constants were chosen on (`scenarios.py`). What is looked into here must be judged
by another seed afterwards.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from forerun.bench.machine import CPU, GPU, NATIVE, STAIR, Machine
from forerun.bench.scenarios import DRAFT_MODEL
from forerun.bench.simulate import Scenario
from forerun.bench.traces import Regime, mixed, switching

LOADS = (1, 2, 3, 6, 8, 12, 16, 24, 32, 48)
PROMPTS = (60, 240)
ANSWERS = (60, 120, 200, 300)


def unforeseen(count: int, seed: int) -> Iterator[Scenario]:
    """So many, each made from the seed and its number alone."""
    for number in range(count):
        yield _scenario(random.Random(f"unforeseen {seed} {number}"), f"{seed}.{number}")


def _scenario(dice: random.Random, name: str) -> Scenario:
    machine, load = _machine(dice), dice.choice(LOADS)
    regimes = [_regime(dice) for _ in range(dice.choice((1, 2, 3)))]
    count, tokens, prompt = max(6, 3 * load // 2), dice.choice(ANSWERS), dice.choice(PROMPTS)
    if len(regimes) > 1 and dice.random() < 0.4:
        tracks = switching(dice, regimes, count, tokens, prompt, max(20, tokens // 2))
    else:
        tracks = mixed(dice, regimes, count, tokens, prompt)
    return Scenario(f"{machine.name}, {name}, {load}", machine, tracks, clients=load)


def _machine(dice: random.Random) -> Machine:
    """One of the four, faster or slower, its stairs higher or lower, a fifth of the time with a draft model."""
    base = dice.choice((CPU, STAIR, GPU, NATIVE))
    machine = dataclasses.replace(base, steps=_distorted(dice, base.steps), noise=dice.uniform(0.01, 0.12))
    if dice.random() < 0.2:
        return dataclasses.replace(machine, name=f"{base.name} model", **DRAFT_MODEL)  # type: ignore[arg-type]
    return machine


def _distorted(dice: random.Random, steps: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    """Seconds still grow with rows: a step is never made shorter than the one before."""
    speed, slope = dice.uniform(0.5, 3.0), dice.uniform(0.7, 1.4)
    distorted: list[tuple[int, float]] = []
    longest = 0.0
    for rows, seconds in steps:
        longest = max(1.0001 * longest, seconds * speed * (1 + (slope - 1) * dice.random() * min(1.0, (rows - 1) / 16)))
        distorted.append((rows, longest))
    return tuple(distorted)


def _regime(dice: random.Random) -> Regime:
    """A quarter of them claim the same of every guess."""
    claim = dice.uniform(0.2, 1.0) if dice.random() < 0.25 else None
    return Regime(dice.uniform(0.05, 0.97), dice.uniform(0.0, 0.8), dice.uniform(0.0, 0.6), claim)
