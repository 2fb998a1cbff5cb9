"""Policies against each other on many scenarios: what `forerun bench simulate` runs, and the bars that a test keeps."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from forerun.bench import plots, replay, workloads
from forerun.bench.policies import (
    MOST,
    Always,
    Bandit,
    BatchTable,
    Clairvoyant,
    Cubic,
    Ema,
    Governed,
    Heuristic,
    Policy,
    Scan,
)
from forerun.bench.scenarios import fresh, replayed, scenarios
from forerun.bench.simulate import Outcome, Scenario, simulate
from forerun.bench.template import chat_form
from forerun.bench.unforeseen import unforeseen
from forerun.router.controller.price import Price
from forerun.router.controller.simple import Aimd

FIXED = (1, 2, 3, 4, 6, 8, 12, 16)
"""k of the fixed policies; the best of them, known only afterwards, is what the controller is measured by"""


def ours(scenario: Scenario) -> Policy:
    """The controller of the server. It knows the machine by a profile that is a little wrong."""
    return Governed("price", Price(scenario.machine.profile(random.Random(scenario.name)), MOST), scenario.machine)


def fixed(scenario: Scenario) -> Iterator[Policy]:
    """Plain decoding first."""
    yield from (Always(k) for k in (0, *FIXED))


def others(scenario: Scenario) -> Iterator[Policy]:
    yield BatchTable()
    yield Heuristic()
    yield Governed("aimd", Aimd(MOST), scenario.machine)
    yield Cubic()
    yield Ema()
    yield Bandit()
    yield Scan(scenario.machine.profile(random.Random(scenario.name)))
    yield Clairvoyant(scenario.machine)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What every policy made of a scenario."""

    scenario: str
    outcomes: dict[str, Outcome]

    @property
    def plain(self) -> float:
        return self.outcomes["none"].speed

    @property
    def best_fixed(self) -> str:
        """Of plain decoding and every k."""
        names = ["none", *(f"k={k}" for k in FIXED)]
        return max((name for name in names if name in self.outcomes), key=lambda name: self.outcomes[name].speed)

    def over_plain(self, policy: str) -> float:
        return self.outcomes[policy].speed / self.plain

    def over_best(self, policy: str) -> float:
        return self.outcomes[policy].speed / self.outcomes[self.best_fixed].speed


def run(chosen: Iterable[Scenario], policies: Sequence[Callable[[Scenario], Iterable[Policy]]], seed: int = 0) -> Iterator[Result]:
    """Each scenario under each policy, and under ours."""
    for scenario in chosen:
        rivals = [policy for family in policies for policy in family(scenario)]
        yield Result(scenario.name, {policy.name: simulate(scenario, policy, seed) for policy in [ours(scenario), *rivals]})


def recovery(outcome: Outcome, steady: int, rounds: int, load: int) -> float:
    """Tokens a second from `rounds` rounds after the place where all answers changed their kind, to their end. `steady`: tokens of each
    answer before that place."""
    total = 0
    for at, (tokens, _) in enumerate(outcome.pace):
        total += tokens
        if total >= steady * load:
            rest = outcome.pace[at + rounds :]
            return sum(tokens for tokens, _ in rest) / sum(seconds for _, seconds in rest)
    raise ValueError("the answers end before they change")


HEADER = f"{'machine, text, streams':34}{'plain':>8}{'price':>8}{'of best':>9}{'best':>8}{'wasted':>8}"


def row(result: Result) -> str:
    """One line under HEADER: plain speed in tokens a second and stream, ours over it, ours over the best fixed k, and the rest over
    plain."""
    fixed = {"none", "price", *(f"k={k}" for k in FIXED)}
    line = (
        f"{result.scenario:34}{result.plain:>8.1f}{result.over_plain('price'):>8.2f}{result.over_best('price'):>9.3f}"
        f"{result.best_fixed:>8}{result.outcomes['price'].wasted:>8.0%}"
    )
    rest = [f"{name} {result.over_plain(name):.2f}" for name in result.outcomes if name not in fixed]
    return "  ".join([line, *rest])


def summary(results: Sequence[Result]) -> list[str]:
    """For each policy: its worst case against plain decoding, and its worst and mean against the best fixed k."""
    names = [name for name in results[0].outcomes if name != "none"]
    lines = [f"{'policy':14}{'worst over plain':>18}{'worst over best k':>19}{'mean over best k':>18}"]
    for name in names:
        plain = min(result.over_plain(name) for result in results)
        best = [result.over_best(name) for result in results]
        lines.append(f"{name:14}{plain:>18.3f}{min(best):>19.3f}{sum(best) / len(best):>18.3f}")
    return lines


def _chosen(options: argparse.Namespace) -> Iterator[Scenario]:
    if options.unforeseen:
        return unforeseen(options.unforeseen, options.seed)
    if not options.answers:
        return scenarios(options.tokens)
    answers = replay.load(options.answers)
    return fresh(answers, options.drafter, options.each) if options.each else replayed(answers, options.drafter)


def main(argv: Sequence[str]) -> int:
    """`forerun bench simulate`: all scenarios, a table, and with --plot a picture. Or, with --record, answers for later."""
    parser = argparse.ArgumentParser(prog="forerun bench simulate", description=__doc__)
    parser.add_argument("--tokens", type=int, default=200, help="mean length of an answer (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name has this in it")
    parser.add_argument("--others", action="store_true", help="also the policies of other systems")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="where pictures go")
    parser.add_argument("--unforeseen", type=int, default=0, metavar="N", help="N scenarios drawn from --seed instead of those chosen here")
    parser.add_argument("--seed", type=int, default=0, help="of --unforeseen (default: %(default)s)")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="replay these recorded answers instead of drawn ones")
    parser.add_argument(
        "--each",
        type=int,
        default=0,
        metavar="N",
        help="N answers of a kind at a time before a fresh drafter (default: all, by 1, 4 and 16)",
    )
    parser.add_argument("--drafter", default="suffix", metavar="SPEC", help="what guesses on them (default: %(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="have the model write answers, once each, and leave")
    parser.add_argument("--model-id", default="models/smollm2-135m-instruct", help="the model that writes them (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, metavar="FOLDER", help="to NAME.jsonl files there instead of the workloads made here")
    parser.add_argument("--count", type=int, default=8, help="of each kind of text (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.plot:
        plots.require()
    if options.record:
        form = chat_form(Path(options.model_id))
        asked = workloads.from_folder(options.prompts) if options.prompts else workloads.made()
        replay.save(options.record, asyncio.run(replay.record(options.model_id, asked, options.count, options.tokens, form, print)))
        return 0
    families = [fixed, others] if options.others else [fixed]
    results = []
    print(HEADER)
    for result in run((scenario for scenario in _chosen(options) if options.only in scenario.name), families):
        results.append(result)
        print(row(result), flush=True)
    if results:
        print("\n".join(["", *summary(results)]))
    if options.plot and results:
        names = [name for name in results[0].outcomes if name != "none"]
        series = {name: [result.over_plain(name) for result in results] for name in names}
        plots.policies([result.scenario for result in results], series, options.plot / "controller.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
