"""A draft service that does everything wrong while a full table of requests lives through everything else: it is silent, lies, raises,
answers what is no answer, forgets, dies and comes back, while rows with grammars and others are preempted, given up, find prefixes and
lose their worker. Every stream hears what it would have heard without guesses; the drafter never fails; what comes back is used again."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import msgspec
import pytest
import torch
from aiohttp import web

from forerun.drafting import ASK, Answer, Ask, Hello
from forerun.engine.drafters.remote import Remote
from forerun.engine.drafters.remote_wire import Wire
from forerun.engine.draftservice import DraftService, Refused
from tests.engine.drafters.services import TOKENS, Running, answering, service
from tests.engine.drafters.test_remote import eventually
from tests.engine.test_crowd import TIGHT, Crowd, live
from tests.engine.test_registered import Watched
from tests.engine.tiny import VOCAB

pytestmark = pytest.mark.timeout(600)

PATIENCE = 0.5
"""seconds after which an answer is none"""
FAULTS = ("noise", "an error", "another epoch", "silent", "no token", "no tree", "forgets")
MOODS = [mood for fault in FAULTS for mood in (*["honest"] * 4, "lies", *["honest"] * 2, fault)]
"""one after the other, so that nothing depends on how fast anybody is"""


class Moody:
    """A service that is honest as a rule. Its lies are well made trees of wrong tokens. `did`: what, how often."""

    def __init__(self) -> None:
        self.did: Counter[str] = Counter()
        self._moods = itertools.cycle(MOODS)
        self._service: DraftService = service()
        self._running = Running(answering(self._answer))
        self._port = self._running.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def die(self) -> None:
        self._running.stop()

    def come_back(self) -> None:
        """On the same port, and knows nothing."""
        self._service = service()
        self._running = Running(answering(self._answer), self._port)

    async def _answer(self, path: str, body: bytes) -> web.Response:
        try:
            if path != ASK:
                return _said(self._service.hello(msgspec.msgpack.decode(body, type=Hello)))
            ask = msgspec.msgpack.decode(body, type=Ask)
            return await self._spoilt(self._service.ask(ask), ask)
        except Refused as refused:
            return web.Response(status=409, body=msgspec.msgpack.encode(refused.refusal))

    async def _spoilt(self, answer: Answer, ask: Ask) -> web.Response:
        kind = next(self._moods)
        self.did[kind] += 1
        if kind == "honest":
            return _said(answer)
        if kind == "lies":
            wrong = [msgspec.structs.replace(guess, token=[(each + 1) % VOCAB for each in guess.token]) for guess in answer.drafts]
            return _said(msgspec.structs.replace(answer, drafts=wrong))
        if kind == "silent":
            await asyncio.sleep(3600)
        if kind == "another epoch":
            return _said(msgspec.structs.replace(answer, epoch=answer.epoch + 1))
        if kind == "forgets":
            return _said(Answer(ask.epoch, [], [row.key for row in ask.rows]))
        if kind in ("no token", "no tree"):
            broken = {"no token": {"token": [VOCAB], "parent": [-1]}, "no tree": {"token": [1], "parent": [0]}}[kind]
            return _said(
                msgspec.structs.replace(answer, drafts=[msgspec.structs.replace(g, confidence=[0.9], **broken) for g in answer.drafts])
            )
        return web.Response(body=b"\xff\x00") if kind == "noise" else web.Response(status=500, text="no")


def _said(message: object) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(message))


class Troubled(Crowd):
    """The service dies when a worker does, and comes back some steps later. While it lives no step begins before it is found again, so that
    what it does is done to somebody."""

    def __init__(self, moody: Moody) -> None:
        self.moody = moody
        self.opened: list[tuple[Remote, Watched]] = []
        self._dead_for = 0
        super().__init__(self._drafter, TIGHT, torch.float32)

    def _drafter(self) -> Watched:
        wire = Wire(self.moody.url, Hello(f"worker {len(self.opened)}", 0, VOCAB, TOKENS), PATIENCE, pause=0.001)
        wire.start()
        remote = Remote(wire, wait=10.0)
        watched = Watched(remote)
        self.opened.append((remote, watched))
        return watched

    def restart(self) -> None:
        self.opened[-1][0]._wire.close()
        self.moody.die()
        super().restart()
        eventually(lambda: self.opened[-1][0]._wire.failures > 0)
        self._dead_for = 8

    def turn(self) -> None:
        if self._dead_for == 1:
            self.moody.come_back()
        self._dead_for = max(0, self._dead_for - 1)
        if not self._dead_for:
            wire = self.opened[-1][0]._wire
            eventually(lambda: wire.open)
        super().turn()


def test_a_service_that_does_everything_wrong_while_everything_happens() -> None:
    moody = Moody()
    crowd = Troubled(moody)
    try:
        live(crowd)
    finally:
        moody.die()
    assert crowd.bridge.engine._speculator.failures.count == 0
    assert crowd.seen.restarts == 2 and crowd.seen.given_up > 2 and "guesses held" in crowd.seen.ruled
    assert set(moody.did) == set(MOODS), "all of it happened"
    assert all(any(draft.count for draft in watched.drafts) for _, watched in crowd.opened), "a service that came back is asked again"
    last, watched = crowd.opened[-1]
    assert not watched.rows and not last._keys and not last._wire._texts, "nothing is kept of rows that are gone"
