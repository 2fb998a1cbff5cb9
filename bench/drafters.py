"""Drafters side by side: the same requests to a server for each of them, and to one that never guesses, in turns.

    python -m forerun.bench.drafters --plot            (make bench-drafters)

All servers of a round live at once and take turns at each load, in an order that moves on from load to load; while one answers, the others
are idle. What each is measured against is the plain server's turn at the same load, minutes away at the most. A load's prompts go to every
server once, so that nobody has seen an answer before. Every answer must be the plain server's, token by token.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from forerun.bench import cli, plots, process, workloads
from forerun.bench.apis import Ask
from forerun.bench.errors import BenchError
from forerun.bench.launched import Launched, ours
from forerun.bench.speculation import FLAGS, describe, outcome, start, take
from forerun.bench.sweep import Match, Outcome, Spot, condense, lives
from forerun.bench.template import chat_form
from forerun.bench.workloads import Workload

PLAIN, AUTO = "none", "auto"
HEADS = {"eagle": "eagle3", "medusa": "medusa", "mtp": "mtp", "dflash": "dflash", "dspark": "dspark"}
"""what `--speculator` calls a head, and how the folders end in which `make heads` leaves them"""


def found(folder: Path, model: str) -> list[str]:
    """Drafters for this model: what is chosen where nothing is said, those without weights, what lies in `folder`, and two mixtures of the
    best known."""
    heads = [f"{name}={folder / f'{model}-{kind}'}" for name, kind in HEADS.items() if (folder / f"{model}-{kind}").is_dir()]
    models = [f"model={folder / model}"] if (folder / model / "config.json").is_file() else []
    tables = [f"suffix+grams={folder / f'{model}-grams'}"] if (folder / f"{model}-grams").is_dir() else []
    return [AUTO, "suffix", *models, *heads, *(f"suffix+{head}" for head in (heads or models)[:2]), *tables]


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """`tokens`: most of an answer. `requests`: most of a load, but no fewer than two for each stream; 0 = as many as are good for its
    figures. `minutes`: after which no load is begun, 0 = all are."""

    streams: Sequence[int] = (1, 4, 16)
    rounds: int = 1
    tokens: int = 128
    seed: int = 0
    requests: int = 0
    minutes: float = 0.0


class Field:
    """Runs the contest. `outcomes`: by drafter; `remarks`: for people."""

    def __init__(
        self,
        model_id: str,
        drafters: Sequence[str],
        flags: Sequence[str],
        settings: Settings,
        form: Callable[[str], str],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        given = [word for name, value in FLAGS.items() if name not in flags for word in (name, value)]
        self._programs = {name: ours(model_id, [*given, *flags, "--speculator", name]) for name in (PLAIN, *drafters)}
        self._settings, self._form, self._say = settings, form, say
        self._ask = Ask(settings.tokens, extra={"details": True})
        self.outcomes: dict[str, list[Outcome]] = {name: [] for name in drafters}
        self.remarks: list[str] = []

    async def run(self, chosen: Sequence[Workload]) -> None:
        """Raises BenchError when a request failed or a server did not start."""
        asked = self._settings
        plan = lives(chosen, asked.streams, asked.rounds, asked.seed, asked.requests)
        total, done, others, began = sum(map(len, plan)), 0, process.Others(), self._clock()

        def late() -> bool:
            return bool(asked.minutes) and self._clock() - began > 60 * asked.minutes

        for life in plan:
            if late():
                break
            async with AsyncExitStack() as stack:
                self._say(f"{done}/{total}: starting {len(self._programs)} servers")
                started = await start(stack, self._programs.values(), max(match.streams for match in life))
                servers = dict(zip(self._programs, started))
                for match in life:
                    if late():
                        break
                    done += 1
                    self._say(f"{done}/{total}: {match.workload}, {match.streams} streams, round {match.round + 1}")
                    await self._match(servers, match, done)
        if done < total:
            self.remarks.append(f"{done} of {total} loads, then the time was over")
        self.remarks.append(f"other programs took {others.share():.0%} of the machine meanwhile")

    async def _match(self, servers: dict[str, Launched], match: Match, number: int) -> None:
        names = list(servers)
        first = number % len(names)
        order = names[first:] + names[:first]
        taken = dict(zip(order, await take([servers[name] for name in order], match, self._ask, self._form)))
        slow, _ = taken[PLAIN]
        for name, outcomes in self.outcomes.items():
            outcomes.append(outcome(match, *taken[name], slow))


def table(spots: dict[str, list[Spot]], streams: int) -> str:
    """Markdown: speed over plain decoding and tokens a step of each drafter on each workload, and the means over them."""
    names = list(dict.fromkeys(spot.workload for of_one in spots.values() for spot in of_one))
    rows = [f"| {streams} stream{'s' * (streams > 1)} | {' | '.join(names)} | mean |", "|---" * (len(names) + 2) + "|"]
    for drafter, of_one in spots.items():
        own = {spot.workload: spot for spot in of_one if spot.streams == streams}
        cells = [f"{own[name].ratio:.2f} ({own[name].tokens:.2f})" if name in own else "–" for name in names]
        mean = [sum(values) / len(own) for values in zip(*((spot.ratio, spot.tokens) for spot in own.values()))]
        rows.append(f"| `{drafter}` | {' | '.join(cells)} | {mean[0]:.2f} ({mean[1]:.2f}) |")
    return "\n".join(rows)


def verdicts(spots: dict[str, list[Spot]]) -> Iterator[str]:
    """Of each mixture where it is slower than one of its parts, and of `auto` where it is slower than the look-ups that it begins with."""
    for mixture in (name for name in spots if "+" in name or name == AUTO):
        for part in mixture.split("+") if mixture != AUTO else ["suffix"]:
            rates = {(spot.workload, spot.streams): spot.ratio for spot in spots.get(part, [])}
            behind = [spot for spot in spots[mixture] if spot.ratio < rates.get((spot.workload, spot.streams), 0.0)]
            places = ", ".join(f"{spot.workload} at {spot.streams}" for spot in behind)
            if part in spots:
                yield f"{mixture} against {part}: faster at {len(spots[mixture]) - len(behind)} of {len(spots[mixture])} loads" + (
                    f"; slower at {places}" if behind else ""
                )


def main(argv: Sequence[str] | None = None) -> int:
    """0 done, 1 failed or answers differ."""
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.drafters", description=__doc__.split("\n")[0])
    parser.add_argument("--model-id", default="models/smollm2-135m-instruct", help="(default: %(default)s)")
    parser.add_argument("--drafts", type=Path, default=Path("drafts"), help="where trained drafts lie (default: %(default)s)")
    parser.add_argument("--drafter", action="append", help="a value of --speculator; may be repeated (default: all that are found)")
    parser.add_argument("--prompts", type=Path, help="a folder of NAME.jsonl (default: prompts of our own)")
    parser.add_argument("--only", action="append", default=[], metavar="WORKLOAD")
    parser.add_argument("--streams", type=int, action="append", help="may be repeated (default: 1, 4, 16)")
    parser.add_argument("--rounds", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="most of an answer (default: %(default)s)")
    parser.add_argument(
        "--requests", type=int, default=0, help="most of a load, but two for each stream (default: as many as are good for its figures)"
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no load after so many (default: no end)")
    parser.add_argument("--server-flag", action="append", default=[], help="for every server; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("bench/out/drafters.json"))
    parser.add_argument("--plot", action="store_true")
    asked = parser.parse_args(argv)
    try:
        return _run(asked)
    except (BenchError, ValueError, FileNotFoundError) as wrong:
        print(f"forerun bench: {wrong}", file=sys.stderr)
        return 1


def _run(asked: argparse.Namespace) -> int:
    if asked.plot:
        plots.require()
    model = Path(asked.model_id).name.removesuffix("-instruct")
    drafters = asked.drafter or found(asked.drafts, model)
    streams = tuple(asked.streams or Settings().streams)
    settings = Settings(streams, asked.rounds, asked.tokens, requests=asked.requests, minutes=asked.minutes)
    chosen = workloads.from_folder(asked.prompts, asked.only) if asked.prompts else workloads.made(asked.only)
    field = Field(
        asked.model_id, drafters, asked.server_flag, settings, chat_form(Path(asked.model_id)), lambda text: print(text, file=sys.stderr)
    )
    with contextlib.suppress(KeyboardInterrupt):  # whole loads of a run that was broken off count
        cli.run(field.run(chosen))
    if not all(field.outcomes.values()):
        raise BenchError("broken off before a load was whole")
    spots = {name: condense(outcomes) for name, outcomes in field.outcomes.items()}
    details: dict[str, Any] = {name: [dataclasses.asdict(one) for one in outcomes] for name, outcomes in field.outcomes.items()}
    cli.write(
        asked.out, {"settings": {name: str(value) for name, value in vars(asked).items()}, "machine": cli.machine(), "outcomes": details}
    )
    print("speed over plain decoding (tokens that a step brings)\n")
    counts = sorted({spot.streams for of_one in spots.values() for spot in of_one})
    print("\n\n".join([*(table(spots, count) for count in counts), *verdicts(spots), *field.remarks]))
    if asked.plot:
        plots.drafters(spots, asked.out.with_suffix(".png"))
    wrong = [text for outcomes in field.outcomes.values() for text in describe(outcomes)]
    if wrong:
        raise BenchError("ANSWERS DIFFER with and without guesses, which must never be:\n  " + "\n  ".join(wrong))
    return 0


if __name__ == "__main__":
    sys.exit(main())
