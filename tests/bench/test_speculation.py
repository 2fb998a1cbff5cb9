"""Servers of a bench: how they start, and when they know what their steps cost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence

import pytest

from forerun.bench import launched, speculation
from forerun.bench.launched import Launched, Program, StartFailed
from forerun.bench.records import Record
from forerun.bench.steady import Steady


async def test_servers_start_one_after_the_other_while_those_that_are_warm_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []

    class Fake:
        def __init__(self, program: Program) -> None:
            self.name = program.words[0]
            self.family = [self.name, f"{self.name}'s worker"]

        async def __aenter__(self) -> Fake:
            happened.append(f"{self.name} starts")
            return self

        async def __aexit__(self, *error: object) -> None:
            happened.append(f"{self.name} ends")

    async def warm(server: Fake, streams: int) -> None:
        happened.append(f"{server.name} is warm for {streams}")

    @contextlib.contextmanager
    def standing(families: Iterable[Sequence[str]]) -> Iterator[None]:
        happened.append([pid for family in families for pid in family])
        yield
        happened.append("all go on")

    for name, fake in (("Launched", Fake), ("warm", warm), ("standing", standing)):
        monkeypatch.setattr(speculation, name, fake)
    async with contextlib.AsyncExitStack() as stack:
        servers = await speculation.start(stack, [Program(["a"]), Program(["b"])], 4)
        assert [server.name for server in servers] == ["a", "b"]  # type: ignore[attr-defined]
    assert happened == [
        *([], "a starts", "a is warm for 4", "all go on"),
        *(["a", "a's worker"], "b starts", "b is warm for 4", "all go on"),
        *("b ends", "a ends"),
    ]


async def test_a_server_has_settled_when_all_its_replicas_know_their_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [[True, True], [False, True], [False, False]]

    async def text(server: Launched, path: str) -> str:
        assert path == "/debug/speculation"
        return json.dumps([{"controller": {"rough": rough}} for rough in told.pop(0)])

    monkeypatch.setattr(Launched, "_text", text)
    monkeypatch.setattr(launched, "SETTLE_POLL_SECONDS", 0.0)
    await Launched(Program([])).settled()
    assert not told


async def test_a_server_that_never_settles_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def text(server: Launched, path: str) -> str:
        return json.dumps([{"controller": {"rough": True}}])

    monkeypatch.setattr(Launched, "_text", text)
    monkeypatch.setattr(launched, "SETTLE_SECONDS", -1.0)
    with pytest.raises(StartFailed, match="idle seconds"):
        await Launched(Program([])).settled()


def test_first_tokens_are_judged_by_requests_that_came_while_all_streams_were_busy() -> None:
    """Two that begin together wait for each other; those that come later do not."""
    begun = [Record(due=0.0, arrivals=[first + 0.1 * i for i in range(20)], ended=first + 1.9) for first in (0.5, 0.9)]
    later = [Record(due=due, arrivals=[due + 0.1 * i for i in range(1, 21)], ended=due + 2.0) for due in (2.4, 2.8)]
    records = [*begun, *later]
    busy = Steady.of(records, ["xx"] * 4, 2)
    assert speculation.side(records, busy).first_token_ms == pytest.approx(100.0)
    assert speculation.side(begun, Steady.of(begun, ["xx"] * 2, 2)).first_token_ms == pytest.approx(700.0)
