"""Pictures of results, as PNG files. matplotlib is imported when one is drawn, so that measuring does not need it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.bench.errors import BenchError
from forerun.bench.peers import Facts, Turn
from forerun.bench.records import Point, Record
from forerun.bench.stats import percentile
from forerun.bench.sweep import Spot


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError("plots need matplotlib: pip install 'forerun[plots]', or leave --plot out") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def require() -> None:
    """Raises BenchError now, before anything is measured, when no picture could be drawn later."""
    _pyplot()


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def load(points: Sequence[Point], records: Sequence[Sequence[Record]], path: Path, title: str) -> None:
    """Throughput, time to the first token and total time for each point, and how the gaps between tokens are distributed."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    (rate, first), (gap, total) = axes
    labels = [point.label for point in points]
    places = range(len(points))
    rate.bar(places, [point.tokens_per_second for point in points], color="#4878a8")
    rate.set(title="tokens a second", ylabel="tokens/s")
    for axis, name in ((first, "first_token_ms"), (total, "total_ms")):
        for statistic, style in (("p50", "o-"), ("p90", "s--"), ("p99", "^:")):
            axis.plot(places, [getattr(getattr(point, name), statistic) for point in points], style, label=statistic)
        axis.legend()
        axis.set(ylabel="ms", ylim=(0, None))
    first.set_title("time to the first token")
    total.set_title("total time")
    for axis in (rate, first, total):
        axis.set_xticks(list(places), labels)
    for point, of_point in zip(points, records):
        _curve(gap, sorted(value * 1000 for record in of_point for value in record.gaps), point.label)
    gap.set(title="gaps between tokens: share that is shorter", xlabel="ms", ylim=(0, 1))
    if gap.lines:
        gap.legend()
    figure.suptitle(title)
    _save(pyplot, figure, path)


def _curve(axis: Any, ordered: list[float], label: str) -> None:
    """A cumulative distribution, thinned to 200 points and cut at the 99.5th percentile."""
    if ordered:
        shares = [number / 2 for number in range(200)]
        axis.plot([percentile(ordered, share) for share in shares], [share / 100 for share in shares], label=label)


def bars(names: Sequence[str], values: Sequence[float], passed: Sequence[bool], path: Path, title: str) -> None:
    """Measured over allowed (or needed) for each bar: 1 is the bar itself, passing values lie left of it."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(10, 1.2 + 0.45 * len(names)), layout="constrained")
    places = range(len(names))
    axis.barh(places, values, color=["#4a8c5f" if good else "#b8514f" for good in passed])
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(list(places), names)
    axis.invert_yaxis()
    axis.set(xlabel="cost against the bar (1 = exactly the bar, less is better)", title=title)
    _save(pyplot, figure, path)


def policies(names: Sequence[str], series: dict[str, list[float]], path: Path) -> None:
    """Speed over plain decoding of each policy (`series`) in each scenario (`names`), on a logarithmic axis; ours stands out."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(10, 1.5 + 0.2 * len(names)), layout="constrained")
    places = range(len(names))
    for policy, values in series.items():
        ours = policy == "price"
        axis.plot(values, places, "o" if ours else ".", color="#b8514f" if ours else None, zorder=3 if ours else 2, label=policy)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(list(places), names, fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel="speed over plain decoding", xscale="log")
    axis.legend(fontsize=7)
    _save(pyplot, figure, path)


def peers(turns: Sequence[Turn], facts: Sequence[Facts], path: Path) -> None:
    """Tokens a second by streams, a bar for each server (the median of its rounds, and their spread); first tokens; memory."""
    pyplot = _pyplot()
    counts = sorted({turn.streams for turn in turns})
    figure, axes = pyplot.subplots(1, len(counts) + 1, figsize=(4 * (len(counts) + 1), 4.4), layout="constrained", sharey=True)
    names = [one.entrant for one in facts]
    places = range(len(names))
    colors = ["#b8514f" if name.startswith("forerun") else "#8aa4c0" for name in names]
    for axis, count in zip(axes, counts):
        rates = [sorted(turn.rate for turn in turns if (turn.entrant, turn.streams) == (name, count)) for name in names]
        middle = [percentile(of_one, 50) for of_one in rates]
        spread = [[mid - of_one[0] for mid, of_one in zip(middle, rates)], [of_one[-1] - mid for mid, of_one in zip(middle, rates)]]
        axis.barh(places, middle, xerr=spread, color=colors)
        for place, value in zip(places, middle):
            axis.text(value, place, f" {value:.0f}", va="center", fontsize=8)
        axis.set(title=f"{count} stream" + "s" * (count > 1), xlabel="tokens/s", xlim=(0, 1.15 * max(middle)))
    axes[-1].barh(places, [one.memory_mb for one in facts], color=colors)
    axes[-1].set(title="memory", xlabel="MB")
    axes[0].set_yticks(list(places), names)
    axes[0].invert_yaxis()
    _save(pyplot, figure, path)


def speculation(spots: Sequence[Spot], path: Path, floor: float) -> None:
    """Against the number of streams, a line for each workload: speed over plain decoding with the spread of its rounds, guesses of a
    sequence in a step, and the share of guesses that held."""
    pyplot = _pyplot()
    figure, (ratio, guesses, acceptance) = pyplot.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    for name in dict.fromkeys(spot.workload for spot in spots):
        own = sorted((spot for spot in spots if spot.workload == name), key=lambda spot: spot.streams)
        places = [spot.streams for spot in own]
        spread = [[spot.ratio - spot.least for spot in own], [spot.most - spot.ratio for spot in own]]
        ratio.errorbar(places, [spot.ratio for spot in own], spread, fmt="o-", capsize=2, label=name)
        guesses.plot(places, [spot.guesses for spot in own], "o-", label=name)
        acceptance.plot(places, [spot.acceptance for spot in own], "o-", label=name)
    ratio.axhline(floor, color="black", linewidth=1, linestyle=":", label=f"never less than {floor}")
    ratio.set(title="speed with guesses over speed without", ylabel="ratio of tokens/s", ylim=(0, None))
    guesses.set(title="guesses close as load grows", ylabel="guesses of a sequence in a step", ylim=(0, None))
    acceptance.set(title="guesses that held", ylabel="share", ylim=(0, 1))
    counts = sorted({spot.streams for spot in spots})
    for axis in (ratio, guesses, acceptance):
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.set_xlabel("streams")
        axis.grid(alpha=0.3)
    ratio.legend(fontsize=8)
    _save(pyplot, figure, path)


def drafters(spots: dict[str, list[Spot]], path: Path) -> None:
    """A column for each workload: speed over plain decoding above, tokens that a step brings below, a line for each drafter."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(spot.workload for of_one in spots.values() for spot in of_one))
    figure, axes = pyplot.subplots(2, len(names), figsize=(3.4 * len(names), 6.6), layout="constrained", sharey="row", squeeze=False)
    for column, name in enumerate(names):
        for drafter, of_one in spots.items():
            own = sorted((spot for spot in of_one if spot.workload == name), key=lambda spot: spot.streams)
            label = "+".join(part.partition("=")[0] for part in drafter.split("+"))
            places = range(len(own))
            axes[0][column].plot(places, [spot.ratio for spot in own], "s--" if "+" in drafter else "o-", markersize=4, label=label)
            axes[1][column].plot(places, [spot.tokens for spot in own], "s--" if "+" in drafter else "o-", markersize=4, label=label)
            for axis in axes[:, column]:
                axis.set_xticks(list(places), [str(spot.streams) for spot in own])
        axes[0][column].axhline(1, color="black", linewidth=1, linestyle=":")
        axes[0][column].set_title(name)
        axes[1][column].set_xlabel("streams")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="speed over plain decoding", ylim=(0, None))
    axes[1][0].set(ylabel="tokens a step", ylim=(0.9, None))
    axes[0][-1].legend(fontsize=7)
    _save(pyplot, figure, path)


def roofline(curve: dict[str, Any], path: Path, title: str) -> None:
    """Step time and throughput against rows. `curve`: rows, seconds, memory floor, arithmetic floor of each count, all in seconds."""
    pyplot = _pyplot()
    figure, (time, pace) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    rows, memory = curve["rows"], curve["memory"]
    floors = [max(memory, arithmetic) for arithmetic in curve["arithmetic"]]
    time.plot(rows, [1e3 * seconds for seconds in curve["seconds"]], "o-", markersize=4, label="a step")
    time.plot(rows, [1e3 * seconds for seconds in curve["arithmetic"]], "--", color="#b8514f", label="arithmetic floor")
    time.axhline(1e3 * memory, linestyle=":", color="black", label="memory floor: every weight read once")
    time.set(xlabel="rows of the step", ylabel="ms", ylim=(0, None), title="step time")
    pace.plot(rows, [n / seconds for n, seconds in zip(rows, curve["seconds"])], "o-", markersize=4, label="measured")
    pace.plot(rows, [n / floor for n, floor in zip(rows, floors)], "--", color="black", label="the nearer floor")
    pace.set(xlabel="rows of the step", ylabel="tokens/s", ylim=(0, None), title="throughput")
    for axis in (time, pace):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    _save(pyplot, figure, path)
