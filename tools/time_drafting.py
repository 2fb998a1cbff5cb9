#!/usr/bin/env python3
"""What guessing costs a step beside the forward: processor time of the engine's drafting, without a model.

Rows of made-up text that repeats itself now and then are decoded as a worker would, with tolls as the controller sets them; measured is
all that stands between the plan and the forward. Time is printed in microseconds and in units of a fixed piece of Python (the yardstick
runs in turns with it), so that a busy or slow machine changes the second figure little. A worker reads all weights between two drafts, so
that the interpreter finds nothing of its own in the caches: `--weights 270` reads so many megabytes, as the demo model does.

    python tools/time_drafting.py --drafter suffix --rows 1,16 --weights 270 [--python]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import numpy as np

from forerun.engine.drafters.draft import Draft
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.drafters.speculator import Speculator
from forerun.engine.kv import Table
from forerun.engine.rows import Row, Share
from forerun.messages import SamplingParams, StepPlan

VOCAB, LONGEST, PAGE = 49152, 2048, 16
NODES = 16
TOLL = 0.02, 0.015
"""what a node has to bring: at no rows, and more for each of them"""


def text(seed: int, length: int) -> list[int]:
    """Phrases of a small book in random order: about every third token can be guessed."""
    dice = random.Random(seed)
    phrases = [[dice.randrange(2000) for _ in range(dice.randrange(3, 9))] for _ in range(60)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += dice.choice(phrases)
        tokens += [dice.randrange(2000) for _ in range(dice.randrange(3))]
    return tokens[:length]


class Bench:
    """`rows` rows in one table, drafted for step by step; each step commits what really follows. `native`: look-ups may be those in C++."""

    def __init__(self, drafter: str, rows: int, native: bool = True) -> None:
        self._texts = [text(seed, 1000) for seed in range(rows)]
        self._table = Table(rows, LONGEST, PAGE)
        self._rows: list[Row] = []
        params = SamplingParams(seed=0, prompt_tokens=200, max_new_tokens=1 << 30)
        for number, tokens in enumerate(self._texts):
            self._table.grant(number, range(LONGEST // PAGE))
            self._rows.append(Row.open(number, params, tokens[:200], 199))
        self._speculator = Speculator(open_drafter(drafter, Setting(NODES, native=native)), VOCAB, LONGEST, NODES, 128)
        price = TOLL[0] + TOLL[1] * rows
        self._toll = [price * (n + 1) for n in range(64)]
        self.nodes = 0

    def step(self, guess: int = NODES) -> float:
        """Seconds of drafting for all rows."""
        shares = [Share(row, 1, guess, Draft.none(), []) for row in self._rows]
        plan = StepPlan(0, budget=128, price=self._toll[0], toll=self._toll, goodput=100.0) if guess else StepPlan(0)
        began = time.perf_counter()
        self._speculator.draft(shares, self._table, plan)
        seconds = time.perf_counter() - began
        for row, whole, share in zip(self._rows, self._texts, shares):
            self.nodes += share.draft.count
            at = len(row.tokens)
            row.commit(whole[at : at + 2], at + 1)
        return seconds


def yardstick() -> float:
    """Seconds of a fixed piece of Python: about ten microseconds."""
    began = time.perf_counter()
    total, found = 0, {}
    for i in range(100):
        found[i & 31] = total
        total += i * 3 & 255
    return time.perf_counter() - began


def measure(drafter: str, rows: int, steps: int = 200, weights: int = 0, native: bool = True) -> tuple[float, float, float]:
    """(microseconds, yardsticks, nodes) of a step, medians; the first tenth of the steps is warm-up. `weights`: megabytes that are read
    before each."""
    bench = Bench(drafter, rows, native)
    read = np.ones(weights << 17)
    seconds: list[float] = []
    sticks: list[float] = []
    for _ in range(steps):
        read.sum()
        seconds.append(bench.step())
        sticks.append(yardstick())
    own, stick = (statistics.median(part[steps // 10 :]) for part in (seconds, sticks))
    return 1e6 * own, own / stick, bench.nodes / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--rows", default="1,4,16", help="row counts, joined by commas")
    parser.add_argument("--weights", type=int, default=0, help="megabytes that are read between two steps")
    parser.add_argument("--python", action="store_true", help="look-ups as they are where there is no compiler")
    asked = parser.parse_args()
    for rows in map(int, asked.rows.split(",")):
        micros, sticks, nodes = measure(asked.drafter, rows, weights=asked.weights, native=not asked.python)
        print(f"{rows:3} rows: {micros:6.1f} us a step = {sticks:5.1f} yardsticks, {nodes:.1f} nodes kept")


if __name__ == "__main__":
    main()
