"""A replica without a process: what it takes from what its workers say of themselves."""

from __future__ import annotations

from typing import cast

import pytest

from forerun.messages import Ready, Start
from forerun.router.controller.cost import Costs
from forerun.router.controller.make import costs_of
from forerun.router.controller.price import Price
from forerun.router.guesses import Controller
from forerun.router.link import Death, Link
from forerun.router.policy import Policy
from forerun.router.replica import Replica
from tests.router.fakes import Counting
from tests.router.worker_model import ready

FIRST, WHOLE = [(1, 0.01), (8, 0.04)], [(1, 0.01), (4, 0.011), (8, 0.012)]


class Silent:
    """A link to nobody."""

    async def close(self) -> None:
        return None


class Sole:
    """An overseer of one replica."""

    def terms(self, ready: Ready) -> Policy:
        return Policy()

    def controller(self, ready: Ready) -> Controller:
        return Price(costs_of(ready), most=4, rough=ready.rough)

    def changed(self) -> None:
        return None


def offer(costs: list[tuple[int, float]], rough: bool) -> Ready:
    return ready(step_seconds=(0.01, 0.1), costs=costs, rough=rough)


@pytest.mark.parametrize(
    ("before", "after", "known"),
    [
        (offer(FIRST, True), offer(WHOLE, False), (WHOLE, False)),  # another replica wrote it down meanwhile
        (offer(FIRST, True), offer(WHOLE, True), (FIRST, True)),
        (offer(WHOLE, False), offer(FIRST, True), (WHOLE, False)),
        (offer(WHOLE, False), offer(FIRST, False), (WHOLE, False)),
    ],
)
async def test_what_steps_cost_is_taken_from_a_second_worker_where_the_first_did_not_come_to_say_it(
    before: Ready, after: Ready, known: tuple[list[tuple[int, float]], bool]
) -> None:
    replica = Replica(Start("model"), lambda start, listener: cast("Link", Silent()), Sole(), Counting())
    replica.ready(before)
    replica.died(Death("it was killed"))
    replica.ready(after)
    snapshot = replica.look().controller
    assert snapshot.rough is known[1]
    assert [(rows, seconds) for rows, seconds, _ in snapshot.costs] == [pytest.approx(one) for one in Costs(known[0]).steps]
    await replica.close()
