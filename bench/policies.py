"""Policies that a simulation compares: who may guess how much. Ours is the real controller; the others are what is published or served.

A policy sees what its original sees: counts of what was accepted, batch sizes, confidences where it has them. Only `Clairvoyant` looks at
what will hold; it takes the best of each step, which is nearly, not always, the best in the long run.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from forerun.bench.machine import Machine
from forerun.bench.traces import Offer
from forerun.engine.drafters.choose import choose, survivals
from forerun.engine.drafters.draft import Draft
from forerun.engine.drafters.trust import Trust
from forerun.router.controller.cost import Costs, CostTable
from forerun.router.guesses import Allowance, Controller, Round
from forerun.router.request import Sequence as Stream

MOST = 16
"""guesses of a stream, under every policy"""


@dataclasses.dataclass(frozen=True, slots=True)
class Chance:
    """What a policy decides on: the streams that decode, `offer(i, most)`, what the source has for the i-th, and the tokens of prompts
    that are in the step as well."""

    streams: Sequence[Stream]
    offer: Callable[[int, int], Offer]
    prompts: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """`kept[i]`: nodes of stream i's offer that are verified; None, it is not asked about at all (drafting costs something also when
    nothing comes of it). `depth`: levels that were drafted."""

    kept: list[list[int] | None]
    depth: int
    expected: list[float] = dataclasses.field(default_factory=list)
    """guesses of each stream that the worker believes to hold; empty, it does not say"""


class Policy(Protocol):
    name: str

    def decide(self, chance: Chance) -> Choice: ...
    def landed(self, stream: Stream, nodes: int, accepted: int, expected: float) -> None: ...
    def stepped(self, round: Round) -> None: ...
    def forget(self, stream: Stream) -> None: ...


def nobody(count: int) -> Choice:
    return Choice([None] * count, 0)


class Governed:
    """A controller of the server, and the worker that does what it says: the same choice under tolls, the same trust in confidences."""

    def __init__(self, name: str, controller: Controller, machine: Machine) -> None:
        self.name = name
        self.controller = controller
        self.stepped = controller.stepped
        self._machine = machine
        self._trust = Trust()
        self._numbers: dict[Stream, int] = {}
        self._serial = itertools.count()

    def decide(self, chance: Chance) -> Choice:
        allowance = self.controller(list(chance.streams), chance.prompts)
        if allowance is None:
            return nobody(len(chance.streams))
        offers = [chance.offer(i, most) if most else None for i, most in enumerate(allowance.guess)]
        depth = max(allowance.guess)
        if not allowance.toll:
            return Choice([None if offer is None else list(range(len(offer.held))) for offer in offers], depth)
        survival = [[] if offer is None else self._survival(stream, offer) for offer, stream in zip(offers, chance.streams)]
        if self._machine.draft_node:
            depth = self._depth(survival, allowance)
            survival = [values[:depth] for values in survival]
        prices = [allowance.entry_price * len(stream.tokens) for stream in chance.streams]
        kept = choose([[value - price for value in values] for values, price in zip(survival, prices)], allowance.toll, allowance.discount)
        expected = [sum(values[node] for node in nodes) for values, nodes in zip(survival, kept)]
        return Choice([None if offer is None else nodes for offer, nodes in zip(offers, kept)], depth, expected)

    def landed(self, stream: Stream, nodes: int, accepted: int, expected: float) -> None:
        self.controller.landed(stream, nodes, accepted, expected)

    def forget(self, stream: Stream) -> None:
        self.controller.forget(stream)
        number = self._numbers.pop(stream, None)
        if number is not None:
            self._trust.forget(number)

    def _survival(self, stream: Stream, offer: Offer) -> list[float]:
        """A node that holds carries token 0, and so does what became true."""
        number = self._numbers.setdefault(stream, next(self._serial))
        self._trust.settle(number, stream.tokens)
        draft = Draft([int(not holds) for holds in offer.held], offer.parent, offer.confidence, [False] * len(offer.held))
        return self._trust.offer(number, draft, len(stream.tokens))

    def _depth(self, survival: Sequence[Sequence[float]], allowance: Allowance) -> int:
        """A drafter that computes one level after the other goes on while a level brings more than the time it takes."""
        cost = allowance.goodput * self._machine.draft_node
        for depth in range(max(allowance.guess)):
            level = [values[depth] for values in survival if len(values) > depth]
            if sum(max(0.0, value - allowance.price) for value in level) <= cost:
                return depth + 1
        return max(allowance.guess)


class Deaf:
    """What a policy does that learns nothing."""

    def landed(self, stream: Stream, nodes: int, accepted: int, expected: float) -> None:
        return None

    def stepped(self, round: Round) -> None:
        return None

    def forget(self, stream: Stream) -> None:
        return None


class Windowed(Deaf, abc.ABC):
    """Policies that give each stream a number of guesses and take what the source has."""

    def __init__(self, name: str) -> None:
        self.name = name

    def decide(self, chance: Chance) -> Choice:
        windows = [min(MOST, self.window(stream, len(chance.streams))) for stream in chance.streams]
        kept = [self.cut(chance.offer(i, most)) if most else None for i, most in enumerate(windows)]
        return Choice(kept, max(windows, default=0))

    @abc.abstractmethod
    def window(self, stream: Stream, batch: int) -> int: ...
    def cut(self, offer: Offer) -> list[int]:
        return list(range(len(offer.held)))


class Always(Windowed):
    """k guesses for everybody, always. k = 0: plain decoding."""

    def __init__(self, k: int) -> None:
        super().__init__(f"k={k}" if k else "none")
        self._k = k

    def window(self, stream: Stream, batch: int) -> int:
        return self._k


class BatchTable(Windowed):
    """k by the size of the batch, as in vLLM's `num_speculative_tokens_per_batch_size`."""

    def __init__(self) -> None:
        super().__init__("batch table")

    def window(self, stream: Stream, batch: int) -> int:
        return next((k for most, k in ((1, 5), (4, 4), (8, 2), (16, 1)) if batch <= most), 0)


class Heuristic(Windowed):
    """transformers: two more after a draft that held in full, one less otherwise; a draft ends where its confidence falls below 0.4."""

    def __init__(self) -> None:
        super().__init__("transformers")
        self._windows: dict[Stream, int] = {}

    def window(self, stream: Stream, batch: int) -> int:
        return self._windows.get(stream, 5)

    def cut(self, offer: Offer) -> list[int]:
        for n, confidence in enumerate(offer.confidence):
            if confidence < 0.4:
                return list(range(n))
        return list(range(len(offer.held)))

    def landed(self, stream: Stream, nodes: int, accepted: int, expected: float) -> None:
        window = self.window(stream, 0)
        self._windows[stream] = min(MOST, window + 2) if accepted == nodes else max(1, window - 1)

    def forget(self, stream: Stream) -> None:
        self._windows.pop(stream, None)


class Cubic(Windowed):
    """A window that grows with the cube of the time since the last loss, as TCP CUBIC's; by the formula of Ha, Rhee and Xu (2008)."""

    BETA, C = 0.7, 0.2

    def __init__(self) -> None:
        super().__init__("cubic")
        self._state: dict[Stream, tuple[float, int]] = {}

    def window(self, stream: Stream, batch: int) -> int:
        top, rounds = self._state.get(stream, (2.0, 0))
        knee: float = (top * (1 - self.BETA) / self.C) ** (1 / 3)
        return max(1, min(MOST, round(self.C * (rounds - knee) ** 3 + top)))

    def landed(self, stream: Stream, nodes: int, accepted: int, expected: float) -> None:
        window = self.window(stream, 0)
        top, rounds = self._state.get(stream, (2.0, 0))
        lost = accepted < nodes and 2 * accepted < window
        self._state[stream] = (float(window), 0) if lost else (top, rounds + 1)

    def forget(self, stream: Stream) -> None:
        self._state.pop(stream, None)


class Ema(Windowed):
    """SGLang: the rounded average of accepted lengths plus one, out of the candidates for the size of the batch; looked at every five
    rounds."""

    CANDIDATES = ((1, (1, 3, 5, 7)), (8, (0, 1, 3)), (32, (0, 1)))

    def __init__(self) -> None:
        super().__init__("ema")
        self._mean: dict[Stream, float] = {}

    def window(self, stream: Stream, batch: int) -> int:
        candidates = next((steps for most, steps in reversed(self.CANDIDATES) if batch >= most), (0,)) if batch < 64 else (0,)
        wanted = round(self._mean.get(stream, 2.0)) + 1
        return min(candidates, key=lambda k: abs(k - wanted))

    def landed(self, stream: Stream, nodes: int, accepted: int, expected: float) -> None:
        mean = self._mean.get(stream, 2.0)
        self._mean[stream] = mean + 0.2 * (accepted - mean)

    def forget(self, stream: Stream) -> None:
        self._mean.pop(stream, None)


class Bandit(Windowed):
    """UCB over k for each size of the batch, by the goodput of whole rounds: knows nothing and learns all from time alone."""

    ARMS = (0, 1, 2, 3, 5, 8)

    def __init__(self) -> None:
        super().__init__("bandit")
        self._rounds: dict[int, list[tuple[int, float]]] = {}
        self._played: deque[tuple[int, int]] = deque([(0, 0)])
        """size of the batch and arm of the last rounds; a round is heard of after the next one was decided"""

    def decide(self, chance: Chance) -> Choice:
        arms = self._rounds.setdefault(_bucket(len(chance.streams)), [(0, 0.0)] * len(self.ARMS))
        total = sum(count for count, _ in arms)
        scale = max([mean for _, mean in arms] or [0.0])
        bounds = [mean + 0.5 * scale * math.sqrt(2 * math.log(total + 1) / count) if count else math.inf for count, mean in arms]
        self._played.append((_bucket(len(chance.streams)), bounds.index(max(bounds))))
        return super().decide(chance)

    def window(self, stream: Stream, batch: int) -> int:
        return self.ARMS[self._played[-1][1]]

    def stepped(self, round: Round) -> None:
        if not round.roots:
            return
        while len(self._played) > 2:
            self._played.popleft()
        group, arm = self._played[0]
        if round.prefill_tokens:
            return
        arms = self._rounds[group]
        count, mean = arms[arm]
        count = min(count + 1, 500)
        arms[arm] = count, mean + (round.tokens / round.seconds - mean) / count


def _bucket(batch: int) -> int:
    return (batch - 1).bit_length()


class Scan(Deaf):
    """DSpark: add the likeliest node as long as tokens a second, by the profile, get better; stop at the first that does not. Takes the
    confidences at their word and charges nothing for drafting."""

    name = "dspark scan"

    def __init__(self, costs: Costs) -> None:
        self._costs = CostTable(costs, 1024)

    def decide(self, chance: Chance) -> Choice:
        offers = [chance.offer(i, MOST) for i in range(len(chance.streams))]
        order = sorted(
            [(-survival, i, n) for i, offer in enumerate(offers) for n, survival in enumerate(survivals(offer.parent, offer.confidence))]
        )
        roots = len(offers)
        read = sum(len(stream.tokens) for stream in chance.streams)
        tokens = float(roots)
        best = tokens / self._costs.profiled(roots, roots, read, read)
        kept: list[list[int] | None] = [[] for _ in offers]
        for count, (survival, i, n) in enumerate(order, 1):
            tokens -= survival
            rate = tokens / self._costs.profiled(roots + count, roots, read, read + count * read // roots)
            if rate <= best:
                break
            best = rate
            nodes = kept[i]
            assert nodes is not None
            nodes.append(n)
        return Choice(kept, MOST)


class Clairvoyant(Deaf):
    """Knows what will hold and the machine as it is, and verifies of it what is worth its time. Pays for no drafting."""

    name = "clairvoyant"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def decide(self, chance: Chance) -> Choice:
        roots = len(chance.streams)
        held = [[n for n, holds in enumerate(offer.held) if holds] for offer in (chance.offer(i, MOST) for i in range(roots))]
        order = sorted((place, i) for i, nodes in enumerate(held) for place in range(len(nodes)))
        read = sum(len(stream.tokens) for stream in chance.streams)
        rates = [
            (roots + count) / self._machine.seconds(roots + count, read, read + count * read // roots) for count in range(len(order) + 1)
        ]
        count = rates.index(max(rates))
        most = [sum(1 for _, stream in order[:count] if stream == i) for i in range(roots)]
        return Choice([nodes[:n] or None for nodes, n in zip(held, most)], 0)
