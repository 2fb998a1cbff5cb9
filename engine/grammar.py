"""Rows that must follow a grammar: matchers that read along with a row and its guesses, beside the decode path.

A grammar is llguidance's own form of it (JSON), compiled once and copied for each row. Nothing of it runs where steps are made: a matcher
has its jobs done, one after the other, by a few threads (llguidance lets go of the interpreter lock), and a step takes what is there.

    admit ──▶ compile, read what was generated ──▶ root ◀─────────────────────────┐
                                                    │ step: mask, forced tokens    │ commit: read the new tokens
                                                    └─▶ follow a draft: masks of ──┘
                                                        its nodes, illegal ones go

A row whose matcher is not ready when its token is due waits for another step: it is left out (`gate`), and nobody waits with it. A
draft whose masks are not ready in time is left out likewise, for nobody is owed guesses. A grammar that fails ends its own row.

What a mask holds depends on the tokens before it and on nothing else, so neither drafts nor preemption, prefix hits or restarts change
an answer: a row that is admitted again reads what it had generated.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from forerun.engine.drafters.choose import keep
from forerun.engine.drafters.draft import Draft, Room
from forerun.messages import Emit, SamplingParams

if TYPE_CHECKING:
    from forerun.engine.rows import Share

log = logging.getLogger(__name__)

Bits = NDArray[np.uint8]
"""one bit for each token id, the lowest first; 1 = allowed"""

THREADS = 4
KEPT = 32
"""compiled grammars, the newest used"""
MOST_FORCED = 32
"""forced tokens that are looked ahead"""
PATIENCE_SECONDS, ALONE_SECONDS = 0.002, 0.05
"""How long a step waits for matchers: with others in it, and when it would be empty without them."""
DRAFT_SECONDS = 0.01
"""how long it waits for the masks of its drafts"""
LIMITS = llguidance.LLParserLimits(verbose_errors=False)
"""The library's own: they bound what a single mask may cost, whatever the grammar, to a second or two."""


class GrammarError(Exception):
    """A grammar that cannot be compiled or followed. The message is for the client."""


@dataclasses.dataclass(frozen=True, slots=True)
class Root:
    """What may come next, and the tokens from there on of which each is the only one."""

    bits: Bits
    forced: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Followed:
    """A draft without its illegal nodes, and what may come behind the others, by their paths."""

    draft: Draft
    masks: dict[tuple[int, ...], Bits]


class Matcher:
    """Reads one row. `ends`: ids that end a sequence, allowed where the grammar may end; `hidden`: what the library takes for them. For
    one thread at a time."""

    def __init__(self, compiled: LLMatcher, hidden: Sequence[int], ends: Sequence[int]) -> None:
        self._compiled = compiled
        self._hidden = list(hidden)
        self._ends = list(ends)
        self._read: list[int] = []
        self._ahead: list[int] = []
        """read beyond these: the path where a draft is followed"""
        self._live = compiled.deep_copy()

    def advance(self, tokens: Sequence[int]) -> Root:
        """These became true. Raises GrammarError."""
        self._read += tokens
        self._live.consume_tokens(list(tokens))
        bits = self._bits()
        if self._live.is_error():
            # What was looked at for drafts counts towards the library's limits: only a matcher that never saw one may fail.
            self._again()
            bits = self._bits()
        if self._live.is_error():
            raise GrammarError(f"the grammar cannot be followed: {first_line(self._live.get_error())}")
        if not bits.any():
            why = "its end is reached and the model has no token for that" if self._live.is_accepting() else "nothing is allowed here"
            raise GrammarError(f"the grammar cannot be followed: {why}")
        return Root(bits, self._live.compute_ff_tokens()[:MOST_FORCED])

    def follow(self, draft: Draft, root: Bits) -> Followed:
        """Walk over a draft and back. Probes stay, with what hangs off them, since they are never accepted; what was drawn (`Draft.law`)
        stays as well: it may not be cut for what it is, and its masks refuse it."""
        masks: dict[tuple[int, ...], Bits] = {}
        stays: list[bool] = []
        open_: list[bool] = []
        for node, path in enumerate(draft.paths()):
            parent, token = draft.parent[node], path[-1]
            above = root if parent < 0 else masks.get(tuple(path[:-1]))
            real = not draft.probe[node] and (parent < 0 or open_[parent])
            open_.append(real)
            legal = real and above is not None and allows(above, token) and self._mask(path, masks)
            stays.append((parent < 0 or stays[parent]) and (legal or not real))
        self._go([])
        kept = draft if draft.law else keep(draft, [node for node, stay in enumerate(stays) if stay])
        return Followed(kept, masks)

    def _mask(self, path: list[int], masks: dict[tuple[int, ...], Bits]) -> bool:
        """Note what may come behind a legal path; nothing does behind an end. False where that is nothing at all (a dead end, or the
        library gives up): the row says so when it gets there. What was drawn stays, and is refused there."""
        place = tuple(path)
        if path[-1] in self._ends:
            return True
        if place not in masks:
            self._go(path)
            masks[place] = self._bits()
            if self._live.is_error():
                self._again()
        return bool(masks[place].any())

    def _go(self, path: list[int]) -> None:
        """Stand behind this path of guesses."""
        same = 0
        while same < min(len(path), len(self._ahead)) and path[same] == self._ahead[same]:
            same += 1
        if same < len(self._ahead):
            self._live.rollback(len(self._ahead) - same)
        if same < len(path):
            self._live.consume_tokens(path[same:])
        self._ahead = list(path)

    def _again(self) -> None:
        """A matcher that has read what became true, and nothing else."""
        self._live, self._ahead = self._compiled.deep_copy(), []
        self._live.consume_tokens(self._read)

    def _bits(self) -> Bits:
        """What may come where the matcher stands; all zero after an error."""
        live = self._live
        bits = np.frombuffer(live.compute_bitmask(), np.uint8).copy()
        if live.is_stopped():
            bits[:] = 0
        for token in self._hidden:
            bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        if live.is_accepting() and not live.is_error():
            for token in self._ends:
                if token < 8 * len(bits):
                    bits[token >> 3] |= 1 << (token & 7)
        return bits


class Matching:
    """A row's matcher and the jobs that wait for it. All but the jobs is called by the worker's own thread."""

    def __init__(self, threads: Executor, make: Callable[[], Matcher], tokens: Sequence[int]) -> None:
        self._threads = threads
        self._make = make
        self._matcher: Matcher | None = None
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._running = False
        self._settled = threading.Event()
        self._root: Root | None = None
        self._masks: dict[tuple[int, ...], Bits] = {}
        self.error = ""
        """why the row must end"""
        self.late = False
        """a step went without it: the next ones do not wait"""
        self.commit(tokens)

    @property
    def forced(self) -> list[int]:
        """Tokens that must come next, of a row that is ready."""
        assert self._root is not None
        return self._root.forced

    def ready(self, seconds: float) -> bool:
        """Whether it is known what may come next, or that nothing can."""
        return self._settled.wait(seconds) if seconds > 0 else self._settled.is_set()

    def at(self, path: Sequence[int]) -> Bits | None:
        """What may come behind guesses that were followed; None where it does not matter: such a node is never accepted, or an end."""
        if not path:
            assert self._root is not None
            return self._root.bits
        return self._masks.get(tuple(path))

    def commit(self, tokens: Sequence[int]) -> None:
        """These became true."""
        self._settled.clear()
        self._masks = {}
        read = list(tokens)

        def job() -> None:
            try:
                if self._matcher is None:
                    self._matcher = self._make()
                self._root = self._matcher.advance(read)
            except BaseException as error:  # a panic of the library is no Exception, and the row must not wait for ever
                self.error = self.error or str(error) or type(error).__name__
            self._settled.set()

        self._submit(job)

    def follow(self, draft: Draft) -> Future[Followed]:
        """Of a row that is ready."""
        done: Future[Followed] = Future()
        root, matcher = self._root, self._matcher
        assert root is not None and matcher is not None

        def job() -> None:
            try:
                done.set_result(matcher.follow(draft, root.bits))
            except BaseException as error:
                done.set_exception(GrammarError(str(error) or type(error).__name__))

        self._submit(job)
        return done

    def take(self, followed: Followed) -> Draft:
        """From now on `at` knows this draft."""
        self._masks = followed.masks
        return followed.draft

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append(job)
            if self._running:
                return
            self._running = True
        self._threads.submit(self._work)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return
                job = self._jobs.popleft()
            job()


class Grammars:
    """The grammars of a worker. `load`: makes the tokenizer's tables; raises GrammarError where this model has none. `threads`: who does
    the jobs, in the order in which they come."""

    def __init__(self, load: Callable[[], LLTokenizer], threads: Executor | None = None) -> None:
        self._threads = threads or ThreadPoolExecutor(THREADS, "grammar")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._tokenizer = self._threads.submit(load)

    def why_not(self) -> str:
        """Waits for the tables. Why there can be no grammars; empty = there can."""
        error = self._tokenizer.exception()
        return str(error) or type(error).__name__ if error else ""

    def open(self, params: SamplingParams, generated: Sequence[int]) -> Matching:
        """For a row that has generated so much."""
        compiled = self._compile(params.grammar)

        def make() -> Matcher:
            return Matcher(compiled.result(), self._tokenizer.result().eos_tokens, params.stop_ids)

        return Matching(self._threads, make, generated)

    def _compile(self, grammar: str) -> Future[LLMatcher]:
        known = self._compiled.pop(grammar, None)
        if known is None:
            known = self._threads.submit(self._compiled_now, grammar)
            if len(self._compiled) >= KEPT:
                self._compiled.popitem(last=False)
        self._compiled[grammar] = known
        return known

    def _compiled_now(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {first_line(matcher.get_error())}")
        return matcher


def tables(file: str) -> LLTokenizer:
    """Of a tokenizer.json. Takes a second and keeps the interpreter's lock meanwhile, so it is done before there are requests."""
    if not file or not Path(file).is_file():
        raise GrammarError("this model has no tokenizer.json")
    try:
        return LLTokenizer(Path(file).read_text(encoding="utf-8"))
    except Exception as wrong:  # the bindings raise what they like
        raise GrammarError(f"its tokenizer is of a kind that grammars cannot be used with: {first_line(str(wrong))}") from None


def gate(shares: Sequence[Share]) -> tuple[list[Share], list[Emit]]:
    """The shares that can be computed now, and what there is to say of the others: an error for a row whose grammar failed, nothing for one
    that waits. A prompt is computed meanwhile, up to its last token."""
    if all(share.row.matching is None for share in shares):
        return list(shares), []
    going: list[Share] = []
    due: list[tuple[Share, Matching]] = []
    for share in shares:
        if share.row.matching is None or not share.ends:
            going.append(share)
        else:
            due.append((share, share.row.matching))
    others = bool(going) or any(matching.ready(0.0) for _, matching in due)
    until = time.monotonic() + (PATIENCE_SECONDS if others else ALONE_SECONDS)
    late: list[Emit] = []
    for share, matching in due:
        ready = matching.ready(0.0 if matching.late and others else until - time.monotonic())
        matching.late = not ready
        if ready and not matching.error:
            going.append(share)
            continue
        late.append(Emit(share.row.number, error=matching.error if ready else ""))
        if not ready and share.known > 1:
            share.known -= 1
            going.append(share)
    return going, late


def along(shares: Sequence[Share], drafts: Sequence[Draft], rooms: Sequence[Room]) -> list[Draft]:
    """What drafts become where rows follow grammars: forced tokens in front, illegal guesses gone."""
    found = list(drafts)
    asked: list[tuple[int, Matching, Future[Followed]]] = []
    for place, (share, draft, room) in enumerate(zip(shares, drafts, rooms)):
        matching = share.row.matching
        if matching is not None:
            whole = draft if draft.law else join(matching.forced, draft, room.nodes, room.depth)
            if whole.token:
                asked.append((place, matching, matching.follow(whole)))
    until = time.monotonic() + DRAFT_SECONDS
    for place, matching, followed in asked:
        try:
            found[place] = matching.take(followed.result(max(0.0, until - time.monotonic())))
        except TimeoutError:
            found[place] = Draft.none()
        except Exception as error:  # this row's grammar, and no fault of whoever drafted
            log.warning("the guesses of a row cannot be held to its grammar: %s", error)
            found[place] = Draft.none()
    return found


def join(forced: Sequence[int], draft: Draft, nodes: int, depth: int) -> Draft:
    """A chain of forced tokens, with the draft laid over it: what says the same is the same node, what says otherwise at a forced place
    goes, what goes on behind the chain hangs there. At most `nodes` nodes; the chain has at most `depth`."""
    count = min(len(forced), nodes, depth)
    if not count:
        return draft
    token, parent, confidence, probe = list(forced[:count]), list(range(-1, count - 1)), [1.0] * count, [False] * count
    source = [0] * count if draft.source else []
    place: list[int] = []
    """of each node of the draft, -1 = it went"""
    for node, (t, p) in enumerate(zip(draft.token, draft.parent)):
        at = -1 if p < 0 else place[p]
        gone = p >= 0 and at < 0
        if not gone and at + 1 < count and at < count and (p < 0 or at < count - 1):
            if t == token[at + 1] and not draft.probe[node]:
                place.append(at + 1)
                if source:
                    source[at + 1] |= draft.source[node]
                continue
            gone = True
        if gone or len(token) >= nodes:
            place.append(-1)
            continue
        place.append(len(token))
        token.append(t)
        parent.append(at)
        confidence.append(draft.confidence[node])
        probe.append(draft.probe[node])
        source += draft.source[node : node + 1]
    return Draft(token, parent, confidence, probe, source)


def allows(bits: Bits, token: int) -> bool:
    return 0 <= token < 8 * len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)


def first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "the library does not say why"
