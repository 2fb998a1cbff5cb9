"""What went wrong in other servers' control of speculation, as far as a controller has a say in it. Numbers name the reports and failure
modes that each case comes from (C: user reports; F: failure modes)."""

from __future__ import annotations

import pytest

from forerun.config import Speculation
from forerun.router.controller.make import make
from forerun.router.controller.price import Price
from forerun.router.guesses import Controller, no_guesses
from tests.router.controller.streams import COSTS, World, seconds_of, sequence
from tests.router.controller.test_make import READY, ignore

ROUNDS = 1500


def speed(controller: Controller, world: World, streams: int, rounds: int = ROUNDS) -> float:
    """Tokens a second over those of plain steps."""
    running = [sequence() for _ in range(streams)]
    before = world.tokens, world.seconds
    for _ in range(rounds):
        world.step(controller, running)
    tokens, seconds = world.tokens - before[0], world.seconds - before[1]
    return tokens / seconds * seconds_of(streams) / streams


@pytest.mark.parametrize("streams", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("claim", [0.3, 0.9])
def test_a_useless_drafter_costs_a_percent_at_the_most_whatever_it_claims(streams: int, claim: float) -> None:
    """C21, F53: 5 to 45 % slower than no speculation, at high load or low acceptance."""
    world = World(chance=0.0, claim=claim, frugal=True, draft_seconds=3e-5)
    assert speed(Price(COSTS, most=8), world, streams) >= 0.99


@pytest.mark.parametrize("chance", [0.5, 0.9])
def test_crossing_the_cutoff_never_stalls_and_coming_back_is_at_once(chance: float) -> None:
    """C20, F45: 232 → 24 tokens a second when a batch grew past the threshold, drafts that are stale when it shrinks again."""
    controller, world = Price(COSTS, most=8, cutoff=4), World(chance=chance, frugal=True)
    few, many = [sequence() for _ in range(3)], [sequence() for _ in range(8)]
    for _ in range(100):
        world.step(controller, few)
    for _ in range(100):
        assert world.step(controller, many) is None, "beyond the cutoff every step is a plain one"
    first = world.step(controller, few)
    assert first is not None and min(first.guess) >= 2, "what was learned is still known"


def test_turning_guesses_on_and_off_every_round_teaches_the_same() -> None:
    """F45: after rounds without guesses, others drift or thrash. Costs and yields are learned per step, whatever came between."""
    steady, toggled = (Price(COSTS, most=8, cutoff=4) for _ in range(2))
    world, other = World(chance=0.7, frugal=True), World(chance=0.7, frugal=True)
    few, some, many = ([sequence() for _ in range(n)] for n in (2, 2, 8))
    for _ in range(300):
        world.step(steady, few)
        other.step(toggled, some)
        other.step(toggled, many)
    assert toggled.snapshot().earned == pytest.approx(steady.snapshot().earned, rel=0.25)
    assert toggled.snapshot().drift == pytest.approx(steady.snapshot().drift, rel=0.05)


def test_guesses_follow_acceptance_that_falls_with_the_context() -> None:
    """C25: acceptance 2.3 at 2k tokens, 1.08 at 20k, and k stays what it was."""
    controller, world = Price(COSTS, most=8), World(chance=0.85, draft_seconds=3e-4, frugal=True)
    running = [sequence()]
    shares = []
    for chance in (0.85, 0.5, 0.02):
        world.chance = chance
        nodes = world.nodes
        for _ in range(400):
            world.step(controller, running)
        shares.append((world.nodes - nodes) / 400)
    assert shares[0] > 1.3 * shares[1] and shares[1] > 2 > 0.2 > shares[2]


def test_a_request_without_speculation_has_none_beside_others_that_do() -> None:
    """C29: `speculative: false` left the second drafter running."""
    controller, world = Price(COSTS, most=8), World(chance=0.9, frugal=True)
    running = [sequence(speculate=0), sequence(), sequence(speculate=0)]
    for _ in range(200):
        allowance = world.step(controller, running)
        if allowance:
            assert allowance.guess[0] == allowance.guess[2] == 0
    assert world.nodes > 200


def test_requests_without_speculation_alone_are_plain_steps() -> None:
    """C29, F54: no budget, no tolls, no question to the drafter."""
    controller = Price(COSTS, most=8)
    assert all(controller([sequence(speculate=0)] * 2) is None for _ in range(100))


def test_speculation_that_is_off_decides_nothing() -> None:
    """F54: K = 0 cost up to 2.5 times a plain step."""
    assert no_guesses([sequence()] * 64) is None and no_guesses.snapshot().controller == "none"


def test_drafting_that_takes_longer_than_it_brings_is_given_up() -> None:
    """F55: overlap made a drafter slower than none. Time at the host is charged like any other."""
    world = World(chance=0.6, draft_seconds=8e-3, frugal=True)
    assert speed(Price(COSTS, most=8), world, 4) >= 0.99
    assert world.asked < 0.02 * ROUNDS


def test_a_drafter_that_goes_bad_is_noticed_and_one_that_gets_better_too() -> None:
    """F46: a cache kept across requests, acceptance 86 → 11 %. Others switch off for good, or never."""
    controller, world = Price(COSTS, most=8), World(chance=0.9, claim=0.9, frugal=True)
    running = [sequence()]
    gains = []
    for chance in (0.9, 0.05, 0.9):
        world.chance = chance
        for _ in range(60):
            world.step(controller, running)
        tokens, seconds = world.tokens, world.seconds
        for _ in range(900):
            world.step(controller, running)
        gains.append((world.tokens - tokens) / (world.seconds - seconds) * 0.006)
    assert gains[0] > 2.5 and gains[1] >= 0.97 and gains[2] > 2.0


@pytest.mark.parametrize("controller", ["price", "aimd", "fixed"])
def test_no_controller_asks_for_more_than_the_worker_has_room_for(controller: str) -> None:
    """F30, F31: look-ahead slots beyond what was reserved."""
    made, world = make(Speculation(speculation_controller=controller), READY, ignore), World(chance=0.95)
    running = [sequence() for _ in range(3)]
    for _ in range(60):
        allowance = world.step(made, running)
        assert allowance is None or max(allowance.guess) <= READY.max_nodes
