"""What guesses cost beyond their rows is told from what the machine does, crowd by crowd."""

from __future__ import annotations

import math
import random

import pytest

from forerun.router.controller.cost import Costs, CostTable

STEPS = [(1, 0.009), (8, 0.011), (16, 0.015), (32, 0.031), (40, 0.038), (64, 0.06)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dearer", [0.85, 1.0, 1.2])
def test_weather_that_moves_by_half_within_seconds_is_not_taken_for_the_cost_of_guesses(dearer: float, seed: int) -> None:
    """Two plain steps in thirty-four, on a machine that becomes faster and slower in between, and stands still now and then."""
    chance, table, weather = random.Random(seed), CostTable(Costs(STEPS), 2048), 0.0
    for number in range(800):
        weather = 0.98 * weather + chance.gauss(0.0, 0.04)
        guessing = number % 34 > 1
        rows = 40 if guessing else 32
        noise = math.exp(weather + chance.gauss(0.0, 0.03)) * (20.0 if chance.random() < 0.03 else 1.0)
        table.correct(table.profiled(rows, 32) * noise * (dearer if guessing else 1.0), rows, 32, guessing=guessing)
    assert table.seconds(40, 32, guessing=True) / table.seconds(32, 32) == pytest.approx(dearer * STEPS[4][1] / STEPS[3][1], rel=0.06)


def test_plain_steps_are_known_from_steps_with_guesses_when_the_machine_changes() -> None:
    """What guesses cost is known from before; then the machine is slower by half, and nobody sees a plain step."""
    table = CostTable(Costs(STEPS), 2048)
    for number in range(100):
        guessing = number % 4 > 1
        table.correct(
            table.profiled(40 if guessing else 32, 32) * (1.2 if guessing else 1.0), 40 if guessing else 32, 32, guessing=guessing
        )
    for _ in range(40):
        table.correct(table.profiled(40, 32) * 1.2 * 1.5, 40, 32, guessing=True)
    assert table.seconds(32, 32) == pytest.approx(1.5 * table.profiled(32, 32), rel=0.08)


def test_a_look_at_plain_steps_shows_that_guesses_never_paid() -> None:
    """From the first step on all had guesses, so that what these cost was taken for the machine's: a few looks put it right."""
    table = CostTable(Costs(STEPS), 2048)
    for _ in range(200):
        table.correct(table.profiled(40, 32) * 1.3, 40, 32, guessing=True)
    assert table.seconds(32, 32) > 1.2 * table.profiled(32, 32)
    for _ in range(4):
        for number in range(34):
            guessing = number > 1
            table.correct(
                table.profiled(40 if guessing else 32, 32) * (1.3 if guessing else 1.0), 40 if guessing else 32, 32, guessing=guessing
            )
    assert table.seconds(32, 32) == pytest.approx(table.profiled(32, 32), rel=0.06)
    assert table.seconds(40, 32, guessing=True) == pytest.approx(1.3 * table.profiled(40, 32), rel=0.06)


def test_a_crowd_that_changes_its_size_with_every_step_learns_as_well() -> None:
    """Sixteen and seventeen sequences are crowds of two kinds; steps of one kind stand between those of the other."""
    table, chance = CostTable(Costs(STEPS), 2048), random.Random(0)
    for number in range(400):
        rows, guessing = 16 + number % 2, number // 2 % 3 > 0
        seconds = table.profiled(rows + 8 * guessing, rows) * (1.2 if guessing else 1.0) * math.exp(chance.gauss(0.0, 0.02))
        table.correct(seconds, rows + 8 * guessing, rows, guessing=guessing)
    for rows in (16, 17):
        ratio = table.seconds(rows + 8, rows, guessing=True) / table.profiled(rows + 8, rows) * table.profiled(rows, rows)
        assert ratio / table.seconds(rows, rows) == pytest.approx(1.2, rel=0.05)


@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_a_comparison_counts_by_the_noise_of_steps(noise: float) -> None:
    """Two steps with guesses among plain ones took a fifth longer. Where steps are alike that says so, and nothing where they are not; and
    what is in doubt afterwards says as much."""
    table, chance = CostTable(Costs(STEPS), 2048), random.Random(0)
    for number in range(300):
        off = noise * (number % 2 * 2 - 1) * chance.uniform(0.5, 1.5)
        table.correct(table.profiled(32, 32) * math.exp(off), 32, 32)
    for _ in range(2):
        table.correct(table.profiled(40, 32) * 1.2, 40, 32, guessing=True)
    assert (table.jump > 1.1, table.jump < 1.05) == (noise < 0.1, noise > 0.1)
    assert (table.doubt(32, 32) < 0.03, table.doubt(32, 32) > 0.05) == (noise < 0.1, noise > 0.1)
