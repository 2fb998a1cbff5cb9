"""The scenarios that policies are compared on: kinds of text × machines × loads, and what goes wrong in practice.

Numbers are those of small and large models on two kinds of CPU arithmetic and on a large device; the texts are drawn from models of
what was measured with the demo model's drafters (docs/controller.md). Every scenario is made from its name alone, so a run can be
repeated anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence

from forerun.bench.arrivals import arrivals
from forerun.bench.machine import CPU, GPU, NATIVE, STAIR, Machine
from forerun.bench.policies import MOST
from forerun.bench.replay import Answer, Shelf
from forerun.bench.simulate import Scenario
from forerun.bench.traces import Regime, Track, draw, mixed, switching

CHAT = Regime(0.35, spread=0.6, silence=0.5)
MATHS = Regime(0.5, spread=0.6, silence=0.3)
CODE = Regime(0.7, spread=0.6, silence=0.2)
COPY = Regime(0.95, spread=0.5, silence=0.05)
LIAR = Regime(0.02, spread=0.0, claim=0.9)
"""a drafter that is sure and wrong"""
BLIND = Regime(0.8, spread=0.0, claim=1.0)
"""a drafter that is good and says nothing of it"""
HONEST = Regime(0.9, spread=0.0, claim=0.9)

TEXTS = {"chat": [CHAT], "maths": [MATHS], "code": [CODE], "copy": [COPY], "chat and copy": [CHAT, COPY], "liar": [LIAR], "blind": [BLIND]}
SWITCHES = {"chat to copy": [CHAT, COPY], "good to useless": [HONEST, LIAR]}
PROMPT = 60
DRAFT_MODEL = {"draft_each": 0.0, "draft_step": 0.2e-3, "draft_node": 0.6e-3, "draft_read": 0.08e-3}
"""a small model in the same process: a tenth of a step for each level, whatever the batch, and it reads every prompt"""


def busy(now: float, rows: int) -> float:
    """Twice as slow from the second second on, and large steps another fifth."""
    return 1.0 if now < 2.0 else 2.0 * (1.2 if rows > 8 else 1.0)


def gusts(now: float, rows: int) -> float:
    """Half of the time somebody else is on the machine."""
    return 1.7 if int(now / 0.7) % 2 else 1.0


def scenarios(tokens: int, loads: Sequence[int] = (1, 4, 16, 32), machines: Sequence[Machine] = (CPU, STAIR, GPU)) -> Iterator[Scenario]:
    """All of them; `tokens`: mean length of an answer."""
    for machine in machines:
        for load in loads:
            dice = random.Random(f"{machine.name} {load}")
            count = max(8, 2 * load)
            for name, regimes in TEXTS.items():
                yield _closed(machine, name, mixed(dice, regimes, count, tokens, PROMPT), load)
            for name, regimes in SWITCHES.items():
                yield _closed(machine, name, switching(dice, regimes, count, 2 * tokens, PROMPT, max(20, tokens // 2)), load)
    yield from _accidents(tokens)
    yield from _arrivals(tokens)


def _closed(machine: Machine, name: str, tracks: Sequence[Track], load: int) -> Scenario:
    return Scenario(f"{machine.name}, {name}, {load}", machine, tracks, clients=load)


def _accidents(tokens: int) -> Iterator[Scenario]:
    """A machine that others use, a profile that is wrong, a drafter that takes its time."""
    for load in (1, 8):
        dice = random.Random(f"accidents {load}")
        texts = {"chat": [CHAT], "code": [CODE]}
        for name, regimes in texts.items():
            tracks = mixed(dice, regimes, 8 * load, tokens, PROMPT)
            yield _closed(dataclasses.replace(CPU, name="slower", weather=busy), name, tracks, load)
            yield _closed(dataclasses.replace(CPU, name="gusts", weather=gusts), name, tracks, load)
            yield _closed(dataclasses.replace(CPU, name="draft model", **DRAFT_MODEL), name, tracks, load)  # type: ignore[arg-type]


def _arrivals(tokens: int) -> Iterator[Scenario]:
    """Open loops: `rate` requests a second, in bursts or not."""
    for name, rate, burstiness in (("poisson", 3.0, 1.0), ("bursts", 2.0, 0.15)):
        tracks = mixed(random.Random(name), [CHAT, CODE, COPY], 60, tokens, 4 * PROMPT)
        yield Scenario(f"cpu bf16, {name}", CPU, tracks, arrivals=functools.partial(arrivals, rate, burstiness), rows=32)


def replayed(answers: Sequence[Answer], drafter: str, loads: Sequence[int] = (1, 4, 16)) -> Iterator[Scenario]:
    """Recorded answers, each kind of text by itself and all together, before a real drafter."""
    kinds = {name: [one for one in answers if one.workload == name] for name in dict.fromkeys(one.workload for one in answers)}
    for load in loads:
        for name, chosen in [*kinds.items(), ("all", answers)]:
            anew = functools.partial(_shelved, drafter, chosen)
            yield dataclasses.replace(_closed(NATIVE, f"{drafter} on {name}", [], load), anew=anew)


def fresh(answers: Sequence[Answer], drafter: str, each: int) -> Iterator[Scenario]:
    """Recorded answers of a kind, `each` at a time, one after the other before a drafter that has seen no others."""
    for name in dict.fromkeys(one.workload for one in answers):
        chosen = [one for one in answers if one.workload == name]
        for first in range(0, len(chosen) - each + 1, each):
            anew = functools.partial(_shelved, drafter, chosen[first : first + each])
            yield dataclasses.replace(_closed(NATIVE, f"{name} from {first + 1}", [], 1), anew=anew)


def _shelved(drafter: str, answers: Sequence[Answer]) -> list[Track]:
    return Shelf(drafter, MOST).tracks(answers)


def change(before: Regime, after: Regime, steady: int, behind: int, load: int, machine: Machine = CPU) -> Scenario:
    """Answers that all change their kind after `steady` tokens, for `behind` more."""
    dice = random.Random(f"{before} {after} {load}")
    tracks = [draw(dice, PROMPT, [(before, steady), (after, behind)]) for _ in range(load)]
    return Scenario("change", machine, tracks, clients=load)
