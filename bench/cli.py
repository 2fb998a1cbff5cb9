"""`forerun bench …`: the command line of the measurements. Reads options, runs, writes JSON and PNG, prints a table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import gc
import json
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from forerun import __version__
from forerun.bench import plots, prompts
from forerun.bench.apis import APIS, Ask
from forerun.bench.bars import present
from forerun.bench.cost import Cost
from forerun.bench.errors import BenchError
from forerun.bench.http import Origin
from forerun.bench.load import Amount, Load, Target, show_progress, show_steps
from forerun.bench.process import own_cpu_seconds
from forerun.bench.records import Goal, Point, Record, Shape, condense


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 measured, 1 not measured or requests failed (or, with --strict, a bar was missed), 2 wrong usage."""
    parser = _parser()
    if list(argv[:1]) == ["simulate"]:
        from forerun.bench import compare  # it has options of its own, and needs torch, which `load` does not

        return compare.main(argv[1:])
    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
    except (ValueError, FileNotFoundError) as error:
        parser.exit(2, f"forerun bench: {error}\n")
    except BenchError as error:
        parser.exit(1, f"forerun bench: {error}\n")


def _numbers(kind: type) -> Any:
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",") if part]

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forerun bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    load = commands.add_parser("load", help="put load on any TGI, OpenAI or llama.cpp server")
    load.set_defaults(run=_load)
    _server_options(load)
    _load_options(load)
    _output_options(load, "bench/out/load.json")
    commands.add_parser("simulate", help="policies of guessing against each other, on match traces (see simulate --help)", add_help=False)
    _foundation_options(commands.add_parser("foundation", help="start our own server and check its speed bars"))
    _peers_options(commands.add_parser("peers", help="our server beside llama.cpp's and vLLM's, as far as they are installed"))
    _speculation_options(commands.add_parser("speculation", help="our server with guesses against the same without, on many loads"))
    _grammars_options(commands.add_parser("grammars", help="the pauses of our server's streams while others send it grammars"))
    return parser


def _foundation_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_foundation)
    _own_server_options(parser)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about a minute instead of four")
    parser.add_argument("--only", type=_numbers(str), default=[], metavar="PART,…", help="of start, speed, memory, front")
    _output_options(parser, "bench/out/foundation.json")


def _speculation_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_speculation)
    _own_server_options(parser)
    parser.add_argument("--speculator", default="auto", metavar="SPEC", help="against `none`; may be `none` (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="1, 4 and 16 streams once: about seven minutes instead of forty")
    parser.add_argument("--streams", type=_numbers(int), default=[], metavar="N,…", help="instead of 1,2,4,8,16,32")
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="of the whole sweep, each with other prompts (default: 3)")
    parser.add_argument("--add", action="store_true", help="keep the rounds that the result file has, and add to them")
    parser.add_argument("--prompts", type=Path, metavar="FOLDER", help="workloads as NAME.jsonl files instead of those made here")
    parser.add_argument("--only", type=_numbers(str), default=[], metavar="NAME,…", help="some of the workloads")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="which prompts are used, and which of them meet")
    _output_options(parser, "bench/out/speculation.json")
    parser.set_defaults(plot=True)


def _peers_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_peers)
    _own_server_options(parser)
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    parser.add_argument("--rounds", type=int, default=0, metavar="N")
    parser.add_argument("--streams", type=_numbers(int), default=[], metavar="N,…", help="instead of 1,8,16")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument(
        "--peers", type=Path, default=Path(".peers"), metavar="FOLDER", help="what tools/peers.sh made (default: %(default)s)"
    )
    parser.add_argument(
        "--only", type=_numbers(str), default=[], metavar="NAME,…", help="servers by the beginning of their name, and `in-process`"
    )
    _output_options(parser, "bench/out/peers.json")


def _grammars_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_grammars)
    _own_server_options(parser)
    parser.add_argument("--quick", action="store_true", help="two short rounds instead of five")
    _output_options(parser, "bench/out/grammars.json")


def _own_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-id", default="models/smollm2-135m-instruct", help="an HF folder (default: %(default)s)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAG", help="further flags of the server")


def _server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the server")
    group.add_argument("--url", required=True, help="http://host:port, with a path in front of the routes if there is one")
    group.add_argument("--api", choices=APIS, default="tgi", help="which routes to use (default: %(default)s); tgi-whole does not stream")
    group.add_argument("--model", default="tgi", help="`model` in bodies of the OpenAI routes")
    group.add_argument("--api-key", help="sent as a bearer token")
    group.add_argument("--timeout", type=float, default=600, help="seconds for one request in all (default: %(default)s)")


def _load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the load")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("--streams", type=_numbers(int), default=[], metavar="N,…", help="closed loop: so many clients, one point each")
    kind.add_argument("--rate", type=_numbers(float), default=[], metavar="R,…", help="open loop: requests a second, one point each")
    group.add_argument("--burstiness", type=float, default=1.0, help="shape of the Gamma gaps of an open loop: 1 Poisson, below 1 bursts")
    group.add_argument("--requests", type=int, default=0, metavar="N", help="requests a point")
    group.add_argument("--seconds", type=float, default=0.0, metavar="S", help="or: send for so long")
    group.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before the first point, not counted")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    group.add_argument("--prompts", type=Path, metavar="FILE", help='lines of {"turns": [...]}; the first turn is used')
    group.add_argument(
        "--prompt-tokens", type=int, default=64, metavar="N", help="else prompts of so many random words (tgi: cut to N tokens)"
    )
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals; of the sampling too when the temperature is not 0")
    group.add_argument("--ignore-eos", action="store_true", help="generate to the limit (OpenAI-like servers and llama.cpp)")
    group.add_argument("--extra", type=json.loads, default={}, metavar="JSON", help="further parameters of each request, an object")
    group.add_argument(
        "--goal-first-token-ms", type=float, default=float("inf"), help="goodput counts requests whose first token is as quick"
    )
    group.add_argument("--goal-gap-ms", type=float, default=float("inf"), help="and whose mean gap between tokens is as short")


def _output_options(parser: argparse.ArgumentParser, path: str) -> None:
    parser.add_argument("--out", type=Path, default=Path(path), metavar="FILE", help="the result as JSON (default: %(default)s)")
    parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=False, help="and pictures beside it")
    parser.add_argument("--device-hour-price", type=float, metavar="PRICE", help="also say what tokens and requests cost")


def _load(options: argparse.Namespace) -> int:
    if options.plot:
        plots.require()
    shapes = [Shape(rate=rate, burstiness=options.burstiness) for rate in options.rate]
    shapes = shapes or [Shape(streams=streams) for streams in options.streams or [1]]
    measured = run(_measure(options, shapes))
    points = [point for point, _ in measured]
    results = [dataclasses.asdict(point) | _cost(options, point.tokens_per_second, point.requests_per_second) for point in points]
    write(options.out, {"settings": _settings(options), "machine": machine(), "points": results})
    if options.plot:
        picture = options.out.with_suffix(".png")
        plots.load(points, [records for _, records in measured], picture, f"{options.api} at {options.url}")
        print(f"plot: {picture}")
    return int(any(point.errors for point in points))


async def _measure(options: argparse.Namespace, shapes: Sequence[Shape]) -> list[tuple[Point, list[Record]]]:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    target = Target(Origin.parse(options.url), APIS[options.api], headers, options.timeout)
    load = Load(target, _ask(options), _prompts(options), show_progress())
    goal = Goal(options.goal_first_token_ms / 1000, options.goal_gap_ms / 1000)
    if options.warmup:
        await load.run(Shape(streams=1), Amount(requests=options.warmup))
    measured = []
    print(HEADER)
    for shape in shapes:
        before = own_cpu_seconds()
        records = await load.run(shape, Amount(options.requests, options.seconds), options.seed)
        point = condense(shape, records, goal, own_cpu_seconds() - before)
        measured.append((point, records))
        print(row(point), flush=True)
        _say_cost(options, "", point.tokens_per_second, point.requests_per_second)
    return measured


def _ask(options: argparse.Namespace) -> Ask:
    return Ask(
        max_new_tokens=options.max_new_tokens,
        model=options.model,
        temperature=options.temperature,
        seed=options.seed if options.temperature > 0 else None,
        prompt_tokens=0 if options.prompts else options.prompt_tokens,
        ignore_eos=options.ignore_eos,
        extra=options.extra,
    )


def _prompts(options: argparse.Namespace) -> Iterator[str]:
    return prompts.from_file(options.prompts) if options.prompts else prompts.synthetic(options.prompt_tokens, options.seed)


HEADER = (
    "load                       ok  err   tok/s  steady   req/s    good   first token ms: p50     p90     p99   gap ms: p50    p99   "
    "total ms: p50    p99   client"
)


def row(point: Point) -> str:
    """One line under HEADER, and one more for each kind of error."""
    first, gap, total = point.first_token_ms, point.gap_ms, point.total_ms
    errors = sum(point.errors.values())
    line = (
        f"{point.label:<23}{point.requests - errors:>6}{errors:>5}{point.tokens_per_second:>8.0f}{point.steady_tokens_per_second:>8.0f}"
        f"{point.requests_per_second:>8.2f}{point.goodput:>8.2f}   {first.p50:>19.1f}{first.p90:>8.1f}{first.p99:>8.1f}"
        f"   {gap.p50:>11.2f}{gap.p99:>7.1f}   {total.p50:>13.0f}{total.p99:>7.0f}{point.client_cpu:>8.0%}"
    )
    return "\n".join([line, *(f"    {count} × {error}" for error, count in point.errors.items())])


def _foundation(options: argparse.Namespace) -> int:
    from forerun.bench.foundation import Foundation, Settings  # it needs the whole server; `load` does not

    settings = Settings.quick() if options.quick else Settings()
    unknown = set(options.only) - set(Foundation.PARTS)
    if unknown:
        raise ValueError(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(Foundation.PARTS)}")
    if options.plot:
        plots.require()
    foundation = Foundation(options.model_id, options.server_flags, settings, show_progress())
    bars = run(foundation.run(options.only or Foundation.PARTS))
    print(present(bars, foundation.remarks))
    details = {"bars": [dataclasses.asdict(bar) | {"passed": bar.passed} for bar in bars], "remarks": foundation.remarks}
    write(options.out, {"settings": _settings(options), "machine": machine(), **details, "details": foundation.details})
    if options.plot:
        picture = options.out.with_suffix(".png")
        plots.bars([bar.name for bar in bars], [bar.cost for bar in bars], [bar.passed for bar in bars], picture, "forerun: the speed bars")
        print(f"plot: {picture}")
    return int(options.strict and not all(bar.passed for bar in bars))


def _cost(options: argparse.Namespace, tokens_per_second: float, requests_per_second: float) -> dict[str, Any]:
    """For the result file."""
    if options.device_hour_price is None:
        return {}
    return {"cost": dataclasses.asdict(Cost.of(options.device_hour_price, tokens_per_second, requests_per_second))}


def _say_cost(options: argparse.Namespace, of: str, tokens_per_second: float, requests_per_second: float) -> None:
    if options.device_hour_price is not None:
        print(f"    cost{of}: {Cost.of(options.device_hour_price, tokens_per_second, requests_per_second)}", flush=True)


def _peers(options: argparse.Namespace) -> int:
    from forerun.bench import entrants, inprocess, peers

    settings = peers.Settings.quick() if options.quick else peers.Settings()
    streams, rounds = options.streams or settings.streams, options.rounds or settings.rounds
    settings = dataclasses.replace(settings, streams=streams, rounds=rounds, tokens=options.max_new_tokens)
    found, skipped = entrants.entrants(options.model_id, options.peers, options.server_flags)
    chosen = [one for one in found if not options.only or one.name.startswith(tuple(options.only))]
    print("\n".join([f"side by side: {', '.join(one.name for one in chosen)}", *skipped]), flush=True)
    if options.plot:
        plots.require()
    contest = peers.Contest(chosen, settings, show_steps())
    with contextlib.suppress(KeyboardInterrupt):  # whole rounds of a run that was broken off count
        if chosen:
            run(contest.run())
    if chosen and not contest.turns:
        raise BenchError("broken off before a round was whole")
    loops: list[inprocess.Indoors] = []
    if not options.only or "in-process" in options.only:
        kinds = list(inprocess.files(options.peers)[1])
        skipped += [] if kinds else ["skipped: OpenVINO, or its models, are not there (tools/peers.sh llama.cpp, then openvino)"]
        loops = run(inprocess.measure(options.model_id, options.peers, settings.rounds, show_steps(), kinds))
    bars = [*peers.bars(contest.turns, chosen), *inprocess.bars(loops)]
    tables = [peers.table(contest.turns, contest.facts) if chosen else "", inprocess.table(loops)]
    print("\n\n".join([*filter(None, tables), present(bars, [*contest.remarks, *skipped])]))
    for turn in contest.turns[-len(chosen) :]:
        _say_cost(options, f" of {turn.entrant}, {turn.streams} streams", turn.rate, turn.requests_rate)
    details: dict[str, Any] = {
        "turns": [dataclasses.asdict(turn) | _cost(options, turn.rate, turn.requests_rate) for turn in contest.turns]
    }
    details |= {
        "in_process": [dataclasses.asdict(one) for one in loops],
        "facts": [dataclasses.asdict(one) for one in contest.facts],
        "skipped": skipped,
        "remarks": contest.remarks,
    }
    verdicts = [dataclasses.asdict(bar) | {"passed": bar.passed} for bar in bars]
    write(options.out, {"settings": _settings(options), "machine": machine(), "bars": verdicts, **details})
    if options.plot and chosen:
        picture = options.out.with_suffix(".png")
        plots.peers(contest.turns, contest.facts, picture)
        print(f"plot: {picture}")
    return int(options.strict and not all(bar.passed for bar in bars))


def _speculation(options: argparse.Namespace) -> int:
    from forerun.bench import speculation, sweep, workloads
    from forerun.bench.template import chat_form

    settings = speculation.Settings.quick() if options.quick else speculation.Settings()
    streams, rounds = options.streams or settings.streams, options.rounds or settings.rounds
    settings = dataclasses.replace(settings, streams=streams, rounds=rounds, tokens=options.max_new_tokens, seed=options.seed)
    chosen = workloads.from_folder(options.prompts, options.only) if options.prompts else workloads.made(options.only)
    if options.plot:
        plots.require()
    kept = speculation.earlier(json.loads(options.out.read_text())) if options.add and options.out.exists() else []
    form = chat_form(Path(options.model_id))
    measured = speculation.Sweep(options.model_id, options.speculator, options.server_flags, settings, form, show_steps())
    try:
        run(measured.run(chosen))
    finally:  # whatever came out of a long run that broke off
        outcomes = [*kept, *speculation.numbered(measured.outcomes, kept)]
        write(
            options.out,
            {"settings": _settings(options), "machine": machine(), **speculation.details(outcomes)},
        )
    spots = sweep.condense(outcomes)
    if options.plot:
        plots.speculation(spots, options.out.with_suffix(".png"), sweep.NEVER_LOSES)
    bars = sweep.bars(spots, {workload.name: workload.wanted for workload in chosen})
    print(f"speed over plain decoding (guesses a sequence and step)\n{sweep.table(spots)}\n\n{present(bars, measured.remarks)}")
    if options.plot:
        print(f"plot: {options.out.with_suffix('.png')}")
    for spot in spots if options.device_hour_price is not None else []:
        requests = statistics.median(
            one.guessing.requests_rate for one in outcomes if (one.workload, one.streams) == (spot.workload, spot.streams)
        )
        _say_cost(options, f" of {spot.workload}, {spot.streams} streams", spot.guessing_rate, requests)
    differing = speculation.describe(outcomes)
    if differing:
        raise BenchError("ANSWERS DIFFER with and without guesses, which must never be:\n  " + "\n  ".join(differing))
    return int(options.strict and not all(bar.passed for bar in bars))


def _grammars(options: argparse.Namespace) -> int:
    from forerun.bench import grammars

    settings = grammars.Settings.quick() if options.quick else grammars.Settings()
    measured = grammars.Grammars(options.model_id, options.server_flags, settings, show_steps())
    bars = run(measured.run())
    print(present(bars, []))
    write(options.out, {"settings": _settings(options), "machine": machine(), "turns": [dataclasses.asdict(one) for one in measured.turns]})
    return int(options.strict and not all(bar.passed for bar in bars))


def run(work: Any) -> Any:
    """Runs a coroutine on uvloop, with the garbage collector out of the way of time stamps."""
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def machine() -> dict[str, Any]:
    """Where and when a result was measured."""
    model = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "forerun": __version__,
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options as given, without secrets; what JSON cannot say becomes text."""
    hidden = {"run", "api_key"}
    return {
        name: value if value is None or type(value) in (int, bool, list, dict) else str(value)
        for name, value in vars(options).items()
        if name not in hidden
    }


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"result: {path}")
