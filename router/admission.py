"""Who of the waiting sequences becomes running in this step.

First come first served, with two ways to be let past, so that one large request never blocks small ones behind it and small ones
never starve a large one (user reports: vLLM #31731, #15996).

*Tokens.* A sequence enters when the step has prompt tokens left for it, or when what it has to compute is at most half of what the
prompts in progress still need: then it slips in beside them (see `shares.py`).

*Pages.* Who does not fit stays. Later ones may overtake the first that had to stay, the *head*,
  (a) if all who overtook it and still run, each at its largest, leave the head its room: pool ≥ head + overtakers + reserve. Then they
      never make it wait for longer than until those that were there before it have ended; so this may go on while the head waits;
  (b) or on credit: in all as many tokens as the head itself has to compute. A bounded delay, once.

A sequence whose next page somebody else is computing right now waits until it is published and then shares it; that holds up nobody
behind it.
"""

from __future__ import annotations

from collections import Counter

from forerun.router.entry import Entry
from forerun.router.ledger import Ledger
from forerun.router.prefix import Match
from forerun.router.queue import Waiting
from forerun.router.rows import Rows
from forerun.router.sizes import Sizes

_LOOK = 32
"""waiting sequences that are looked at in one step"""
_SLIP = 8
"""rows that may be behind at once when the step has no tokens to spare for another"""


class Admission:
    def __init__(self, sizes: Sizes, ledger: Ledger, rows: Rows, waiting: Waiting) -> None:
        self._sizes = sizes
        self._ledger = ledger
        self._rows = rows
        self._waiting = waiting
        self._head: Entry | None = None
        """who waits for pages in front; stays so until it is admitted or over, whatever the order among tenants becomes"""

    def admit(self, behind: list[Entry], budget: int, landed: int) -> list[Entry]:
        """Admit whoever may enter. `behind`: running rows that are still feeding known tokens; `budget`: prompt tokens of the step;
        `landed`: the newest step whose result was applied. Returns the new rows; each must be fed at least one token."""
        if not len(self._waiting) or not self._rows.free or budget < 1:
            return []
        claimed = sum(entry.behind for entry in behind)
        admitted: list[Entry] = []
        stayed: Entry | None = None
        for entry in self._candidates():
            crowded = claimed >= budget and len(behind) + len(admitted) >= _SLIP
            if not self._rows.free or len(admitted) >= budget or crowded:
                break
            if entry.after > landed or entry.blocked == self._ledger.version:
                stayed = stayed or self._stays(entry, len(entry.sequence.tokens))
                continue
            match = self._ledger.look(entry)
            if match.promised:
                continue
            need = len(entry.sequence.tokens) - len(match.pages) * self._sizes.page_tokens
            if not self._may_enter(entry, match, need, claimed, budget):
                stayed = stayed or self._stays(entry, need)
                continue
            if stayed is not None and not self._may_overtake(stayed, entry, need):
                continue
            self._enter(entry, match, stayed)
            admitted.append(entry)
            claimed += entry.behind
        return admitted

    def _candidates(self) -> list[Entry]:
        running: Counter[str] = Counter()
        if self._waiting.tenants > 1:
            running.update(entry.sequence.request.tenant for entry in self._rows.running)
        candidates = self._waiting.first(running, _LOOK)
        head = self._head
        if head is None or head.over or head.running:
            self._head = None
        elif self._waiting.tenants > 1:
            candidates = [entry for entry in candidates if entry is not head]
            at = sum(entry.started for entry in candidates)
            candidates.insert(0 if head.started else at, head)
        return candidates

    def _may_enter(self, entry: Entry, match: Match, need: int, claimed: int, budget: int) -> bool:
        if claimed >= budget and 2 * need > claimed:
            return False
        if self._ledger.fits(match, len(entry.sequence.tokens) + 1, alone=not self._rows.running):
            return True
        entry.blocked = self._ledger.version
        self._head = self._head or entry
        return False

    def _stays(self, entry: Entry, need: int) -> Entry:
        if entry.credit < 0:
            entry.credit = need
        return entry

    def _may_overtake(self, head: Entry, entry: Entry, need: int) -> bool:
        if head.blocked >= 0:
            taken = sum(self._largest(other) for other in self._rows.running if other.overtook is head)
            room = self._sizes.pages - self._sizes.reserve - self._sizes.pages_of(len(head.sequence.tokens) + 1)
            if taken + self._largest(entry) <= room:
                return True
        if need > head.credit:
            return False
        head.credit -= need
        return True

    def _largest(self, entry: Entry) -> int:
        """Pages it holds just before its last token."""
        return self._sizes.pages_of(entry.last - 1)

    def _enter(self, entry: Entry, match: Match, stayed: Entry | None) -> None:
        self._waiting.remove(entry)
        self._ledger.seat(entry, match)
        self._rows.enter(entry)
        entry.started = True
        entry.blocked = entry.credit = -1
        entry.overtook = stayed
        entry.picks = entry.ahead = entry.echo = 0
