"""What guesses of a crowd came to beside what was hoped of them, in steps whose times are noisy."""

from __future__ import annotations

import random

import pytest

from forerun.router.controller.proof import Proof

NOISE = 0.08


def told(proof: Proof, hoped: float, came: float, rounds: int, slower: float = 1.0, dice: random.Random | None = None) -> Proof:
    """Steps with guesses and plain ones in turns. With guesses they take 1.3 times as long, and bring `came` beyond that; all take `slower`
    times what is estimated."""
    dice = dice or random.Random(0)
    for _ in range(rounds):
        proof.plain(slower * dice.lognormvariate(0.0, NOISE))
        proof.hope(hoped)
        proof.guessed(1.3 + came, slower * 1.3 * dice.lognormvariate(0.0, NOISE), 0.01, NOISE)
    return proof


def test_nothing_is_charged_before_anything_was_seen() -> None:
    proof = Proof()
    proof.guessed(0.5, 2.0, 0.01, NOISE)  # decided by nobody
    assert proof.charge == 0.0


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.25])
def test_what_guesses_lack_of_what_was_hoped_is_charged_however_wrong_plain_steps_were_estimated(slower: float) -> None:
    charges = [told(Proof(), 0.05, -0.05, 60, slower, random.Random(seed)).charge for seed in range(8)]
    assert 0.04 < sum(charges) / 8 < 0.11 and min(charges) > 0.01


@pytest.mark.parametrize(("hoped", "came"), [(0.1, 0.1), (1.0, 0.6)])
def test_guesses_that_win_are_charged_next_to_nothing_whatever_was_hoped(hoped: float, came: float) -> None:
    assert told(Proof(), hoped, came, 60).charge < 0.02


def test_what_was_won_fades_while_nobody_guesses_and_so_does_what_it_excused() -> None:
    """Guesses won clearly, whatever was hoped. Long after, the same may be charged again for what they lack."""
    proof = told(Proof(), 1.0, 0.6, 60)
    assert proof.charge < 0.02
    won = proof._won
    for _ in range(600):
        proof.plain(1.0)
    assert 0.0 < proof._won < 0.4 * won


def test_a_charge_fades_while_nobody_guesses() -> None:
    proof = told(Proof(), 0.05, -0.05, 60)
    before = proof.charge
    for _ in range(600):
        proof.plain(1.0)
    assert 0.0 < proof.charge < 0.4 * before
