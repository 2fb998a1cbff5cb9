from __future__ import annotations

from forerun.router.controller.simple import Aimd, Fixed
from forerun.router.guesses import Controller
from tests.router.controller.streams import World, sequence


def test_fixed_is_fixed() -> None:
    controller: Controller = Fixed(4, cutoff=3)
    streams = [sequence(), sequence(speculate=2), sequence(speculate=0)]
    allowance = controller(streams)
    assert allowance is not None
    assert (allowance.guess, allowance.total, allowance.toll, allowance.price) == ([4, 2, 0], 6, [], 0.0)
    assert controller([*streams, sequence()]) is None
    assert controller([streams[2]]) is None
    assert controller.snapshot().controller == "fixed"


def test_a_window_opens_by_one_and_closes_by_half() -> None:
    controller = Aimd(8)
    one = sequence()
    seen = []
    for nodes, accepted in ((2, 2), (3, 3), (4, 4), (5, 4), (5, 3), (5, 2), (2, 0), (1, 0), (0, 0)):
        seen.append(controller.window(one))
        controller.landed(one, nodes, accepted, 0.0)
    assert seen == [2, 3, 4, 5, 5, 5, 2, 1, 1]
    controller.forget(one)
    assert controller.window(one) == 2


def test_windows_stay_within_bounds() -> None:
    controller, good, bad = Aimd(6), World(1.0), World(0.0)
    one, other = sequence(), sequence(speculate=1)
    for _ in range(30):
        good.step(controller, [one, other])
    assert (controller.window(one), controller.window(other)) == (6, 1)
    for _ in range(30):
        bad.step(controller, [one])
    assert controller.window(one) == 1
