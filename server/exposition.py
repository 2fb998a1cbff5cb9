"""Counters, gauges, histograms and summaries in the Prometheus text format, with TGI's exact names.

The official client library appends `_total` to every counter, which would rename TGI's series, and its histogram is too slow to be
called for each token; these are a few additions each. All run on the event loop, so there are no locks. Labels are fixed when a family
is made, so that every series exists from the first scrape, except in a `Family`. Knows no metric by name.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence


def number(value: float) -> str:
    """Shortest decimal, whole numbers without a point, as TGI prints them."""
    if not math.isfinite(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
    return str(int(value)) if value == int(value) else repr(value)


class Series:
    """One number. `add` for counters, assignment for gauges."""

    __slots__ = ("labels", "value")

    def __init__(self, labels: str = "") -> None:
        self.labels = labels
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class Histogram:
    """`bounds`: upper bounds of the buckets, ascending; a last one without bound is implied."""

    __slots__ = ("_bounds", "_counts", "_sum", "labels")

    def __init__(self, bounds: Sequence[float], labels: str = "") -> None:
        self.labels = labels
        self._sum = 0.0
        self.resize(bounds)

    def resize(self, bounds: Sequence[float]) -> None:
        """New buckets; only before the first observation, since old ones cannot be sorted again."""
        assert not self._sum
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str) -> Iterator[str]:
        inner = self.labels[1:-1] + "," if self.labels else ""
        total = 0
        for bound, count in zip([*map(number, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{inner}le="{bound}"}} {total}'
        yield f"{name}_sum{self.labels} {number(self._sum)}"
        yield f"{name}_count{self.labels} {total}"


class SmallIntegers:
    """A summary of small whole numbers, with exact quantiles over all observations."""

    __slots__ = ("_counts",)
    QUANTILES = (0, 0.5, 0.9, 0.95, 0.99, 0.999, 1)

    def __init__(self) -> None:
        self._counts = [0]

    def observe(self, value: int) -> None:
        if value >= len(self._counts):
            self._counts += [0] * (value + 1 - len(self._counts))
        self._counts[value] += 1

    def lines(self, name: str) -> Iterator[str]:
        total = sum(self._counts)
        for quantile in self.QUANTILES:
            yield f'{name}{{quantile="{quantile}"}} {self._quantile(quantile, total)}'
        yield f"{name}_sum {sum(value * count for value, count in enumerate(self._counts))}"
        yield f"{name}_count {total}"

    def _quantile(self, quantile: float, total: int) -> int:
        seen = 0
        for value, count in enumerate(self._counts):
            seen += count
            if count and seen >= quantile * total:
                return value
        return 0


class Family:
    """Series of one name, made when their labels are first asked for."""

    def __init__(self, all: list[Series]) -> None:
        self._all = all
        self._known: dict[tuple[str, ...], Series] = {}

    def series(self, **labels: str) -> Series:
        key = tuple(labels.values())
        found = self._known.get(key)
        if found is None:
            escaped = {name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()}
            found = self._known[key] = Series("{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}")
            self._all.append(found)
        return found


Metric = Series | Histogram | SmallIntegers


class Exposition:
    """All families, in the order they were made."""

    def __init__(self) -> None:
        self._families: list[tuple[str, str, str, list[Series], list[Histogram | SmallIntegers]]] = []

    def counter(self, name: str, help: str) -> Series:
        return self.counters(name, help, "", [""])[""]

    def counters(self, name: str, help: str, label: str, values: Sequence[str]) -> dict[str, Series]:
        return self._series(name, help, "counter", label, values)

    def gauge(self, name: str, help: str) -> Series:
        return self.gauges(name, help, "", [""])[""]

    def gauges(self, name: str, help: str, label: str, values: Sequence[str]) -> dict[str, Series]:
        return self._series(name, help, "gauge", label, values)

    def histogram(self, name: str, help: str, bounds: Sequence[float] = ()) -> Histogram:
        return self.histograms(name, help, bounds, "", [""])[""]

    def histograms(self, name: str, help: str, bounds: Sequence[float], label: str, values: Sequence[str]) -> dict[str, Histogram]:
        made = {value: Histogram(bounds, _labels(label, value)) for value in values}
        self._families.append((name, help, "histogram", [], list(made.values())))
        return made

    def summary(self, name: str, help: str) -> SmallIntegers:
        made = SmallIntegers()
        self._families.append((name, help, "summary", [], [made]))
        return made

    def family(self, name: str, help: str, kind: str) -> Family:
        """A counter or gauge whose labels are not known yet. It is on the page as soon as it has a series."""
        series: list[Series] = []
        self._families.append((name, help, kind, series, []))
        return Family(series)

    def text(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _series(self, name: str, help: str, kind: str, label: str, values: Sequence[str]) -> dict[str, Series]:
        made = {value: Series(_labels(label, value)) for value in values}
        self._families.append((name, help, kind, list(made.values()), []))
        return made

    def _lines(self) -> Iterator[str]:
        for name, help, kind, series, distributions in self._families:
            if not series and not distributions:
                continue
            yield f"# HELP {name} {help}"
            yield f"# TYPE {name} {kind}"
            for one in series:
                yield f"{name}{one.labels} {number(one.value)}"
            for distribution in distributions:
                yield from distribution.lines(name)


def _labels(label: str, value: str) -> str:
    return f'{{{label}="{value}"}}' if label else ""
