"""Who of the waiting sequences becomes running in this step.

First come first served, but for the head start of priorities (`entry.rank_of`; "older" and "younger" below mean rank), with two ways to be
let past, so that one large request never blocks small ones behind it and small ones never starve a large one (user reports: vLLM
#31731, #15996).

*Tokens.* A sequence enters when the step has prompt tokens left for it, or when what it has to compute is at most half of what the
prompts in progress still need: then it slips in beside them (see `shares.py`). On this way later ones may overtake the first that had
to stay, in all by as many tokens as that one itself has to compute.

*Pages.* The oldest that does not fit is the *head*. Younger ones may enter all the same
  (a) while they leave it its room: pool ≥ head + all younger ones that run, each at its largest + reserve;
  (b) while it could not start even if all younger ones were gone, because of the older ones that run.
So small ones flow for as long as the head waits, and it starts at the latest when the older ones, and then the younger ones that run
at that moment, have ended.

A sequence whose next page somebody else is computing right now waits until it is published and then shares it; that holds up nobody
behind it.

*Singly*, after deaths of workers that one of several sequences must have caused (see `suspects.py`): one enters when the one before has
fed all it knows, until all that ran before are back.
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
    def __init__(self, sizes: Sizes, ledger: Ledger, rows: Rows, waiting: Waiting, singly: bool = False) -> None:
        self._sizes = sizes
        self._ledger = ledger
        self._rows = rows
        self._waiting = waiting
        self._singly = singly
        self._head: Entry | None = None
        """the oldest that waits for pages: tried before all younger ones, whatever the order among tenants becomes"""

    def admit(self, behind: list[Entry], budget: int, landed: int) -> list[Entry]:
        """Admit whoever may enter. `behind`: running rows that are still feeding known tokens; `budget`: prompt tokens of the step;
        `landed`: the newest step whose result was applied. Returns the new rows; each must be fed at least one token."""
        if not len(self._waiting) or not self._rows.free or budget < 1:
            return []
        self._singly = self._singly and self._waiting.returning > 0
        if self._singly and behind:
            return []
        most = 1 if self._singly else budget
        claimed = sum(entry.behind for entry in behind)
        admitted: list[Entry] = []
        crowded_out: Entry | None = None
        for entry in self._candidates():
            crowded = claimed >= budget and len(behind) + len(admitted) >= _SLIP
            if not self._rows.free or len(admitted) >= most or crowded:
                break
            if entry.after > landed or entry.blocked == self._ledger.version:
                self._wants_pages(entry)
                continue
            match = self._ledger.look(entry)
            if match.promised:
                continue
            need = len(entry.sequence.tokens) - len(match.pages) * self._sizes.page_tokens
            if claimed >= budget and 2 * need > claimed:
                crowded_out = crowded_out or self._wants_tokens(entry, need)
            elif self._has_pages(entry, match) and self._spends(crowded_out, need):
                self._enter(entry, match)
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
            return candidates
        others = [entry for entry in candidates if entry is not head]
        place = next((i for i, entry in enumerate(others) if entry.rank > head.rank), len(others))
        return [*others[:place], head, *others[place:]]

    def _wants_tokens(self, entry: Entry, need: int) -> Entry:
        if entry.credit < 0:
            entry.credit = need
        return entry

    def _spends(self, crowded_out: Entry | None, need: int) -> bool:
        """It may go past who waits for tokens, who counts how often that happens."""
        if crowded_out is None:
            return True
        if need > crowded_out.credit:
            return False
        crowded_out.credit -= need
        return True

    def _wants_pages(self, entry: Entry) -> None:
        if self._head is None or entry.rank < self._head.rank:
            self._head = entry

    def _has_pages(self, entry: Entry, match: Match) -> bool:
        """There are pages for it, and the head would not miss them."""
        if not self._ledger.fits(match, len(entry.sequence.tokens) + 1, alone=not self._rows.running):
            entry.blocked = self._ledger.version
            self._wants_pages(entry)
            return False
        head = self._head
        if head is None or entry.rank <= head.rank:
            return True
        wanted = self._sizes.pages_of(len(head.sequence.tokens) + 1) + self._sizes.reserve
        younger = [other for other in self._rows.running if other.rank > head.rank]
        if wanted + self._largest(entry) + sum(self._largest(other) for other in younger) <= self._sizes.pages:
            return True
        return self._ledger.pool.available + sum(len(other.pages) for other in younger) < wanted

    def _largest(self, entry: Entry) -> int:
        """Pages it holds just before its last token."""
        return self._sizes.pages_of(entry.last - 1)

    def _enter(self, entry: Entry, match: Match) -> None:
        self._waiting.remove(entry)
        self._ledger.seat(entry, match)
        self._rows.enter(entry)
        entry.started = True
        entry.blocked = entry.credit = -1
        entry.picks = entry.ahead = entry.echo = 0
        if entry is self._head:
            self._head = None
