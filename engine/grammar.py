"""Rows that must follow a grammar: matchers that read along with a row and its guesses, beside the decode path.

A grammar is llguidance's own form of it (JSON), compiled once and copied for each row. Nothing of it runs where steps are made: a matcher
has its jobs done, one after the other, by a few threads (llguidance lets go of the interpreter lock), and a step takes what is there.

    admit ──▶ compile, read what was generated ──▶ root ◀─────────────────────────────────┐
                                                    │ step: mask                           │ commit: read the new tokens
                                                    └─▶ follow a draft: forced tokens in ──┘
                                                        front, masks of nodes, illegal ones go

What may take long (a grammar's first job, and any behind one that did take long) is done by threads of a lower priority, so that a step
which computes beside it keeps its cores. A row that leaves takes along what was not begun for it.

A row whose matcher is not ready when its token is due waits for another step: it is left out (`gate`), and nobody waits with it. A
draft whose masks are not ready in time is left out likewise, for nobody is owed guesses. A grammar that fails ends its own row.

What a mask holds depends on the tokens before it and on nothing else, so neither drafts nor preemption, prefix hits or restarts change
an answer: a row that is admitted again reads what it had generated.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import llguidance
from llguidance import LLMatcher, LLTokenizer

from forerun.engine.drafters.draft import Draft, Room
from forerun.engine.matcher import Bits, Followed, GrammarError, Matcher, first_line, narrow
from forerun.messages import Emit, SamplingParams

if TYPE_CHECKING:
    from forerun.engine.rows import Share

log = logging.getLogger(__name__)

THREADS, PATIENT_THREADS = 4, 2
"""for what is soon done, and for what may take long"""
LONG_SECONDS = 0.01
"""A matcher whose last job took more of a processor does its next one where others do not suffer."""
NICER = 5
"""of those threads: while decoding takes all cores they get a quarter of one, where the grammars of strangers would else take half"""
KEPT = 32
"""compiled grammars, the newest used"""
PATIENCE_SECONDS, ALONE_SECONDS = 0.002, 0.05
"""How long a step waits for matchers: with others in it, and when it would be empty without them."""
DRAFT_SECONDS = 0.01
"""how long it waits for the masks of its drafts"""
LIMITS = llguidance.LLParserLimits(verbose_errors=False)
"""The library's own: they bound what a single mask may cost, whatever the grammar, to a second or two."""


class Matching:
    """A row's matcher and the jobs that wait for it. All but the jobs is called by the worker's own thread. `leave`: nobody needs what
    `make` waits for."""

    def __init__(self, threads: Threads, make: Callable[[], Matcher], leave: Callable[[], None], tokens: Sequence[int]) -> None:
        self._threads = threads
        self._make = make
        self._leave = leave
        self._matcher: Matcher | None = None
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._running = False
        self._long = True
        self._settled = threading.Event()
        self._root: Bits | None = None
        self._masks: dict[tuple[int, ...], Bits] = {}
        self.error = ""
        """why the row must end"""
        self.late = False
        """a step went without it: the next ones do not wait"""
        self.commit(tokens)

    def close(self) -> None:
        """The row has left: what is not begun for it is not done."""
        with self._lock:
            self._jobs.clear()
        self._leave()

    @property
    def root(self) -> Bits:
        """What may come next, of a row that is ready."""
        assert self._root is not None
        return self._root

    def ready(self, seconds: float) -> bool:
        """Whether it is known what may come next, or that nothing can."""
        return self._settled.wait(seconds) if seconds > 0 else self._settled.is_set()

    def at(self, path: Sequence[int]) -> Bits | None:
        """What may come behind guesses that were followed; None where it does not matter: such a node is never accepted, or an end."""
        if not path:
            return self.root
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

    def follow(self, draft: Draft, room: Room) -> Future[Followed]:
        """Of a row that is ready. No draft at all may become one of forced tokens."""
        done: Future[Followed] = Future()
        root, matcher = self._root, self._matcher
        assert root is not None and matcher is not None

        def job() -> None:
            try:
                done.set_result(matcher.follow(draft, root, room))
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
        (self._threads.patient if self._long else self._threads.quick).submit(self._work)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return
                job = self._jobs.popleft()
            began = time.thread_time()
            job()
            self._long = time.thread_time() - began > LONG_SECONDS


@dataclasses.dataclass(frozen=True, slots=True)
class Threads:
    """Who does the jobs, each in the order in which they come."""

    quick: Executor
    patient: Executor

    @classmethod
    def started(cls) -> Threads:
        return cls(ThreadPoolExecutor(THREADS, "grammar"), ThreadPoolExecutor(PATIENT_THREADS, "grammar-long", _yield_to_others))


def _yield_to_others() -> None:
    """Lower the priority of the calling thread, and of no other."""
    mine = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, mine, os.getpriority(os.PRIO_PROCESS, mine) + NICER)


@dataclasses.dataclass(slots=True)
class Compiled:
    """`rows`: how many wait for it or have it."""

    future: Future[LLMatcher]
    rows: int = 0


class Grammars:
    """The grammars of a worker. `load`: makes the tokenizer's tables; raises GrammarError where this model has none."""

    def __init__(self, load: Callable[[], LLTokenizer], threads: Threads | None = None) -> None:
        self._threads = threads or Threads.started()
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._tokenizer = self._threads.quick.submit(load)

    def why_not(self) -> str:
        """Waits for the tables. Why there can be no grammars; empty = there can."""
        error = self._tokenizer.exception()
        return str(error) or type(error).__name__ if error else ""

    def open(self, params: SamplingParams, generated: Sequence[int]) -> Matching:
        """For a row that has generated so much."""
        compiled = self._compile(params.grammar)
        compiled.rows += 1

        def make() -> Matcher:
            tokenizer = self._tokenizer.result()
            return Matcher(compiled.future.result(), tokenizer.eos_tokens, params.stop_ids, lambda token: tokenizer.decode_bytes([token]))

        return Matching(self._threads, make, lambda: self._leave(params.grammar, compiled), generated)

    def _leave(self, grammar: str, compiled: Compiled) -> None:
        compiled.rows -= 1
        if not compiled.rows and compiled.future.cancel() and self._compiled.get(grammar) is compiled:
            del self._compiled[grammar]

    def _compile(self, grammar: str) -> Compiled:
        known = self._compiled.pop(grammar, None)
        if known is None:
            known = Compiled(self._threads.patient.submit(self._compiled_now, grammar))
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
        if matching is not None and (draft.token or narrow(matching.root)):
            asked.append((place, matching, matching.follow(draft, room)))
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
