"""The row table: what a worker knows of every running sequence, and how a plan changes it.

Owns the token ids, the computed length, the pages and the sampling state of each row; the only place that mutates them. Knows nothing
of models, tensors or text. A row lives from its admission until it is dropped, finishes or fails; what is fed to a row that is gone
is ignored, because the front plans ahead.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from forerun.engine.drafters.draft import Draft
from forerun.engine.grammar import Grammars, Matching
from forerun.engine.kv import Table
from forerun.messages import Admit, Emit, Feed, SamplingParams, StepPlan


class Counts:
    """How often each token id occurs in a sequence, as two parallel arrays that numpy can index with. `push` and `pop` are inverse, so
    the counts at a guessed node are those of the row with the node's path pushed for the moment."""

    def __init__(self, tokens: list[int]) -> None:
        ids, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
        self._ids: NDArray[np.int64] = ids
        self._counts: NDArray[np.float32] = counts.astype(np.float32)
        self._used = len(ids)
        self._place = {token: place for place, token in enumerate(ids.tolist())}
        self.length = len(tokens)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct ids."""
        return self._ids[: self._used]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Occurrences of each of `ids`."""
        return self._counts[: self._used]

    def push(self, token: int) -> None:
        place = self._place.get(token)
        if place is None:
            if self._used == len(self._ids):
                self._ids = np.resize(self._ids, 2 * self._used + 16)
                self._counts = np.resize(self._counts, 2 * self._used + 16)
            place = self._place[token] = self._used
            self._ids[place], self._counts[place] = token, 0.0
            self._used += 1
        self._counts[place] += 1.0
        self.length += 1

    @contextlib.contextmanager
    def ahead(self, path: Sequence[int]) -> Iterator[None]:
        """As if the path had been generated."""
        for token in path:
            self.push(token)
        try:
            yield
        finally:
            for token in reversed(path):
                self.pop(token)

    def pop(self, token: int) -> None:
        """Undo the newest push, which was of `token`."""
        place = self._place[token]
        self._counts[place] -= 1.0
        self.length -= 1
        if not self._counts[place]:
            del self._place[token]
            self._used -= 1


@dataclasses.dataclass(eq=False, slots=True)
class Row:
    """One running sequence. `computed` of its `tokens` have KV; after every pick that is all but the newest."""

    number: int
    params: SamplingParams
    tokens: list[int]
    computed: int
    counts: Counts | None
    """kept only where a penalty reads it"""
    plain: bool
    """its token is the argmax of the raw logits and nothing but its log-probability is reported"""
    drawn: bool = False
    """its token is drawn from all of the vocabulary by the raw logits over a temperature, and nothing but its log-probability there is
    reported"""
    heard: int = 0
    """tokens that the drafter has absorbed"""
    cold: bool = False
    """the drafter failed on this row: no more guesses for it"""
    scope: str = ""
    """rows of equal scope may profit from each other's answers when they guess"""
    said: Counts | None = None
    """counts of the generated tokens alone, where a penalty reads them"""
    matching: Matching | None = None
    """reads what is generated, where it must follow a grammar"""

    @classmethod
    def open(
        cls,
        number: int,
        params: SamplingParams,
        tokens: list[int],
        computed: int = 0,
        scope: str = "",
        matching: Matching | None = None,
    ) -> Row:
        """The list of tokens becomes the row's own."""
        penalised = params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0
        discouraged = params.presence_penalty != 0.0 or params.count_penalty != 0.0
        raw = not (penalised or discouraged or params.logit_bias or params.watermark or params.top_n or matching)
        narrow = params.top_k or params.top_p < 1.0 or params.typical_p < 1.0
        plain = raw and not params.sample
        drawn = bool(raw and params.sample and not narrow and not (params.raw_logprobs and params.logprobs))
        counts = Counts(tokens) if penalised else None
        said = Counts(tokens[params.prompt_tokens :]) if discouraged else None
        return cls(number, params, tokens, computed, counts, plain, drawn, scope=scope, said=said, matching=matching)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.params.prompt_tokens

    def commit(self, tokens: list[int], computed: int) -> None:
        first = len(self.tokens)
        self.tokens += tokens
        self.computed = computed
        if self.counts is not None:
            for token in tokens:
                self.counts.push(token)
        if self.said is not None:
            for token in tokens[max(0, self.params.prompt_tokens - first) :]:
                self.said.push(token)
        if self.matching is not None and tokens:
            self.matching.commit(tokens)


@dataclasses.dataclass(eq=False, slots=True)
class Share:
    """A row's part of a step: `known` tokens from `row.computed` on, then the nodes of `draft`, of which there may be `guess`."""

    row: Row
    known: int
    guess: int
    draft: Draft
    prompt_logprobs: list[float]
    expected: float = 0.0
    """nodes of the draft that are believed to hold"""
    accepted: Sequence[int] = ()
    """nodes of the draft that held"""
    prompt_top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)

    @property
    def ends(self) -> bool:
        """The known tokens reach the end of what the row knows: a token is picked."""
        return self.row.computed + self.known == len(self.row.tokens)

    @property
    def echoed(self) -> bool:
        """The known tokens are of a prompt whose log-probabilities are asked for, and some of it comes behind the first of them."""
        return self.row.params.prompt_logprobs and self.row.computed + 1 < self.row.params.prompt_tokens

    @property
    def scored(self) -> int:
        """How many of the known rows, counted from the last, need logits."""
        return self.known if self.echoed else int(self.ends)


class RowTable:
    """All rows, and the page table beside them. `longest`: most tokens of a sequence; `nodes`: most guesses that are written behind
    them; `vocab`: token ids are below it. `grammars`: None = no row may have one."""

    def __init__(self, rows: int, longest: int, nodes: int, vocab: int, page_tokens: int, grammars: Grammars | None = None) -> None:
        self.table = Table(rows, longest + nodes, page_tokens)
        self.longest = longest
        self._vocab = vocab
        self._grammars = grammars
        self._rows: list[Row | None] = [None] * rows

    def __repr__(self) -> str:
        return f"{sum(row is not None for row in self._rows)} of {len(self._rows)} rows, {sum(self.table.granted)} pages"

    @property
    def empty(self) -> bool:
        return not any(self._rows)

    def apply(self, plan: StepPlan) -> tuple[list[Share], list[Emit], list[Row]]:
        """Drops, then admissions, then feeds. Returns the shares of this step in the plan's order, an error for each row whose part of the
        plan makes no sense, and the rows that are gone."""
        gone = [row for number in plan.drop if (row := self.end(number)) is not None]
        errors: list[Emit] = []
        for admit in plan.admit:
            try:
                self._admit(admit)
            except ValueError as error:
                errors.append(Emit(admit.row, error=f"the worker cannot admit this sequence: {error}"))
                if (row := self.end(admit.row)) is not None:
                    gone.append(row)
        shares: list[Share] = []
        for feed in plan.feed:
            row = self._rows[feed.row]
            if row is None:
                continue
            try:
                shares.append(self._feed(row, feed))
            except ValueError as error:
                errors.append(Emit(feed.row, error=f"the worker cannot feed this sequence: {error}"))
                self.end(feed.row)
                gone.append(row)
        return shares, errors, gone

    def end(self, number: int) -> Row | None:
        """The row leaves; None when it has left already."""
        row = self._rows[number]
        self._rows[number] = None
        self.table.clear(number)
        if row is not None and row.matching is not None:
            row.matching.close()
        return row

    def _admit(self, admit: Admit) -> None:
        params, count, size = admit.params, len(admit.tokens), self.table.page_tokens
        if self._rows[admit.row] is not None:
            raise ValueError(f"row {admit.row} is still running")
        if not 0 <= admit.computed < count or admit.computed % size:
            raise ValueError(f"{admit.computed} of its {count} tokens are said to be computed, with pages of {size}")
        if not 0 < params.prompt_tokens <= count or count - params.prompt_tokens >= params.max_new_tokens:
            raise ValueError(f"{count} tokens, {params.prompt_tokens} of them prompt, at most {params.max_new_tokens} generated")
        if count > self.longest:
            raise ValueError(f"{count} tokens, {self.longest} are the most")
        if min(admit.tokens) < 0 or max(admit.tokens) >= self._vocab:
            raise ValueError(f"a token id lies outside the vocabulary of {self._vocab}")
        if any(not 0 <= token < self._vocab for token, _ in params.logit_bias):
            raise ValueError(f"a biased token id lies outside the vocabulary of {self._vocab}")
        if admit.adapter is not None:
            raise ValueError(f"adapter {admit.adapter!r} is not loaded")
        self.table.clear(admit.row)
        self.table.grant(admit.row, admit.pages)
        # The last thing that may fail: a matcher of a row that is not admitted would never be given back.
        matching = self._matching(params, admit.tokens[params.prompt_tokens :]) if params.grammar else None
        self._rows[admit.row] = Row.open(admit.row, params, list(admit.tokens), admit.computed, admit.adapter or "", matching)

    def _matching(self, params: SamplingParams, generated: Sequence[int]) -> Matching:
        if self._grammars is None:
            raise ValueError("it has no grammars")
        return self._grammars.open(params, generated)

    def _feed(self, row: Row, feed: Feed) -> Share:
        if feed.pages:
            self.table.grant(row.number, feed.pages)
        end = row.computed + feed.known
        if feed.known < 1 or end > len(row.tokens):
            raise ValueError(f"fed up to token {end}, it has {len(row.tokens)}, {row.computed} computed")
        if end > self.table.reach(row.number):
            raise ValueError(f"fed up to token {end}, its pages reach to {self.table.reach(row.number)}")
        return Share(row, feed.known, feed.guess, Draft.none(), [])
