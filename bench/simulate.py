"""A replica in a loop of a few lines: steps, arrivals and streams over match traces, so that policies can be compared exactly.

One step: streams whose prompt is computed decode, one token each and as many guesses as the policy keeps; prompts that wait are computed
beside them in chunks. As in the server, a step is decided before the result of the one before has come back. What a step takes, the
machine says; what guesses bring, the traces.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from forerun.bench.machine import Machine
from forerun.bench.policies import Chance, Choice, Policy
from forerun.bench.traces import Offer, Track
from forerun.bench.unheard import Unheard
from forerun.messages import SamplingParams
from forerun.router.guesses import Round
from forerun.router.request import Request
from forerun.router.request import Sequence as Stream

CHUNK = 256
"""prompt tokens of a step"""


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """`arrivals(seed)`: when each track arrives, ascending; without it `clients` streams run at once (closed loop). `rows`: streams that
    can run."""

    name: str
    machine: Machine
    tracks: Sequence[Track]
    clients: int = 1
    arrivals: Callable[[int], Iterator[float]] | None = None
    rows: int = 64
    anew: Callable[[], Sequence[Track]] | None = None
    """makes the tracks again, where they remember what they were asked; else the same ones serve every simulation"""


@dataclasses.dataclass(eq=False, slots=True)
class Live:
    """A stream that runs. `known`: tokens of its answer; 0 until its prompt is computed. `heard`: tokens that the drafter was told."""

    track: Track
    stream: Stream
    prefill: int
    began: float
    known: int = 0
    heard: int = 0
    first: float = 0.0
    offered: Offer | None = None
    """in this step"""


@dataclasses.dataclass(slots=True)
class Outcome:
    """`busy`: seconds in steps; `residence`: seconds between first and last token, all streams together; `pace[r]`: tokens committed and
    seconds of each round, in order; `wasted`: verified nodes that did not hold."""

    policy: str
    tokens: int = 0
    busy: float = 0.0
    residence: float = 0.0
    decoded: int = 0
    nodes: int = 0
    accepted: int = 0
    streams: list[float] = dataclasses.field(default_factory=list)
    pace: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens a second that a stream sees, on average over all streams' time. With a fixed number of clients it is goodput, over
        them."""
        return self.decoded / self.residence if self.residence else 0.0

    @property
    def goodput(self) -> float:
        return self.tokens / self.busy

    @property
    def wasted(self) -> float:
        return 1 - self.accepted / self.nodes if self.nodes else 0.0


def simulate(scenario: Scenario, policy: Policy, seed: int = 0) -> Outcome:
    """The whole scenario under a policy. The same seed gives every policy the same arrivals; noise of steps is drawn per step."""
    return _Simulation(scenario, policy, seed).run()


class _Simulation:
    def __init__(self, scenario: Scenario, policy: Policy, seed: int) -> None:
        self._scenario = scenario
        self._policy = policy
        self._dice = random.Random(seed)
        arrivals = scenario.arrivals(seed + 1) if scenario.arrivals else None
        tracks = scenario.anew() if scenario.anew else scenario.tracks
        self._coming = deque((next(arrivals) if arrivals else 0.0, track) for track in tracks)
        self._rows = scenario.rows if arrivals else scenario.clients
        self._running: list[Live] = []
        self._now = 0.0
        self._serial = 0
        self._news: list[Callable[[], None]] = []
        """what the policy hears after the next step was decided"""
        self.outcome = Outcome(policy.name)

    def run(self) -> Outcome:
        while self._coming or self._running:
            self._admit()
            if self._running:
                self._step()
            else:
                self._now = self._coming[0][0]
        return self.outcome

    def _admit(self) -> None:
        while self._coming and len(self._running) < self._rows and self._coming[0][0] <= self._now:
            _, track = self._coming.popleft()
            self._serial += 1
            params = SamplingParams(0, track.prompt, track.length)
            tokens = [0] * track.prompt
            stream = Stream(Request(f"s{self._serial}", tokens, params, self._now), params, Unheard(), tokens)
            self._running.append(Live(track, stream, track.prompt, self._now))

    def _step(self) -> None:
        decoding = [live for live in self._running if not live.prefill]
        prefill, fed = self._prompts()
        choice = self._decide(decoding, prefill) if decoding else Choice([], 0)
        for tell in self._news:
            tell()
        self._news = []
        nodes = sum(len(kept) for kept in choice.kept if kept)
        asked = sum(kept is not None for kept in choice.kept)
        lengths = [len(live.stream.tokens) for live in decoding]
        read = sum(lengths)
        scored = read + sum(len(kept) * length for kept, length in zip(choice.kept, lengths) if kept)
        rows = len(decoding) + nodes + prefill
        machine = self._scenario.machine
        draft_seconds = machine.drafting(asked, choice.depth, self._unread(decoding, choice))
        seconds = machine.seconds(rows, read, scored, self._now)
        # The noise is for the policy to see through; time itself goes on without it, or chance would decide between policies.
        seen = machine.seen(seconds, self._dice) + draft_seconds
        seconds += draft_seconds
        self._now += seconds
        expected = choice.expected or [0.0] * len(decoding)
        tokens = sum(self._land(*of_each) for of_each in zip(decoding, choice.kept, expected))
        for live in fed:
            live.known, live.first = 1, self._now
            live.stream.tokens.append(0)
        round = Round(len(decoding), rows, nodes, asked, read, tokens, seen, draft_seconds, prefill)
        self._news.append(lambda: self._policy.stepped(round))
        self._count(tokens + len(fed), seconds)
        self._leave()

    def _decide(self, decoding: list[Live], prompts: int) -> Choice:
        def offer(i: int, most: int) -> Offer:
            live = decoding[i]
            live.offered = live.track.offer(live.known, min(most, live.track.length - live.known - 1))
            return live.offered

        return self._policy.decide(Chance([live.stream for live in decoding], offer, prompts))

    def _unread(self, decoding: list[Live], choice: Choice) -> int:
        """Tokens that a drafter has to catch up with, of the streams that it is asked about."""
        unread = 0
        for live, kept in zip(decoding, choice.kept):
            if kept is not None:
                unread += len(live.stream.tokens) - live.heard
                live.heard = len(live.stream.tokens)
        return unread

    def _prompts(self) -> tuple[int, list[Live]]:
        """Prompt tokens of this step, and the streams whose prompt it completes."""
        left = CHUNK
        done = []
        for live in self._running:
            part = min(live.prefill, left)
            left -= part
            live.prefill -= part
            if part and not live.prefill:
                done.append(live)
        return CHUNK - left, done

    def _land(self, live: Live, kept: list[int] | None, expected: float) -> int:
        accepted = 0
        if kept is not None:
            accepted = sum(live.offered.held[node] for node in kept) if live.offered else 0
            stream, nodes = live.stream, len(kept)
            self._news.append(lambda: self._policy.landed(stream, nodes, accepted, expected))
            self.outcome.nodes += nodes
            self.outcome.accepted += accepted
        live.known += 1 + accepted
        live.stream.tokens.extend([0] * (1 + accepted))
        return 1 + accepted

    def _count(self, tokens: int, seconds: float) -> None:
        self.outcome.tokens += tokens
        self.outcome.busy += seconds
        self.outcome.pace.append((tokens, seconds))

    def _leave(self) -> None:
        over = [live for live in self._running if live.known >= live.track.length]
        if not over:
            return
        self._running = [live for live in self._running if live.known < live.track.length]
        for live in over:
            self._policy.forget(live.stream)
            live.track.close()
            self.outcome.residence += self._now - live.first
            self.outcome.decoded += live.known - 1
            if self._now > live.first:
                self.outcome.streams.append((live.known - 1) / (self._now - live.first))
