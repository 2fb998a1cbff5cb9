"""Who gets in, who waits, and who has waited too long.

`Gate`: permits for requests, and how long a refused client should stay away. `Waiting`: sequences that are not running, in the order
in which they should be admitted. `Deadlines`: whose time is over. None of them decides when a sequence runs: see `admission.py`.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

from forerun.router.entry import Entry, Rank

_FIRST_STAY_SECONDS = 1.0
_WEIGHT = 1 / 16
"""share of a request that leaves in the running average"""
_LONGEST_RETRY_SECONDS = 30


class Permit:
    """The right of one request to be in the server, waiting or running. `leave` is idempotent; also a context manager."""

    __slots__ = ("_entered", "_gate", "permits")

    def __init__(self, gate: Gate, permits: int, entered: float) -> None:
        self._gate: Gate | None = gate
        self._entered = entered
        self.permits = permits

    def leave(self) -> None:
        if self._gate is not None:
            self._gate.left(self.permits, self._entered)
            self._gate = None

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave()


class Gate:
    """`max_concurrent_requests` permits, never waited for: who finds too few is refused at once (TGI's 429).

    A refused client is told when its turn would come if the refused came back one after the other while permits become free at the rate of
    late, which by Little's law is limit / (time a request stays). So a burst of refused clients does not come back as a burst."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self.inside = 0
        self._clock = clock
        self._stay_seconds = _FIRST_STAY_SECONDS
        self._turn = 0.0
        """when the last refused client's turn comes"""

    def enter(self, permits: int = 1) -> Permit | None:
        """None: refused. More permits than there are at all can never be had; the validation knows the limit."""
        if self.inside + permits > self.limit:
            return None
        self.inside += permits
        return Permit(self, permits, self._clock())

    def left(self, permits: int, entered: float) -> None:
        self.inside -= permits
        self._stay_seconds += _WEIGHT * (self._clock() - entered - self._stay_seconds)

    def retry_after_seconds(self, permits: int = 1) -> int:
        """For a client that was just refused: whole seconds, from 1 to 30."""
        now = self._clock()
        turn = max(self._turn, now) + permits * self._stay_seconds / self.limit
        self._turn = min(turn, now + _LONGEST_RETRY_SECONDS)
        return max(1, math.ceil(self._turn - now))


class Waiting:
    """Sequences that are not running, in order of rank: those that ran before, and the new ones of each tenant. Among tenants the next is
    the one that has fewest sequences running, of equals the one whose next came first, whatever the priorities. One tenant without
    priorities is first come first served. Adding and removing cost a search and a move of pointers."""

    def __init__(self) -> None:
        self._again: list[Entry] = []
        self._new: dict[str, list[Entry]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: Entry) -> None:
        queue = self._again if entry.started else self._new.setdefault(entry.sequence.request.tenant, [])
        bisect.insort(queue, entry, key=_rank)
        self._count += 1

    def remove(self, entry: Entry) -> None:
        tenant = entry.sequence.request.tenant
        queue = self._again if entry.started else self._new[tenant]
        del queue[bisect.bisect_left(queue, entry.rank, key=_rank)]
        if not queue and not entry.started:
            del self._new[tenant]
        self._count -= 1

    @property
    def returning(self) -> int:
        """Sequences that ran before."""
        return len(self._again)

    @property
    def tenants(self) -> int:
        """Tenants with new sequences."""
        return len(self._new)

    def first(self, running: Mapping[str, int], most: int) -> list[Entry]:
        """The next `most` in the order in which they should be admitted. `running`: sequences running by tenant."""
        new = self._in_turn(running) if len(self._new) > 1 else itertools.chain(*self._new.values())
        return list(itertools.islice(heapq.merge(self._again, new, key=_rank), most))

    def _in_turn(self, running: Mapping[str, int]) -> Iterator[Entry]:
        turns: list[tuple[int, int, Entry, Iterator[Entry]]] = []
        for tenant, queue in self._new.items():
            queued = iter(queue)
            entry = next(queued)
            turns.append((running.get(tenant, 0), entry.serial, entry, queued))
        heapq.heapify(turns)
        while turns:
            count, _, entry, queued = turns[0]
            yield entry
            following = next(queued, None)
            if following is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (count + 1, following.serial, following, queued))


class Deadlines:
    """Entries by deadline. One that ended otherwise is forgotten when its time comes, or when such are the majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, Rank, Entry]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, entry: Entry, deadline: float, alive: int) -> None:
        """`alive`: entries that have not ended, with a deadline or without."""
        if len(self._heap) > 2 * alive + 64:
            self._heap = [item for item in self._heap if not item[2].over]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline, entry.rank, entry))

    def overdue(self, now: float) -> list[Entry]:
        """Take out those whose deadline has come."""
        late: list[Entry] = []
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)[2]
            if not entry.over:
                late.append(entry)
        return late


def _rank(entry: Entry) -> Rank:
    return entry.rank
