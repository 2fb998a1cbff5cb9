"""What the scheduler keeps of one sequence, from `add` to its end: where its tokens stand and what it holds.

    tokens known to the front:   |··········computed··········|···············|          len(sequence.tokens)
    planned, not yet applied:                                  ├─ step n ─┤├─ step n+1 ─┤
    prefill:   fed < goal        `fed` counts positions of all plans sent; `goal` what there was to compute when it was admitted
    decode:    fed = goal        `picks` steps are on the way, which bring between `picks` and `ahead` tokens

Mutated by the scheduler alone.
"""

from __future__ import annotations

import dataclasses

from forerun.router.prefix import Node
from forerun.router.request import Sequence

HEAD_START_SECONDS = 10.0
"""what a unit of priority is worth: so much earlier a sequence seems to have come"""

Rank = tuple[float, int]
"""precedence: the lower goes first"""


def rank_of(sequence: Sequence, serial: int) -> Rank:
    """Order of arrival, with a head start for priority. A sequence is therefore overtaken only by those that come within
    HEAD_START_SECONDS · (their priority − its own) after it, and waits for them alone: the order never changes, nobody starves, and there
    is nothing to age (an accumulating priority queue in which all wait at equal rates: Kleinrock 1964)."""
    return sequence.queued_at - HEAD_START_SECONDS * sequence.priority, serial


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """Invariants: `number` ≥ 0 exactly while it is running; then `room` = positions covered by `pages`, computed ≤ fed ≤ room in
    prefill, and the first `published` pages are those of the index path that ends at `tip`."""

    sequence: Sequence
    rank: Rank
    """kept for life; whoever ranks first is planned first, admitted first and gives way last"""
    last: int
    """tokens it has when it ends by length"""
    caches: bool
    """uses and fills the prefix cache"""
    over: bool = False
    started: bool = False
    """was admitted before (it was preempted, or its worker died)"""

    # While it runs.
    number: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    room: int = 0
    fed: int = 0
    goal: int = 0
    computed: int = 0
    picks: int = 0
    ahead: int = 0
    tip: Node | None = None
    published: int = 0
    promise: bytes | None = None
    """key of the page below `tip` that it promised to publish"""

    # While it waits.
    after: int = -1
    """not before the result of this step: tokens of its are still on the way"""
    blocked: int = -1
    """state of the pages (`Ledger.version`) in which it did not fit; −1 = it is not waiting for pages"""
    credit: int = -1
    """tokens by which later ones may overtake it while the step has none to spare; −1 = it did not have to stay behind yet"""

    # Prompt log-probabilities are reported from the start of the prompt in every admission; the stream gets each once.
    echoed: int = 0
    """values the stream has"""
    echo: int = 0
    """values the worker reported since the last admission"""

    def wait(self) -> None:
        """Forget everything that a worker knew of it."""
        self.number = -1
        self.pages, self.room, self.tip, self.published, self.promise = [], 0, None, 0, None
        self.after = self.blocked = self.credit = -1

    @property
    def serial(self) -> int:
        """Order of arrival."""
        return self.rank[1]

    @property
    def behind(self) -> int:
        """Known tokens still to be fed."""
        return self.goal - self.fed

    @property
    def running(self) -> bool:
        return self.number >= 0

    @property
    def echoes(self) -> bool:
        """Prompt log-probabilities are still owed."""
        return self.sequence.params.prompt_logprobs and self.echoed < self.sequence.params.prompt_tokens - 1
