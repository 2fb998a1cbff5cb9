"""Several drafters as one: `--speculator suffix+model=DIR`. What they propose is merged to one tree.

    suffix:  the ─ cat ─ sat             merged:  the ─┬─ cat ─ sat        "the" is proposed by both, "cat" and "dog" by one each:
    model:   the ─ dog                                 └─ dog              four nodes instead of five, one verification

The same path from two sources is one node. A node is a kind of guess: who proposes it, how sure the surest of them is, and whether it
is the first; how often such a guess holds is measured (`Calibration`), so that agreement counts for what it is worth and a source that
boasts is not believed. Within a kind the surer is the likelier: its odds are the source's, times those of the kind over those that
such a source claims. The likeliest nodes by survival fill the budget; a parent is at least as likely as its child, so they are a tree.
Probes stand by themselves; they take what the guesses leave.

Sources that compute nothing but look-ups are asked first. One that runs a network is asked about the rows for which it may be expected
to bring more than the others promise there already, by what its drafts have earned with them, if together they are worth the time
that it takes (measured) and the rows of the forward that its guesses take (`earned.py`): so of two draft models, one good at code and
one at chat, each serves the rows that it is good at. A source that is not worth it for a row is tried again now and then, ever more
rarely. A source that raises is cold for that row, and silent in the end; the others go on (`Guarded`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

from forerun.engine.drafters.asking import USUAL, Asking
from forerun.engine.drafters.calibration import Calibration
from forerun.engine.drafters.choose import survivals
from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Late, Needs, Place, Terms
from forerun.engine.drafters.earned import Earned, Load
from forerun.engine.drafters.guarded import Guarded
from forerun.engine.drafters.history import fresh
from forerun.engine.drafters.registry import Setting
from forerun.engine.errors import StartError

MOST_SOURCES = 4
_EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""of the classes of confidence"""
_MIDDLES = [(below + above) / 2 for below, above in zip((0.0, *_EDGES), (*_EDGES, 1.0))]
_BINS = len(_MIDDLES)
_LEAST, _MOST = 0.01, 0.99
"""nobody is believed to be surer than that"""


@dataclasses.dataclass(eq=False, slots=True)
class _Source:
    """`place`: among the drafters as they are named. `layers`: where, among the layers that all of them tap, the source's own are.
    `asking`: how long it takes; `read`: of each row, tokens that it has read, as it said when it was asked about it last."""

    place: int
    drafter: Guarded
    layers: list[int]
    asking: Asking
    earned: Earned
    read: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False, slots=True)
class _Merged:
    """The union of the drafts of one row. `sources[i]`: bits of who proposes node i; `sure[i]`: the highest confidence among them.
    `probes`: there are some, which are none of these nodes."""

    token: list[int]
    parent: list[int]
    sources: list[int]
    sure: list[float]
    probes: bool = False


class Dag:
    """`drafters`: two or more, in any order. `most`: nodes of a merged draft. `tree`: siblings may be verified; without, the draft is
    the likeliest path. `names`: of the drafters, for people."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        most: int,
        tree: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        names: Sequence[str] = (),
    ) -> None:
        if not 1 < len(drafters) <= MOST_SOURCES:
            raise StartError(f"{len(drafters)} drafters are to be joined", f"join two to {MOST_SOURCES}")
        needs = [drafter.needs for drafter in drafters]
        layers = tuple(sorted({layer for need in needs for layer in need.layers}))
        self.needs = Needs(
            layers=layers,
            pools=tuple(pool for need in needs for pool in need.pools),
            most=most,
            lazy=all(need.lazy for need in needs),
            weight_bytes=sum(need.weight_bytes for need in needs),
            work_bytes=sum(need.work_bytes for need in needs),
            attach=self._attach,
            news=self._news,
            late=self._late,
            chosen=self._spent,
        )
        taps = [[layers.index(layer) for layer in drafter.needs.layers] for drafter in drafters]
        guarded = [Guarded(drafter, names[place] if names else f"number {place + 1}") for place, drafter in enumerate(drafters)]
        askings = [Asking() for _ in guarded]
        sources = [
            _Source(place, drafter, taps[place], asking, Earned(asking)) for place, (drafter, asking) in enumerate(zip(guarded, askings))
        ]
        self._sources = sorted(sources, key=lambda source: source.drafter.needs.dear)
        self._dear = any(drafter.needs.dear for drafter in drafters)
        self._tree = tree
        self._clock = clock
        self.calibration = Calibration(cells(len(sources)))
        self._known: dict[int, int] = {}
        """tokens that were told, by row"""
        self._asked: dict[int, list[tuple[_Source, Draft]]] = {}
        """what dear sources said of a row last"""
        self._chosen = 0.0
        """seconds that sources took which need not have been asked"""

    @classmethod
    def join(cls, drafters: Sequence[Drafter], setting: Setting, names: Sequence[str]) -> Dag:
        """As many nodes as the most talkative of them proposes, unless told otherwise."""
        return cls(drafters, setting.nodes or max(drafter.needs.most for drafter in drafters), setting.tree, names=names)

    def _news(self) -> list[str]:
        return [line for source in self._sources for line in source.drafter.news()]

    def _late(self) -> Late:
        return Late(*(sum(counts) for counts in zip(*(source.drafter.needs.late() for source in self._sources))))

    def _spent(self) -> float:
        spent, self._chosen = self._chosen, 0.0
        return spent

    def _attach(self, place: Place) -> None:
        """Each source its own pools, in the order in which the sources are named."""
        pools = list(place.pools)
        for source in sorted(self._sources, key=lambda source: source.place):
            count = len(source.drafter.needs.pools)
            source.drafter.needs.attach(dataclasses.replace(place, pools=tuple(pools[:count])))
            del pools[:count]

    def absorb(self, commit: Commit) -> None:
        for i, row in enumerate(commit.rows):
            known = self._known.get(row, 0) if commit.start[i] else 0
            new = fresh(commit, i, known)
            self._known[row] = known + len(new)
            if not known:
                self._leave(row)
            self.calibration.settle(row, new)
            for source, draft in self._asked.pop(row, []):
                source.earned.saw(row, _depth(draft, new))
        for source in self._sources:
            source.drafter.absorb(commit if commit.features is None else self._for(source, commit))

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        asked: list[list[tuple[_Source, Draft]]] = [[] for _ in rows]
        for source in self._sources:
            if not source.drafter.needs.dear:
                for drafts, draft in zip(asked, source.drafter.propose(rows, _capped(budget, source), terms)):
                    drafts.append((source, draft))
        if self._dear:
            self._ask_dear(rows, budget, terms, asked)
        return [self._join(row, most, drafts) for row, most, drafts in zip(rows, budget, asked)]

    def _ask_dear(self, rows: list[int], budget: list[int], terms: Terms, asked: list[list[tuple[_Source, Draft]]]) -> None:
        """Asks the sources that compute, the most promising first, each about the rows for which it may be worth its time."""
        dear = [source for source in self._sources if source.drafter.needs.dear]
        while dear:
            promised = [self._promise(drafts, most) for drafts, most in zip(asked, budget)]
            loads = [Load(rows, promised, self._unread(source, rows), terms.goodput, terms.toll) for source in dear]
            offers = [source.earned.offer(load) for source, load in zip(dear, loads)]
            best = max(range(len(dear)), key=lambda i: offers[i][0])
            wanted = dear[best].earned.round(loads[best], offers[best][1])
            if wanted:
                self._ask(dear[best], wanted, rows, budget, terms, asked)
            del dear[best]

    def _ask(
        self,
        source: _Source,
        wanted: Sequence[int],
        rows: Sequence[int],
        budget: Sequence[int],
        terms: Terms,
        asked: list[list[tuple[_Source, Draft]]],
    ) -> None:
        """Adds what a dear source says about the rows at these places. Of one that it is still reading it says nothing yet,
        and nothing is to be learned from that."""
        about = [rows[i] for i in wanted]
        began = self._clock()
        before = source.drafter.behind(about)
        drafts = source.drafter.propose(about, _capped([budget[i] for i in wanted], source), terms)
        after = source.drafter.behind(about)
        seconds = self._clock() - began
        self._chosen += seconds
        read = [then - now for then, now in zip(before, after)]
        reading = any(now > 0 and part > 0 for now, part in zip(after, read))  # otherwise it will never be done
        waiting = [reading and now > 0 and not draft.count for now, draft in zip(after, drafts)]
        self._book(source, waiting, read, seconds, terms)
        source.read.update((row, self._known.get(row, 0) - now) for row, now in zip(about, after))
        for i, draft, waits in zip(wanted, drafts, waiting, strict=True):
            if not waits:
                source.earned.proposed(survivals(draft.parent, draft.confidence))
                asked[i].append((source, draft))

    def _book(self, source: _Source, waiting: Sequence[bool], read: Sequence[int], seconds: float, terms: Terms) -> None:
        """An ask took so long. `waiting`: the rows that have no draft yet; `read`: tokens of each that it read."""
        caught_up = sum(max(0, part if waits else part - USUAL) for waits, part in zip(waiting, read))
        drafted, asking = waiting.count(False), source.asking
        source.earned.took(terms.goodput, min(seconds, asking.seconds(drafted) + asking.reading(caught_up)))
        asking.observe(drafted, caught_up, seconds)

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            self._leave(row)
            self._known.pop(row, None)
        for source in self._sources:
            source.drafter.forget(rows)

    def _leave(self, row: int) -> None:
        self.calibration.forget(row)
        self._asked.pop(row, None)
        for source in self._sources:
            source.earned.forget(row)
            source.read.pop(row, None)

    def _for(self, source: _Source, commit: Commit) -> Commit:
        """The commit with the features that this source taps."""
        if commit.features is None or not source.layers:
            return dataclasses.replace(commit, features=None)
        taps = len(self.needs.layers)
        apart = [wide.view(wide.shape[0], taps, wide.shape[1] // taps) for wide in commit.features]
        return dataclasses.replace(commit, features=[part[:, source.layers].flatten(1) for part in apart])

    def _unread(self, source: _Source, rows: Sequence[int]) -> list[int]:
        """Tokens of these rows that the source has to catch up with, beyond the usual."""
        return [max(0, self._known.get(row, 0) - source.read.get(row, 0) - USUAL) for row in rows]

    def _promise(self, asked: list[tuple[_Source, Draft]], most: int) -> list[float]:
        """Survivals of the guesses of these drafts that may be verified."""
        merged = self._merge(asked)
        return sorted(self._weighed(merged)[2])[-most:]

    def _join(self, row: int, most: int, asked: list[tuple[_Source, Draft]]) -> Draft:
        merged = self._merge(asked)
        cells, chances, survival = self._weighed(merged)
        if self._dear and (dear := [pair for pair in asked if pair[0].drafter.needs.dear]):
            self._asked[row] = dear
        self.calibration.propose(row, merged.token, merged.parent, cells)
        order = sorted(range(len(cells)), key=survival.__getitem__, reverse=True)
        order = order[:most] if self._tree else _path(order, merged.parent)[:most]
        place = [-1] * (len(cells) + 1)  # the last one is the root's, whose number is −1
        for at, node in enumerate(order):
            place[node] = at
        draft = Draft(
            list(map(merged.token.__getitem__, order)),
            list(map(place.__getitem__, map(merged.parent.__getitem__, order))),
            list(map(chances.__getitem__, order)),
            [False] * len(order),
            list(map(merged.sources.__getitem__, order)),
        )
        return _with_probes(draft, most, [(1 << source.place, own) for source, own in asked]) if merged.probes else draft

    def _merge(self, asked: list[tuple[_Source, Draft]]) -> _Merged:
        merged = _Merged([], [], [], [])
        nodes: dict[tuple[int, int], int] = {}
        for source, draft in asked:
            bit = 1 << source.place
            if not nodes and True not in draft.probe:  # the first, as a whole
                nodes = dict(zip(zip(draft.parent, draft.token), range(draft.count)))
                if len(nodes) == draft.count:
                    merged = _Merged(draft.token[:], draft.parent[:], [bit] * draft.count, draft.confidence[:], merged.probes)
                    continue
                nodes = {}
            place: list[int] = []
            for token, parent, confidence, probe in zip(draft.token, draft.parent, draft.confidence, draft.probe, strict=True):
                if probe:
                    merged.probes = True
                    place.append(-1)
                    continue
                above = place[parent] if parent >= 0 else -1
                node = nodes.setdefault((above, token), len(merged.token))
                place.append(node)
                if node == len(merged.token):
                    merged.token.append(token)
                    merged.parent.append(above)
                    merged.sources.append(bit)
                    merged.sure.append(confidence)
                else:
                    merged.sources[node] |= bit
                    merged.sure[node] = max(merged.sure[node], confidence)
        return merged

    def _weighed(self, merged: _Merged) -> tuple[list[int], list[float], list[float]]:
        """Of each node its kind, the probability that it holds if its parent does, and that of its being accepted."""
        rate = self.calibration.rate
        cells: list[int] = []
        chances: list[float] = []
        survival: list[float] = []
        for sources, parent, sure in zip(merged.sources, merged.parent, merged.sure):
            place = bisect_right(_EDGES, sure)
            cell = ((sources - 1) * 2 + (parent >= 0)) * _BINS + place
            sure = sure if sure < _MOST else _MOST
            sure = sure if sure > _LEAST else _LEAST
            middle, chance = _MIDDLES[place], rate[cell]
            holds = sure * chance * (1.0 - middle)
            holds /= holds + (1.0 - sure) * (1.0 - chance) * middle
            cells.append(cell)
            chances.append(holds)
            survival.append(holds * survival[parent] if parent >= 0 else holds)
        return cells, chances, survival


def _capped(budget: list[int], source: _Source) -> list[int]:
    """What a source may propose of each row: no more than it can."""
    most = source.drafter.needs.most
    return [min(nodes, most) for nodes in budget] if max(budget, default=0) > most else budget


def _with_probes(draft: Draft, most: int, asked: Sequence[tuple[int, Draft]]) -> Draft:
    """`draft` and behind it the probes of these drafts, each with the bit of its source, as far as there is room. A probe hangs off the
    root or another probe."""
    token, parent, confidence = list(draft.token), list(draft.parent), list(draft.confidence)
    probe, source = list(draft.probe), list(draft.source)
    for bit, own in asked:
        place = {-1: -1}
        for node, (each, above, sure, probes) in enumerate(zip(own.token, own.parent, own.confidence, own.probe)):
            if probes and above in place and len(token) < most:
                place[node] = len(token)
                token.append(each)
                parent.append(place[above])
                confidence.append(sure)
                probe.append(True)
                source.append(bit)
    return Draft(token, parent, confidence, probe, source)


def cells(sources: int) -> list[float]:
    """The prior: each source means what it says, and those that agree are independent witnesses."""
    return [1 - math.pow(1 - sure, bits.bit_count()) for bits in range(1, 1 << sources) for _ in range(2) for sure in _MIDDLES]


def _path(order: list[int], parent: list[int]) -> list[int]:
    """Of nodes in the order of their survival those on the likeliest path: from each the best child."""
    path = [-1]
    for node in order:
        if parent[node] == path[-1]:
            path.append(node)
    return path[1:]


def _depth(draft: Draft, truth: list[int]) -> int:
    """How many guesses of the draft hold, as far as the truth is known."""
    reached: list[int] = []
    for token, parent, probe in zip(draft.token, draft.parent, draft.probe):
        depth = 0 if parent < 0 else reached[parent]
        reached.append(depth + 1 if 0 <= depth < len(truth) and token == truth[depth] and not probe else -1)
    return max(0, *reached) if reached else 0
