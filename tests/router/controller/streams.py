"""Sequences and rounds for tests of controllers."""

from __future__ import annotations

import itertools
import random

from forerun.bench.unheard import Unheard
from forerun.engine.drafters.choose import choose
from forerun.messages import SamplingParams
from forerun.router.controller.cost import Costs
from forerun.router.controller.drafting import USUAL
from forerun.router.guesses import Allowance, Controller, Round
from forerun.router.request import Request, Sequence

COSTS = Costs([(1, 0.006), (4, 0.0063), (8, 0.0068), (16, 0.0105), (32, 0.0185), (64, 0.035)])
PART, READ_SECONDS = 128, 1e-4
"""tokens of a step of a drafter that reads in parts, and what each takes"""


def sequence(tokens: int = 50, speculate: int | None = None, priority: int = 0) -> Sequence:
    params = SamplingParams(0, tokens, 1000)
    request = Request("r", [0] * tokens, params, 0.0, speculate=speculate, priority=priority)
    return Sequence(request, params, Unheard(), [0] * tokens)


class World:
    """A worker in a few lines: a chain of guesses for everybody who may have some, each right with `chance`, and steps that take what the
    costs say. `frugal`: it keeps of them what is worth its toll; otherwise all. `claim`: what it says of a guess's chance at first, if not
    the truth; like a real worker it finds out."""

    def __init__(
        self,
        chance: float = 0.7,
        seed: int = 0,
        draft_seconds: float = 3e-5,
        frugal: bool = False,
        claim: float | None = None,
        chosen_seconds: float = 0.0,
    ) -> None:
        """`draft_seconds`: of each ask, `chosen_seconds` of a step, on top."""
        self.chance = chance
        self._belief = claim
        self.tokens = self.nodes = 0
        self.seconds = 0.0
        self.frugal = frugal
        self.draft_seconds, self.chosen_seconds = draft_seconds, chosen_seconds
        self.slow = 1.0
        self.halt = 0.0
        """seconds for which each step stands still"""
        self.plain = self.asked = 0
        self.unread = -1
        """tokens that the drafter, which reads a part in a step, has yet to read before it guesses; −1: it says nothing of such"""
        self._dice = random.Random(seed)

    def step(self, controller: Controller, sequences: list[Sequence], prefill: int = 0) -> Allowance | None:
        allowance = controller(sequences, prefill)
        guess = allowance.guess if allowance else [0] * len(sequences)
        nodes = accepted = 0
        asked = sum(most > 0 for most in guess)
        kept = self._kept(allowance) if allowance and self.frugal else guess
        part = min(self.unread, PART) if asked and self.unread > 0 else 0
        self.unread -= part
        kept = [0] * len(kept) if part else kept
        for one, may, most in zip(sequences, guess, kept):
            held = next((n for n in range(most) if self._dice.random() >= self.chance), most)
            if may:
                expected = sum(self._claimed ** (n + 1) for n in range(most))
                controller.landed(one, most, held, expected)
            nodes, accepted = nodes + most, accepted + held
            one.tokens.extend([0] * (1 + held))
        rows = len(sequences) + nodes + prefill
        chosen = self.chosen_seconds if asked else 0.0
        drafting = asked * self.draft_seconds + part * READ_SECONDS + chosen
        seconds = seconds_of(rows) * self.slow * self._dice.uniform(0.97, 1.03) + drafting + self.halt
        read = sum(len(one.tokens) for one in sequences)
        tokens = len(sequences) + accepted
        late = max(0, part - USUAL) if self.unread >= 0 else -1
        controller.stepped(Round(len(sequences), rows, nodes, asked, read, tokens, seconds, drafting, prefill, 0, chosen, late))
        self.tokens, self.nodes, self.seconds = self.tokens + tokens, self.nodes + nodes, self.seconds + seconds - self.halt
        if self._belief is not None and nodes:
            self._belief += 0.1 * (self.chance - self._belief)
        self.plain += not asked
        self.asked += asked
        return allowance

    @property
    def _claimed(self) -> float:
        return self.chance if self._belief is None else self._belief

    def _kept(self, allowance: Allowance) -> list[int]:
        weights = allowance.weights or [1.0] * len(allowance.guess)
        worth = [[weight * self._claimed ** (n + 1) for n in range(most)] for weight, most in zip(weights, allowance.guess)]
        return [len(nodes) for nodes in choose(worth, allowance.toll, allowance.discount)]


def seconds_of(rows: int) -> float:
    steps = COSTS.steps
    for (low, low_seconds), (high, high_seconds) in itertools.pairwise(steps):
        if rows <= high:
            return low_seconds + (high_seconds - low_seconds) * (rows - low) / (high - low)
    return steps[-1][1] * rows / steps[-1][0]
