#!/usr/bin/env python3
"""Replays texts against a drafter, without a model: what would have been accepted, and how honest the confidences are.

Which token the target picks does not depend on speculation, so a text that was generated once says exactly what any drafter would
have earned on it. Input: JSON lines {"prompt": [ids], "output": [ids], "workload": name (optional)}; they are replayed in a shuffled
order, `--rows` at a time, as a worker would.

    python tools/replay_drafts.py outputs.jsonl --drafter suffix --nodes 8 --rows 1

`--bound` says what no look-up can pass: the longest run behind any place of the text so far whose last token is the newest one, chosen with
hindsight and never a token too long; and the same behind any place at all, whatever stands before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

from forerun.engine.drafters.draft import Commit, Draft, Drafter, Room, prune
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.verify import walk

BINS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    prompt: list[int]
    output: list[int]
    workload: str = ""


@dataclasses.dataclass(slots=True)
class Tally:
    """What came of the drafts of one workload. `scored`: (confidence, held) of every node whose parent was true."""

    steps: int = 0
    nodes: int = 0
    accepted: int = 0
    scored: list[tuple[float, bool]] = dataclasses.field(default_factory=list)

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: |confidence − acceptance| in bins of equal width, weighted by how many nodes fall into each."""
        sums = [[0.0, 0] for _ in range(BINS)]
        for confidence, held in self.scored:
            part = sums[min(BINS - 1, int(confidence * BINS))]
            part[0] += confidence - held
        return sum(abs(part[0]) for part in sums) / max(1, len(self.scored))

    def speedup(self, row_cost: float) -> float:
        """Tokens over steps, if each node makes a step longer by `row_cost` of a plain one."""
        return (self.steps + self.accepted) / max(1e-9, self.steps + row_cost * self.nodes)


@dataclasses.dataclass(slots=True)
class _Running:
    text: Text
    row: int
    heard: int = 0
    at: int = 1
    """tokens of the output that are known; the last of them is the root"""


def replay(drafter: Drafter, texts: Sequence[Text], nodes: int, rows: int = 1, price: float = 0.0) -> tuple[dict[str, Tally], list[float]]:
    """Returns a tally for each workload, and the CPU seconds that drafting took in each step."""
    waiting = [text for text in reversed(texts) if len(text.output) > 1]
    running: list[_Running] = []
    free = list(range(rows))
    tallies: dict[str, Tally] = {}
    seconds: list[float] = []
    while waiting or running:
        while waiting and free:
            running.append(_Running(waiting.pop(), free.pop()))
        commit = _commit(running)
        numbers, budget = [one.row for one in running], [nodes] * len(running)
        began = time.thread_time()
        drafter.absorb(commit)
        drafts = drafter.propose(numbers, budget)
        seconds.append(time.thread_time() - began)
        for one, draft in zip(running, drafts, strict=True):
            tally = tallies.setdefault(one.text.workload, Tally())
            one.at += 1 + _score(tally, prune(draft, Room(nodes, nodes, 1 << 31, price)), one.text.output[one.at :])
        over = [one for one in running if one.at >= len(one.text.output)]
        running = [one for one in running if one.at < len(one.text.output)]
        if over:
            drafter.forget([one.row for one in over])
            free += [one.row for one in over]
    return tallies, seconds


def _commit(running: Sequence[_Running]) -> Commit:
    told = [[*one.text.prompt, *one.text.output[: one.at]] for one in running]
    commit = Commit(
        [one.row for one in running],
        [one.heard for one in running],
        [tokens[one.heard : -1] for tokens, one in zip(told, running)],
        [tokens[-1] for tokens in told],
        prompt=[len(one.text.prompt) for one in running],
    )
    for tokens, one in zip(told, running):
        one.heard = len(tokens) - 1
    return commit


def _score(tally: Tally, draft: Draft, future: list[int]) -> int:
    """How many guesses are accepted, of a text that goes on with `future`."""
    picks = [future[0]] * (1 + draft.count)
    reached: list[int] = []
    for node, (token, parent, confidence) in enumerate(zip(draft.token, draft.parent, draft.confidence)):
        depth = 0 if parent < 0 else reached[parent]
        held = 0 <= depth < len(future) and token == future[depth]
        if 0 <= depth < len(future):
            tally.scored.append((confidence, held))
        reached.append(depth + 1 if held else -1)
        picks[1 + node] = future[depth + 1] if held and depth + 1 < len(future) else -1
    accepted = min(len(walk(draft, picks)), len(future) - 1)
    tally.steps += 1
    tally.nodes += draft.count
    tally.accepted += accepted
    return accepted


def bound(text: Text, context: int, most: int) -> list[int]:
    """Guesses accepted in each step of a look-up in the text itself that knows the future: the longest run of at most `most` tokens behind
    any place where the `context` newest tokens stand. What it takes is what is accepted."""
    tokens = [*text.prompt, *text.output]
    at, end = len(text.prompt) + 1, len(tokens)
    found: list[int] = []
    while at < end:
        newest, longest = tokens[at - context : at], 0
        for place in range(context, at):
            if tokens[place - context : place] == newest:
                run = 0
                # A run may meet its own beginning: what repeats is guessed as often as one likes.
                while run < most and at + run < end - 1 and tokens[place + run] == tokens[at + run]:
                    run += 1
                longest = max(longest, run)
        found.append(longest)
        at += 1 + longest
    return found


def _print_bounds(texts: Sequence[Text], nodes: int, row_cost: float) -> None:
    for workload in sorted({text.workload for text in texts}):
        for context in (1, 0):
            taken = [run for text in texts if text.workload == workload and len(text.output) > 1 for run in bound(text, context, nodes)]
            accepted, steps = sum(taken), len(taken)
            what = "behind the newest token" if context else "anywhere"
            print(
                f"{workload:12} {what:24} accepted {accepted / steps:5.2f} a step"
                f"  speed x{Tally(steps, accepted, accepted).speedup(row_cost):.2f} beside the prompt"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--nodes", type=int, default=8, help="most guesses of a draft")
    parser.add_argument("--rows", type=int, default=1, help="texts replayed side by side")
    parser.add_argument("--price", type=float, default=0.0, help="survival below which a node is dropped")
    parser.add_argument("--row-cost", type=float, default=0.02, help="what a node adds to a step, in plain steps")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--bound", action="store_true", help="what no look-up can pass, instead of a drafter")
    asked = parser.parse_args()
    texts = [Text(one["prompt"], one["output"], one.get("workload", "")) for one in map(json.loads, asked.file.read_text().splitlines())]
    if asked.bound:
        _print_bounds(texts, asked.nodes, asked.row_cost)
        return
    random.Random(asked.seed).shuffle(texts)
    drafter = open_drafter(asked.drafter, Setting(nodes=asked.nodes))
    tallies, seconds = replay(drafter, texts, asked.nodes, asked.rows, asked.price)
    for name, tally in sorted(tallies.items()):
        print(
            f"{name:12} accepted {tally.accepted / tally.steps:5.2f}  drafted {tally.nodes / tally.steps:5.2f} a step"
            f"  calibration error {tally.calibration_error:.3f}  speed x{tally.speedup(asked.row_cost):.2f}"
        )
    seconds.sort()
    micros = [1e6 * seconds[int(len(seconds) * part)] for part in (0.5, 0.9)]
    print(f"drafting: median {micros[0]:.0f} us a step, 90th percentile {micros[1]:.0f} us, with up to {asked.rows} rows")


if __name__ == "__main__":
    main()
