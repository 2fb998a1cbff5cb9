"""Guesses from a service in another process or on another machine: `--speculator remote=URL`.

    step n    absorb: what became true goes to the service ─────▶  it drafts, and goes on behind its draft when it has nothing else to do
              … the front plans, the step runs …
    step n+1  propose: takes what came ◀────────────────────────  an answer may be a step old: then it is walked along what became true

    answer    built on 7 tokens:  a ─ b ─ c ─ d        true since:  a b      ⇒   guesses now:  c ─ d;  had it been  a x : none

Nothing waits unless waiting pays: the guesses that are missing are worth what such guesses brought so far, and the plan says what a
second costs. The line itself, and what happens when it breaks, is `remote_wire.py`. A service that is dead, slow or lying costs guesses and
nothing else: its confidences are measured before they are believed.
"""

from __future__ import annotations

import logging
import re
import socket
import uuid
import weakref
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from forerun.drafting import Guess, Hello, fingerprint
from forerun.engine.drafters.calibration import Calibration
from forerun.engine.drafters.draft import FREE, Commit, Draft, Late, Needs, Terms
from forerun.engine.drafters.history import fresh
from forerun.engine.drafters.registry import Setting
from forerun.engine.drafters.remote_wire import BROKEN, TIMEOUT_SECONDS, Refused, Wire
from forerun.engine.drafters.vocabulary import texts
from forerun.engine.errors import StartError
from forerun.engine.models.load import find
from forerun.messages import SamplingParams

log = logging.getLogger(__name__)

MOST = 8
"""guesses for a row, unless told otherwise"""
MOST_WAIT_MS = 20.0
"""that a step may wait for guesses, however much they promise; an answer that a step may wait for may take as long"""
LEAST_WAIT = 50e-6
"""seconds that are always waited"""
AHEAD = 2
"""so many times as many guesses are asked for: those of an answer that comes a step late still reach beyond it"""
IDLE_STEPS = 4
"""A row that was not asked about for so many commits is no longer told of."""
ADDRESS_CURE = "use remote=http://HOST:PORT, as `forerun draft-server` prints it"
_BINS = 10
_STEP = 0.05


class Remote:
    """`wire`: an open line. `most`: nodes of a draft. `wait`: seconds a step may wait at the most."""

    def __init__(self, wire: Wire, most: int = MOST, wait: float = MOST_WAIT_MS / 1000) -> None:
        self.needs = Needs(most=most, lazy=False, late=self._lacks)
        self._late = self._unserved = 0
        middle = [(i + 0.5) / _BINS for i in range(_BINS)]
        self.calibration = Calibration([0.8 * sure for sure in (*middle, *middle)])
        self._wire = wire
        self._wait = wait
        self._keys: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._idle: dict[int, int] = {}
        self._tails: dict[int, list[int]] = {}
        """tokens of each row that came since the guesses at hand were built, and more before them"""
        self._next_key = 0
        weakref.finalize(self, wire.close)  # drafters have no verb for the end of the process
        self._gain = 1.0
        """guesses that are believed to hold in a draft, as a rule; none is none"""

    @classmethod
    def open(cls, value: str, setting: Setting) -> Remote:
        """`value`: http://HOST:PORT[,wait=MILLISECONDS]. A service that is not there may come later; one with other tokens is refused."""
        url, *options = value.split(",")
        wait = MOST_WAIT_MS
        for option in options:
            name, _, number = option.partition("=")
            if name != "wait" or not number.replace(".", "", 1).isdecimal():
                raise StartError(
                    f"speculator remote does not know {option!r}", "use remote=http://HOST:PORT or remote=http://HOST:PORT,wait=20"
                )
            wait = float(number)
        seconds = wait / 1000
        check(url)
        host = setting.worker
        hello = Hello(uuid.uuid4().hex, 0, host.model.vocab, fingerprint(texts(find(host.start))))
        wire = Wire(url, hello, max(TIMEOUT_SECONDS, seconds))
        try:
            wire.greet()
        except Refused as refused:
            raise StartError(f"the draft service at {url} refused: {refused}", refused.refusal.cure) from refused
        except socket.gaierror as unknown:
            log.warning("%s is not known here (%s): guesses begin when it is; if it is a slip, correct remote=%s", url, unknown, url)
        except BROKEN:
            pass  # the line's thread says so, and goes on trying
        wire.start()
        return cls(wire, setting.nodes or MOST, seconds)

    def _lacks(self) -> Late:
        return Late(answers=self._late, unserved=self._unserved)

    def absorb(self, commit: Commit) -> None:
        for i, number in enumerate(commit.rows):
            if number not in self._keys or not commit.start[i]:
                self._begin(number, commit.params[i] if commit.params else None, commit.scope[i] if commit.scope else "")
            new = fresh(commit, i, self._known[number])
            self.calibration.settle(number, new)
            self._known[number] += len(new)
            tail = self._tails[number]
            tail += new
            del tail[: -8 * self.needs.most - 64]
            self._idle[number] += 1
            wanted = commit.next[i] is not None and self._idle[number] <= IDLE_STEPS
            self._wire.say(self._keys[number], new, AHEAD * self.needs.most if wanted else 0)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        able = [number for number in rows if number in self._keys]
        for number in able:
            if self._idle[number] > IDLE_STEPS:
                self._wire.say(self._keys[number], [], AHEAD * self.needs.most)
            self._idle[number] = 0
        unserved = self._wire.unserved([self._keys[number] for number in able])
        self._unserved += len(unserved)
        keys = {number: self._keys[number] for number in able if self._keys[number] not in unserved}
        guesses = self._wire.take({key: self._known[number] for number, key in keys.items()}, self._patience(len(keys), terms))
        return [
            self._draft(number, most, guesses.get(keys[number])) if number in keys else Draft.none() for number, most in zip(rows, budget)
        ]

    def forget(self, rows: list[int]) -> None:
        for number in rows:
            self.calibration.forget(number)
            if number in self._keys:
                self._wire.end(self._keys[number])
                del self._keys[number], self._known[number], self._idle[number], self._tails[number]

    def _begin(self, number: int, params: SamplingParams | None, scope: str) -> None:
        if params is not None:
            params = msgspec.structs.replace(params, grammar="")  # large, nobody else's business, and followed by no service
        self.forget([number])
        self._next_key += 1
        self._keys[number], self._known[number], self._idle[number], self._tails[number] = self._next_key, 0, IDLE_STEPS, []
        self._wire.begin(self._next_key, params, scope)

    def _patience(self, rows: int, terms: Terms) -> float:
        """Seconds that guesses for so many rows are worth waiting for: none, if they will not come in that time."""
        worth = min(self._wait, rows * self._gain / terms.goodput) if terms.goodput > 0.0 else self._wait
        return worth if self._wire.latency < worth else min(LEAST_WAIT, self._wait)

    def _draft(self, number: int, most: int, guess: Guess | None) -> Draft:
        since = self._known[number] - guess.base if guess is not None else 0
        self._late += guess is None or since > 0
        if guess is None or since > len(self._tails[number]):
            self._gain -= _STEP * self._gain
            return Draft.none()
        tail = self._tails[number]
        token, parent, sure = rerooted(guess, tail[len(tail) - since :], most)
        cell = [min(_BINS - 1, max(0, int(each * _BINS))) + _BINS * (above >= 0) for each, above in zip(sure, parent)]
        rate = self.calibration.rate
        self.calibration.propose(number, token, parent, cell)
        survival: list[float] = []
        for kind, above in zip(cell, parent):
            survival.append(rate[kind] * (survival[above] if above >= 0 else 1.0))
        self._gain += _STEP * (sum(survival) - self._gain)
        return Draft(token, parent, [rate[kind] for kind in cell], [False] * len(token))


def check(url: str) -> None:
    """StartError (with its cure) for what is no address: nobody would ever answer there, and only the log would say so."""
    if not url.isprintable():
        raise StartError(f"{url!r} is no address of a draft service", ADDRESS_CURE)
    try:
        place = urlsplit(url)
        port, host = place.port, place.hostname or ""
    except ValueError as wrong:
        raise StartError(f"{url!r} is no address of a draft service: {wrong}", ADDRESS_CURE) from wrong
    if place.scheme not in ("http", "https"):
        raise StartError(f"speculator remote needs the address of a draft service, {url!r} was given", ADDRESS_CURE)
    if not re.fullmatch(r"[\w.-]+|[0-9a-f:.]+(%\w+)?", host, re.ASCII | re.IGNORECASE):
        raise StartError(f"{url!r} names no host" if not host else f"{host!r} in {url!r} is no name of a host", ADDRESS_CURE)
    if port == 0 or place.netloc.endswith(":"):
        raise StartError(f"{url!r} names no port that a service can have", ADDRESS_CURE)
    if place.username is not None or place.query or place.fragment:
        raise StartError(f"{url!r} is more than an address: no user, query or fragment is sent", ADDRESS_CURE)


def rerooted(guess: Guess, since: Sequence[int], most: int) -> tuple[list[int], list[int], list[float]]:
    """What of the guesses hangs below the path of these tokens: tokens, parents and confidences of at most so many nodes."""
    at = -1
    for token in since:
        at = next((node for node, above in enumerate(guess.parent) if above == at and guess.token[node] == token), -2)
        if at == -2:
            return [], [], []
    place = {at: -1}
    nodes: list[int] = []
    for node, above in enumerate(guess.parent):
        if above in place and node > at and len(nodes) < most:
            place[node] = len(nodes)
            nodes.append(node)
    return [guess.token[node] for node in nodes], [place[guess.parent[node]] for node in nodes], [guess.confidence[node] for node in nodes]
