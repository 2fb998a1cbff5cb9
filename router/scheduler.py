"""The batcher: which sequences run, what each feeds in the next step, and what became of it.

Plain and synchronous: no I/O and no clock (times are passed in), no text, no device. One scheduler per replica. Its driver calls
`plan` whenever the worker could take one, `apply` for every result, and tells the events to whom they concern:

    add ─▶ waiting ──admission──▶ running ──result──▶ ended
              ▲                      │
              └──── preempt, restart ┘             cancel, deadline: from anywhere

Up to two plans are on the way at once. A row with a step on the way is planned again without knowing its tokens; pages are granted
for as many tokens as may come back. If the worker ended the row meanwhile, it ignores the feed.

Pages are not reserved for what a sequence might become. When they run out, the running sequence that ranks last (of the lowest priority the
youngest, see `entry.rank_of`) gives way and is computed again later, prompt and answer; its stream goes on where it was. The first is
never preempted and always finds its pages, since the pool holds the longest sequence, and everybody is first in the end: everything that
was accepted ends.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import msgspec

from forerun.messages import Admit, Emit, Feed, Ready, StepPlan, StepResult
from forerun.router.admission import Admission
from forerun.router.entry import Entry, rank_of
from forerun.router.events import Admitted, Ended, Event, Failed, Preempted, Stepped, Tally, Tokens
from forerun.router.guesses import Allowance, Budget, no_guesses
from forerun.router.ledger import Ledger
from forerun.router.observer import Load
from forerun.router.pace import Pace
from forerun.router.policy import Policy
from forerun.router.queue import Deadlines, Waiting
from forerun.router.request import Failure, Run, Sequence
from forerun.router.rows import Rows
from forerun.router.shares import divide
from forerun.router.sizes import Sizes
from forerun.router.step import Fed, Step

AHEAD = 2
"""plans that may be on the way at once"""

DEADLINE = Failure("Deadline exceeded", "deadline_exceeded", 504)
"""504, not 4xx: the request was sound, the server was too slow for it. Not 429 or 503, which clients answer by sending it again."""

_NO_GUESSES = Allowance([], 0)
_GUESSED = 8
"""prompts leave guesses a row for every so many of a step"""


class Scheduler:
    """`ready`: what the worker offers. `budget`: who may have how many guesses in the next step."""

    def __init__(self, ready: Ready, policy: Policy | None = None, budget: Budget = no_guesses) -> None:
        self._policy = policy or Policy()
        self._budget = budget
        self._entries: dict[Sequence, Entry] = {}
        self._deadlines = Deadlines()
        self._events: list[Event] = []
        self._serial = 0
        self._number = 0
        self._landed = 0
        self._patience = 0
        """steps in a row in which prompts were pending beside running streams"""
        self._open(ready)

    def __repr__(self) -> str:
        pool = self._ledger.pool
        return f"{len(self._rows.running)} running, {len(self._waiting)} waiting, {pool.used}/{pool.total} pages"

    @property
    def sizes(self) -> Sizes:
        """The limits in force."""
        return self._sizes

    @property
    def outstanding(self) -> int:
        """Plans whose result is not there yet."""
        return len(self._steps)

    def load(self) -> Load:
        pool = self._ledger.pool
        return Load(
            waiting=len(self._waiting),
            running=len(self._rows.running),
            used_pages=pool.used,
            cached_pages=pool.idle,
            total_pages=pool.total,
            page_tokens=self._sizes.page_tokens,
        )

    def add(self, sequence: Sequence, now: float | None = None) -> None:
        """Queue it. Raises ValueError for one that could never run; validation by `sizes.longest` keeps such out."""
        request, params = sequence.request, sequence.params
        last = params.prompt_tokens + params.max_new_tokens
        if not 0 < params.prompt_tokens <= len(sequence.tokens) < last:
            raise ValueError("a sequence needs a prompt and room for at least one new token")
        if last > self._sizes.longest:
            raise ValueError(f"{last} tokens asked for, at most {self._sizes.longest} can be served: ask for fewer new tokens")
        if now is not None:
            sequence.queued_at = now
        entry = Entry(sequence, rank_of(sequence, self._serial), last, caches=request.cache and self._policy.prefix_caching)
        self._serial += 1
        self._entries[sequence] = entry
        self._waiting.add(entry)
        if request.deadline is not None:
            self._deadlines.add(entry, request.deadline, len(self._entries))

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants it any more. Idempotent, also after its end. It feeds nothing from the next plan on."""
        sequence.cancelled = True
        entry = self._entries.get(sequence)
        if entry is not None:
            self._end(entry)

    def expire(self, now: float) -> None:
        """Fail what is overdue, waiting or running. `plan` does it too; call it where no plans are made (no worker)."""
        for entry in self._deadlines.overdue(now):
            self._end(entry)
            self._events.append(Failed(entry.sequence, DEADLINE))

    def busy(self) -> list[Sequence]:
        """Whom the oldest plan on the way feeds: a worker that dies now dies of one of them, if of any."""
        return [fed.entry.sequence for fed in self._steps[0].fed if not fed.entry.over] if self._steps else []

    def restart(self, ready: Ready | None = None, singly: bool = False) -> None:
        """The worker died: what ran goes back to the front of the queue; plans on the way, pages and prefixes are forgotten.
        `ready`: what its successor offers, if that may differ; sequences too long for it fail. `singly`: they come back one at a time.
        Only what sequences have heard is kept, so this also puts right whatever an exception left half done."""
        self._open(ready or self._ready, singly)
        for entry in self._entries.values():
            entry.wait()
            self._waiting.add(entry)
        for entry in [entry for entry in self._entries.values() if entry.last > self._sizes.longest]:
            self._end(entry)
            self._events.append(Failed(entry.sequence, Failure("The worker came back with too little memory", "generation", 500)))

    def take_events(self) -> list[Event]:
        """What `plan`, `expire` and `restart` brought about since the last call of this or `apply`."""
        events, self._events = self._events, []
        return events

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None: nothing to do, or enough plans on the way."""
        self.expire(now)
        if len(self._steps) >= AHEAD or not self._entries:
            return None
        step = Step(self._number + 1)
        decoding, behind = self._choose()
        step.decode_rows = len(decoding)
        # Prompts first: a guess may save a stream one step, but a prompt that waits keeps a row empty for as long as it does.
        chunks, admit = self._feed_behind(step, behind, now)
        feed, guesses = self._feed_decoding(step, decoding)
        feed += chunks
        if not feed:
            return None
        self._number = step.number
        self._steps.append(step)
        drops = self._rows.drops()
        prices = guesses.price, guesses.toll, guesses.entry_price, guesses.discount, guesses.goodput
        weights = {entry.number: weight for (entry, _), weight in zip(decoding, guesses.weights)}
        return StepPlan(step.number, admit, feed, drops, guesses.total, *prices, weights)

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Take in the result of the oldest plan on the way. Returns everything that happened since the last call."""
        if not self._steps or self._steps[0].number != result.step:
            raise ValueError(f"result of step {result.step} while {[step.number for step in self._steps]} are on the way")
        step = self._steps.popleft()
        self._landed = step.number
        emits = {emit.row: emit for emit in result.emit}
        tokens = drafted = accepted = roots = asked = read = drafts = 0
        accepted_at: list[int] = []
        for place, fed in enumerate(step.fed):
            entry = fed.entry
            if entry.over:
                continue
            emit = emits.get(fed.row)
            if fed.picks:
                entry.picks -= 1
                entry.ahead -= 1 + fed.guess
            if emit is not None and not emit.error:
                tokens += len(emit.tokens)
                drafted += emit.drafted
                accepted += emit.accepted
                if place < step.decode_rows:
                    roots += 1
                    asked += fed.guess > 0
                    drafts += emit.drafted > 0
                    read += len(entry.sequence.tokens)
                    if emit.accepted:
                        _count(accepted_at, emit.accepted)
            self._land(fed, emit, now)
        self._pace.stepped(step.decode_rows, step.prefill_tokens + result.nodes, result.verify_us / 1e6)
        counts = tokens, drafted, accepted, roots, asked, read, accepted_at, drafts
        self._events.append(Stepped(Tally(step.number, step.prefill_tokens, step.decode_rows, *counts)))
        return self.take_events()

    def _open(self, ready: Ready, singly: bool = False) -> None:
        """A worker with empty tables and pools, and nobody waiting for it yet."""
        self._ready = ready
        self._sizes = Sizes.of(ready, self._policy)
        self._pace = Pace(ready, self._policy.max_inter_token_ms)
        self._ledger = Ledger(self._sizes)
        self._rows = Rows(self._sizes.rows)
        self._waiting = Waiting()
        self._admission = Admission(self._sizes, self._ledger, self._rows, self._waiting, singly)
        self._steps: deque[Step] = deque()

    # Planning

    def _choose(self) -> tuple[list[tuple[Entry, list[int]]], list[Entry]]:
        """Rows that decode in this step, with the pages granted to them, and rows that are behind. In order of rank, so that whoever
        has to give way was not chosen yet."""
        decoding: list[tuple[Entry, list[int]]] = []
        behind: list[Entry] = []
        running = self._rows.running
        index = 0
        while index < len(running):
            entry = running[index]
            index += 1
            if entry.fed < entry.goal:
                behind.append(entry)
                continue
            length = len(entry.sequence.tokens)
            if length + entry.picks >= entry.last:
                continue  # all its tokens are on the way
            positions = min(length + entry.ahead, entry.last - 1)
            if positions <= entry.room:
                decoding.append((entry, []))
                continue
            lacking = self._ledger.short(entry, positions)
            while self._ledger.pool.available < lacking and entry.running:
                self._preempt(running[-1])
            if entry.running:
                decoding.append((entry, self._ledger.grow(entry, lacking)))
        return decoding, behind

    def _feed_decoding(self, step: Step, decoding: list[tuple[Entry, list[int]]]) -> tuple[list[Feed], Allowance]:
        """One known token a row, and guesses where the budget has some. Also what the step may guess in all, and its price."""
        allowance = self._allowance(step, decoding)
        wishes = allowance.guess or [0] * len(decoding)
        feed: list[Feed] = []
        fed: list[Fed] = []
        most = 0
        for (entry, pages), wanted in zip(decoding, wishes, strict=True):
            guess, more = self._room_for_guesses(entry, wanted)
            entry.picks += 1
            entry.ahead += 1 + guess
            fed.append(Fed(entry, entry.number, 1, guess, True))
            feed.append(Feed(entry.number, 1, guess, pages + more))
            most += guess
        step.fed[:0] = fed
        return feed, dataclasses.replace(allowance, total=min(most, allowance.total)) if most else _NO_GUESSES

    def _allowance(self, step: Step, decoding: list[tuple[Entry, list[int]]]) -> Allowance:
        """What the budget grants; where prompts are in the step, as far as they leave room in the pause that they may cause, but always an
        eighth of the step: streams would go without guesses for as long as prompts keep coming, when their steps are longest."""
        allowance = self._budget([entry.sequence for entry, _ in decoding], step.prefill_tokens) if decoding else None
        if allowance is None or allowance.total <= 0:
            return _NO_GUESSES
        if not step.prefill_tokens:
            return allowance
        rows = step.decode_rows + step.prefill_tokens
        room = max(self._pace.room(rows), rows // _GUESSED)
        return dataclasses.replace(allowance, total=min(allowance.total, room)) if room else _NO_GUESSES

    def _room_for_guesses(self, entry: Entry, wanted: int) -> tuple[int, list[int]]:
        """As many guesses as may be of use and find room without driving anybody out, and the pages granted for them."""
        length = len(entry.sequence.tokens)
        asked = entry.sequence.request.speculate
        guess = min(wanted, self._sizes.nodes, entry.last - length - entry.picks - 1, wanted if asked is None else asked)
        if guess <= 0:
            return 0, []
        positions = min(length + entry.ahead, entry.last - 1)
        lacking = self._ledger.short(entry, positions + guess)
        granted = self._ledger.grow(entry, min(lacking, max(0, self._ledger.pool.available - self._sizes.reserve)))
        return min(guess, entry.room - positions), granted

    def _feed_behind(self, step: Step, behind: list[Entry], now: float) -> tuple[list[Feed], list[Admit]]:
        """Prompt chunks: of rows that are behind, and of those that are admitted now."""
        feed: list[Feed] = []
        budget = self._prompt_tokens(step.decode_rows, len(behind))
        fresh = self._admission.admit(behind, budget, self._landed)
        claims = behind + fresh
        if not claims or budget < 1:
            return feed, []
        for entry, known in zip(claims, divide(budget, [entry.behind for entry in claims], len(fresh)), strict=True):
            if known == 0:
                continue
            entry.fed += known
            picks = entry.fed == entry.goal
            if picks:
                entry.picks = entry.ahead = 1
            step.prefill_tokens += known
            step.fed.append(Fed(entry, entry.number, known, 0, picks))
            feed.append(Feed(entry.number, known))
        return feed, [self._admit(entry, now) for entry in fresh]

    def _prompt_tokens(self, decode_rows: int, behind: int) -> int:
        """Prompt tokens of this step. Beside running streams they are bounded by the pause they may cause, and halved while few
        prompts are pending (see `Policy.waiting_served_ratio`)."""
        budget = min(self._sizes.prefill_tokens, self._sizes.step_tokens - decode_rows)
        pending = behind + len(self._waiting)
        if not decode_rows or not pending:
            self._patience = 0
            return budget
        share = self._pace.allowance(decode_rows)
        if pending < self._policy.waiting_served_ratio * decode_rows and self._patience < self._policy.max_waiting_tokens:
            share = -(-share // 2)
        self._patience += 1
        return min(budget, share)

    def _admit(self, entry: Entry, now: float) -> Admit:
        sequence, params = entry.sequence, entry.sequence.params
        hit = entry.computed
        if sequence.started_at == 0.0:
            sequence.started_at = now
            sequence.prefix_hit_tokens = hit
        self._events.append(Admitted(sequence, hit))
        if params.prompt_logprobs and not entry.echoes:
            params = msgspec.structs.replace(params, prompt_logprobs=False)
        # Copies: the message may be encoded after the next result was applied.
        return Admit(entry.number, list(sequence.tokens), hit, list(entry.pages), params, sequence.request.adapter)

    def _preempt(self, entry: Entry) -> None:
        assert entry is not self._rows.running[0], "the first sequence found no pages: it is longer than the pool"
        self._stop(entry)
        entry.after = self._number
        entry.blocked = self._ledger.version
        entry.sequence.preemptions += 1
        self._waiting.add(entry)
        self._events.append(Preempted(entry.sequence))

    # Results

    def _land(self, fed: Fed, emit: Emit | None, now: float) -> None:
        """What a step brought for one row. The entry may have been preempted since: its tokens count all the same."""
        entry = fed.entry
        if emit is None:
            if fed.picks:
                self._fail(entry, "the worker returned no token for a row of its plan", 500)
            elif entry.running:
                entry.computed += fed.known
                self._ledger.landed(entry)
            return
        if emit.error:
            self._fail(entry, emit.error, 424)
            return
        sequence = entry.sequence
        prompt, prompt_top = self._fresh_echo(entry, emit) if emit.prompt_logprobs else ([], [])
        if emit.tokens or prompt:
            if emit.tokens and sequence.first_token_at == 0.0:
                sequence.first_token_at = now
            sequence.tokens.extend(emit.tokens)
            run = Run(emit.tokens, emit.logprobs, emit.top, prompt, emit.drafted, emit.accepted, fed.guess, emit.expected, prompt_top)
            self._events.append(Tokens(sequence, run))
        if entry.running:
            entry.computed = len(sequence.tokens) - 1 if fed.picks else entry.computed + fed.known
            if entry.computed - entry.published * self._sizes.page_tokens >= self._sizes.page_tokens:
                self._ledger.landed(entry)
        if emit.finish or len(sequence.tokens) >= entry.last:
            self._end(entry)
            self._events.append(Ended(sequence, emit.finish or "length"))

    def _fresh_echo(self, entry: Entry, emit: Emit) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """Of the prompt log-probabilities reported now those that the stream does not have yet, and their alternatives."""
        known = max(0, entry.echoed - entry.echo)
        entry.echo += len(emit.prompt_logprobs)
        entry.echoed = max(entry.echoed, entry.echo)
        return emit.prompt_logprobs[known:], emit.prompt_top[known:]

    # Ends

    def _fail(self, entry: Entry, error: str, status: int) -> None:
        self._end(entry)
        self._events.append(Failed(entry.sequence, Failure(f"Request failed during generation: {error}", "generation", status)))

    def _end(self, entry: Entry) -> None:
        """It is over, wherever it was."""
        del self._entries[entry.sequence]
        entry.over = True
        if entry.running:
            self._stop(entry)
        else:
            self._waiting.remove(entry)

    def _stop(self, entry: Entry) -> None:
        """It gives up its row and its pages. Steps on the way still write to them; the next plan comes after those."""
        self._rows.leave(entry)
        self._ledger.leave(entry)


def _count(rows: list[int], depth: int) -> None:
    """One more row that got so deep."""
    while len(rows) < depth:
        rows.append(0)
    for place in range(depth):
        rows[place] += 1
