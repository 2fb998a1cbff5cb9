"""What a drafter costs that brings nothing: `python -m forerun.bench.upkeep --speculator eagle=DIR`.

Three engines over one model take the same steps in turns: one without the drafter, one with it whose plans want no guess, and one whose
plans ask about every row and charge more for a guess than any can bring. What the second needs beyond the first is upkeep: hidden states
that are handed over, told and kept. It should be nothing. What the third needs beyond that are telling, drafting and choosing.

With one thread the clock is that thread's own, so that other programs on the machine hardly matter.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forerun.backends.registry import open_backend
from forerun.bench.stats import median
from forerun.engine.build import assemble
from forerun.engine.drafters.registry import Host, Setting, open_drafter
from forerun.engine.engine import Engine
from forerun.engine.models.load import load_model
from forerun.messages import Admit, Feed, SamplingParams, Start, StepPlan

PLAIN = "none"
TOO_DEAR = 2.0
"""what every guess has to bring where all are asked for in vain: none brings more than a token"""
WARM = 16
"""steps of each load that are not counted"""


class Seat:
    """An engine that is fed one token a row and step, from pages that were dealt out beforehand."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine, self._clock, self._number = engine, clock, 0
        self.guesses = engine.ready.max_nodes

    def begin(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        """Reads the prompts, each with pages for so many tokens more."""
        size = self._engine.ready.page_tokens
        admits, feeds, page = [], [], 0
        for row, prompt in enumerate(prompts):
            count = -(-(len(prompt) + steps + 1 + self.guesses) // size)
            params = SamplingParams(seed=0, prompt_tokens=len(prompt), max_new_tokens=steps + 2 + self.guesses)
            admits.append(Admit(row, list(prompt), 0, [], params))
            feeds.append(Feed(row, len(prompt), 0, list(range(page, page + count))))
            page += count
        self._step(StepPlan(self._next(), admits, feeds, []))

    def step(self, rows: int, guess: int = 0) -> float:
        """Seconds. `guess`: of each row, in vain."""
        toll = [TOO_DEAR * (n + 1) for n in range(guess * rows)]
        feeds = [Feed(row, 1, guess, []) for row in range(rows)]
        plan = StepPlan(self._next(), [], feeds, [], budget=guess * rows, toll=toll, goodput=1.0 * guess)
        began = self._clock()
        self._step(plan)
        return self._clock() - began

    def end(self, rows: int) -> None:
        self._step(StepPlan(self._next(), [], [], list(range(rows))))

    def _step(self, plan: StepPlan) -> None:
        wrong = [emit.error for emit in self._engine.step(plan).emit if emit.error]
        if wrong:
            raise RuntimeError(wrong[0])

    def _next(self) -> int:
        self._number += 1
        return self._number


@dataclasses.dataclass(frozen=True, slots=True)
class Upkeep:
    """Medians of a step, in seconds."""

    rows: int
    plain: float
    closed: float
    asked: float


def measure(start: Start, speculator: str, rows: Sequence[int], steps: int, context: int) -> list[Upkeep]:
    backend = open_backend(start.device, start.threads, start.memory_fraction)

    def said(stage: str, done: int, total: int) -> None:
        return None

    model = load_model(start, backend, said)
    host = Host(start, backend, model, said)
    clock = time.thread_time if start.threads == 1 else time.perf_counter
    names = PLAIN, speculator, speculator
    seats = [Seat(assemble(start, backend, model, open_drafter(name, Setting(0, True, host)), said), clock) for name in names]
    guesses = 0, 0, seats[-1].guesses
    dice = random.Random(0)
    found = []
    for count in rows:
        prompts = [[dice.randrange(model.vocab // 2) for _ in range(context)] for _ in range(count)]
        for seat in seats:
            seat.begin(prompts, WARM + steps)
        taken: list[list[float]] = [[] for _ in seats]
        for number in range(WARM + steps):
            for turn in range(len(seats)):
                which = (number + turn) % len(seats)
                taken[which].append(seats[which].step(count, guesses[which]))
        for seat in seats:
            seat.end(count)
        found.append(Upkeep(count, *(median(each[WARM:]) for each in taken)))
    return found


def table(found: Sequence[Upkeep]) -> str:
    lines = ["| rows | plain step | with the drafter, closed | asked in vain |", "|---|---|---|---|"]
    for one in found:
        parts = [f"{1e3 * seconds:.2f} ms, {seconds / one.plain:.3f}" for seconds in (one.closed, one.asked)]
        lines.append(f"| {one.rows} | {1e3 * one.plain:.2f} ms | {' | '.join(parts)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.upkeep", description=__doc__.split("\n")[0])
    parser.add_argument("--model-id", type=Path, default=Path("models/smollm2-135m-instruct"), help="(default: %(default)s)")
    parser.add_argument("--speculator", required=True, help="what is measured")
    parser.add_argument("--rows", type=int, action="append", help="may be repeated (default: 1, 4, 16)")
    parser.add_argument("--steps", type=int, default=200, help="of each engine and load (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="(default: one for each core)")
    asked = parser.parse_args(argv)
    rows = asked.rows or [1, 4, 16]
    tokens = asked.context + asked.steps + WARM + 32
    sizes = {"max_rows": max(rows), "max_total_tokens": tokens, "max_pool_tokens": max(rows) * (tokens + 32)}
    start = Start(str(asked.model_id), threads=asked.threads, **sizes)
    print(table(measure(start, asked.speculator, rows, asked.steps, asked.context)))


if __name__ == "__main__":
    main()
