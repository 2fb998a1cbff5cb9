"""A worker in a page of Python: answers plans by the contract of `forerun/messages.py`, and refuses every plan that breaks it.

Its "KV" is, for each slot of the pool, a digest of all tokens up to that position. A row therefore reads what a real worker would
read, and every page that was shared, reused, evicted or written by mistake shows at once. The next token is a pure function of the
digest and the seed (the oracle, `answer`), so any schedule must give the same streams. Guesses are scribbled over the slots behind the
known tokens, as a real worker does; how many of them are accepted comes from `accept`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from forerun.messages import Admit, Emit, Feed, Finish, Ready, SamplingParams, StepPlan, StepResult

EOS = 0
STEADY = 1000
"""sequences with at least this seed never end by EOS"""
GARBAGE = -1


def digest_after(digest: int, token: int) -> int:
    return hash((digest, token))


def digest_of(tokens: list[int]) -> int:
    digest = 0
    for token in tokens:
        digest = digest_after(digest, token)
    return digest


def pick(digest: int, seed: int, vocab: int) -> int:
    """The token that follows; EOS about once in sixteen, unless the seed is a steady one."""
    mixed = hash((digest, seed, 17))
    return EOS if mixed % 16 == 0 and seed < STEADY else 1 + mixed // 16 % (vocab - 1)


def answer(prompt: list[int], seed: int, max_new_tokens: int, vocab: int) -> tuple[list[int], Finish]:
    """What a sequence must emit, whatever the schedule."""
    digest = digest_of(prompt)
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        tokens.append(pick(digest, seed, vocab))
        digest = digest_after(digest, tokens[-1])
        if tokens[-1] == EOS:
            return tokens, "eos_token"
    return tokens, "length"


def prompt_logprob(tokens: list[int], index: int) -> float:
    return float(digest_of(tokens[: index + 1]) % 1000)


def alternatives(logprobs: list[float]) -> list[list[tuple[int, float]]]:
    return [[(int(value) % 5, value)] for value in logprobs]


def ready(rows: int = 4, pages: int = 16, page_tokens: int = 4, **more: object) -> Ready:
    """A worker's offer with sane small numbers."""
    fields = {"max_nodes": 8, "vocab": 5, "device": "model", "dtype": "none", "drafter": "none"}
    fields |= {"max_tokens": pages * page_tokens, "max_step_tokens": 64, **more}
    return Ready(rows=rows, pages=pages, page_tokens=page_tokens, **fields)  # type: ignore[arg-type]


class Illegal(AssertionError):
    """A plan that the contract forbids."""


@dataclasses.dataclass
class Row:
    tokens: list[int]
    computed: int
    pages: list[int]
    params: SamplingParams
    ended: bool = False


class WorkerModel:
    def __init__(self, ready: Ready, accept: Callable[[int], int] = lambda guess: 0) -> None:
        self.ready = ready
        self.accept = accept
        self.rows: dict[int, Row] = {}
        self.pool = [[GARBAGE] * ready.page_tokens for _ in range(ready.pages)]
        self.step_number = 0
        self.fail_row: int | None = None
        """this row's next feed ends with an error"""
        self.computed_tokens = 0
        """known tokens computed so far, in all rows"""
        self.row_us = 0
        """what a row of a step takes, a guess as long as any; all of them together a millisecond besides"""

    def step(self, plan: StepPlan) -> StepResult:
        # What crosses the ring is a copy; a plan that is changed after it was sent must not change here.
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        self._check(plan.step > self.step_number, "steps are numbered upwards")
        self.step_number = plan.step
        for number in plan.drop:
            self._check(number in self.rows, f"row {number} is dropped but was never admitted")
            del self.rows[number]
        for admit in plan.admit:
            self._admit(admit)
        fed = [feed.row for feed in plan.feed]
        self._check(bool(fed), "a step without work")
        self._check(len(set(fed)) == len(fed), "a row is fed twice")
        self._check({admit.row for admit in plan.admit} <= set(fed), "a row is admitted but not fed")
        known = sum(feed.known for feed in plan.feed)
        self._check(known <= self.ready.max_step_tokens, f"{known} known tokens in a step of {self.ready.max_step_tokens}")
        for feed in plan.feed:
            self._grant(feed)
        emits = [emit for feed in plan.feed if (emit := self._feed(feed)) is not None]
        nodes = sum(feed.guess for feed in plan.feed)
        return StepResult(plan.step, emits, verify_us=1000 + (known + nodes) * self.row_us, rows=known + nodes, nodes=nodes)

    def _check(self, holds: bool, rule: str) -> None:
        if not holds:
            raise Illegal(rule)

    def _admit(self, admit: Admit) -> None:
        name = f"row {admit.row}"
        self._check(0 <= admit.row < self.ready.rows, f"{name} does not exist")
        self._check(admit.row not in self.rows, f"{name} is admitted but was not dropped")
        self._check(admit.computed % self.ready.page_tokens == 0, f"{name}: {admit.computed} computed is not whole pages")
        self._check(0 <= admit.computed < len(admit.tokens), f"{name}: a prefix hit leaves nothing to compute")
        self._check(admit.computed == 0 or not admit.params.prompt_logprobs, f"{name}: prompt log-probabilities after a prefix hit")
        row = Row(list(admit.tokens), admit.computed, list(admit.pages), admit.params)
        self.rows[admit.row] = row
        self._check_pages(admit.row, row)
        self._check_content(admit.row, row)

    def _grant(self, feed: Feed) -> None:
        row = self.rows.get(feed.row)
        self._check(row is not None, f"row {feed.row} is fed but was never admitted")
        assert row is not None
        row.pages += feed.pages
        if not row.ended:
            self._check_pages(feed.row, row)

    def _check_pages(self, number: int, row: Row) -> None:
        self._check(len(set(row.pages)) == len(row.pages), f"row {number} has a page twice")
        self._check(all(0 <= page < self.ready.pages for page in row.pages), f"row {number} has a page that does not exist")

    def _check_content(self, number: int, row: Row) -> None:
        """Everything the row would attend to is what it wrote or shares."""
        digest = 0
        for position in range(row.computed):
            digest = digest_after(digest, row.tokens[position])
            self._check(self._slot(row, position) == digest, f"row {number}: position {position} does not hold its KV")

    def _slot(self, row: Row, position: int) -> int:
        return self.pool[row.pages[position // self.ready.page_tokens]][position % self.ready.page_tokens]

    def _write(self, row: Row, position: int, value: int) -> None:
        self.pool[row.pages[position // self.ready.page_tokens]][position % self.ready.page_tokens] = value

    def _feed(self, feed: Feed) -> Emit | None:
        row = self.rows[feed.row]
        if row.ended:
            return None
        end = row.computed + feed.known
        self._check(feed.known >= 1 and end <= len(row.tokens), f"row {feed.row} has {len(row.tokens)} tokens, fed up to {end}")
        self._check(0 <= feed.guess <= self.ready.max_nodes, f"row {feed.row}: {feed.guess} guesses")
        self._check(feed.guess == 0 or end == len(row.tokens), f"row {feed.row} guesses in the middle of its prompt")
        covered = len(row.pages) * self.ready.page_tokens
        self._check(end + feed.guess <= covered, f"row {feed.row}: {end} + {feed.guess} positions written, pages cover {covered}")
        self._check_exclusive(feed.row, row, end + feed.guess)
        self._check_content(feed.row, row)
        start, row.computed = row.computed, end
        self.computed_tokens += feed.known
        for position in range(start, end):
            self._write(row, position, digest_of(row.tokens[: position + 1]))
        for position in range(end, end + feed.guess):
            self._write(row, position, GARBAGE)
        prompt: list[float] = []
        if row.params.prompt_logprobs:
            indices = range(start + 1, min(end + 1, row.params.prompt_tokens))
            prompt = [prompt_logprob(row.tokens, index) for index in indices]
        if self.fail_row == feed.row:
            self.fail_row = None
            row.ended = True
            return Emit(feed.row, error="injected")
        if end < len(row.tokens):
            return Emit(feed.row, prompt_logprobs=prompt, prompt_top=alternatives(prompt)) if prompt else None
        return msgspec.structs.replace(self._commit(feed, row, prompt), prompt_top=alternatives(prompt))

    def _check_exclusive(self, number: int, row: Row, end: int) -> None:
        """Nobody else has the pages that this row is about to write."""
        written = set(row.pages[row.computed // self.ready.page_tokens : -(-end // self.ready.page_tokens)])
        for other_number, other in self.rows.items():
            if other is not row and not other.ended:
                both = written & set(other.pages)
                self._check(not both, f"row {number} writes pages {both} of row {other_number}")

    def _commit(self, feed: Feed, row: Row, prompt: list[float]) -> Emit:
        params = row.params
        accepted = min(self.accept(feed.guess), feed.guess)
        new: list[int] = []
        finish: Finish = ""
        while len(new) <= accepted and not finish:
            new.append(pick(digest_of(row.tokens + new), params.seed, self.ready.vocab))
            if new[-1] == EOS:
                finish = "eos_token"
            elif len(row.tokens) + len(new) - params.prompt_tokens >= params.max_new_tokens:
                finish = "length"
        row.tokens += new
        for position in range(row.computed, len(row.tokens) - 1):
            self._write(row, position, digest_of(row.tokens[: position + 1]))
        row.computed = len(row.tokens) - 1
        row.ended = bool(finish)
        return Emit(feed.row, new, [float(token) for token in new], [], feed.guess, len(new) - 1, finish, "", prompt)
