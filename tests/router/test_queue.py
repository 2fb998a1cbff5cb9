from __future__ import annotations

import pytest

from forerun.messages import SamplingParams
from forerun.router.entry import Entry
from forerun.router.queue import Deadlines, Gate, Waiting
from forerun.router.request import Request, Sequence
from tests.router.driver import Stream


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def entry(serial: int, tenant: str = "", started: bool = False) -> Entry:
    params = SamplingParams(0, 1, 1)
    sequence = Sequence(Request(f"r{serial}", [1], params, 0.0, tenant=tenant), params, Stream(), [1])
    return Entry(sequence, (0.0, serial), 2, caches=True, started=started)


def serials(entries: list[Entry]) -> list[int]:
    return [entry.rank[1] for entry in entries]


def test_a_permit_is_one_place_and_leaves_once() -> None:
    gate = Gate(3, Clock())
    two = gate.enter(2)
    one = gate.enter()
    assert two is not None
    assert one is not None
    assert gate.enter() is None
    one.leave()
    one.leave()
    assert gate.inside == 2
    assert gate.enter(2) is None
    with two:
        pass
    assert gate.inside == 0


def test_a_permit_comes_back_when_its_holder_raises() -> None:
    gate = Gate(1, Clock())
    permit = gate.enter()
    assert permit is not None
    with pytest.raises(RuntimeError), permit:
        raise RuntimeError
    assert gate.inside == 0


def served(gate: Gate, clock: Clock, seconds: float) -> None:
    for _ in range(100):
        permit = gate.enter()
        assert permit is not None
        clock.now += seconds
        permit.leave()


def test_retry_after_follows_the_time_a_request_stays() -> None:
    clock = Clock()
    gate = Gate(2, clock)
    assert gate.retry_after_seconds() == 1
    served(gate, clock, 10.0)
    assert gate.retry_after_seconds() == 5
    clock.now += 3600
    assert gate.retry_after_seconds() == 5, "an idle hour says nothing about the rate"


def test_refused_clients_come_back_one_after_the_other_but_within_bounds() -> None:
    clock = Clock()
    gate = Gate(4, clock)
    served(gate, clock, 8.0)
    told = [gate.retry_after_seconds() for _ in range(40)]
    assert told == sorted(told)
    assert (told[0], told[1], told[-1]) == (2, 4, 30)


def test_first_come_first_served() -> None:
    waiting = Waiting()
    entries = [entry(i) for i in range(5)]
    for each in entries:
        waiting.add(each)
    waiting.remove(entries[2])
    assert serials(waiting.first({}, 3)) == [0, 1, 3]
    assert len(waiting) == 4


def test_who_ran_before_comes_first_at_its_old_place() -> None:
    waiting = Waiting()
    for each in (entry(7), entry(5, started=True), entry(3, started=True), entry(8)):
        waiting.add(each)
    assert serials(waiting.first({}, 9)) == [3, 5, 7, 8]
    assert serials(waiting.first({}, 1)) == [3]


def test_tenants_share_by_what_they_have_running() -> None:
    waiting = Waiting()
    for i in range(4):
        waiting.add(entry(i, "loud"))
    for i in range(4, 6):
        waiting.add(entry(i, "quiet"))
    assert waiting.tenants == 2
    assert serials(waiting.first({}, 9)) == [0, 4, 1, 5, 2, 3]
    assert serials(waiting.first({"loud": 2}, 9)) == [4, 5, 0, 1, 2, 3]
    assert serials(waiting.first({"quiet": 1}, 3)) == [0, 1, 4]


def test_deadlines_in_order_without_those_that_ended() -> None:
    deadlines = Deadlines()
    entries = [entry(i) for i in range(4)]
    for each, at in zip(entries, (4.0, 1.0, 3.0, 2.0), strict=True):
        deadlines.add(each, at, 4)
    entries[3].over = True
    assert deadlines.overdue(0.5) == []
    assert serials(deadlines.overdue(3.0)) == [1, 2]
    assert serials(deadlines.overdue(9.0)) == [0]


def test_deadlines_of_the_dead_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for i in range(10_000):
        each = entry(i)
        deadlines.add(each, 1e9, 1)
        each.over = True
    assert len(deadlines) < 200
