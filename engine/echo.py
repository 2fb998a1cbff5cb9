"""A worker's stepper without a model: it answers plans at once, and always the same way.

Owns rows and the bookkeeping of a pool of pages that remembers which *tokens* were written where; knows no tensor library. The next
token is a pure function of the row's tokens so far (and of the seed, when the row samples), so a test can compute any answer in
advance with `answer`, and recovery, batching, chunking and prefix hits can be checked for equality. It is strict: a plan that a real
worker would answer with garbage (a prefix hit on pages that hold something else, known tokens that do not exist, pages that do not
reach) is a `PlanError`. It is also the worker of the load tests: one step of 64 rows costs a fraction of a millisecond.

The ids in `stop_ids` are chosen only in rows whose prompt contains one of them, there every eighth time on average: a test decides
itself whether an answer ends by `eos_token` or by `length`.
"""

from __future__ import annotations

import array
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from forerun.messages import Admit, Emit, Feed, Finish, Inject, Ready, SamplingParams, Start, StepPlan, StepResult

PAGE_TOKENS = 16
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class PlanError(Exception):
    """The front sent a plan that contradicts what this worker knows: a bug of the front."""


def _digest(tokens: Sequence[int], before: int) -> int:
    return zlib.crc32(array.array("I", tokens), before)


def _beginning(params: SamplingParams) -> int:
    return zlib.crc32(params.seed.to_bytes(8, "little")) if params.sample else 0


def _choose(digest: int, vocab: int, stop_ids: tuple[int, ...], may_stop: bool) -> int:
    """The token that follows tokens with this digest."""
    mixed = (digest + 1) * _MIX & _MASK
    if may_stop and mixed >> 61 == 0:
        return stop_ids[0]
    token = (mixed >> 29) % vocab
    while token in stop_ids:
        token = (token + 1) % vocab
    return token


def logprob(token: int) -> float:
    """The log-probability that is reported for a token, whatever comes before it; exact in float32."""
    return -(1 + token % 31) / 32


def answer(prompt: Sequence[int], params: SamplingParams, vocab: int) -> list[int]:
    """All tokens that a row with this prompt will emit, computed without rows, pages and steps."""
    tokens = list(prompt)
    may_stop = not set(params.stop_ids).isdisjoint(prompt)
    while len(tokens) - len(prompt) < params.max_new_tokens:
        tokens.append(_choose(_digest(tokens, _beginning(params)), vocab, params.stop_ids, may_stop))
        if tokens[-1] in params.stop_ids:
            break
    return tokens[len(prompt) :]


class _Row:
    __slots__ = ("computed", "digest", "may_stop", "pages", "params", "tokens")

    def __init__(self, admit: Admit) -> None:
        self.params = admit.params
        self.tokens = list(admit.tokens)
        self.pages = list(admit.pages)
        self.computed = admit.computed
        self.digest = _digest(self.tokens, _beginning(self.params))
        prompt = self.tokens[: self.params.prompt_tokens]
        self.may_stop = not set(self.params.stop_ids).isdisjoint(prompt)


class Echo:
    """The stepper. Page sizes and limits come from `Start`; the vocabulary from the model folder's config.json, if there is one."""

    def __init__(self, start: Start) -> None:
        config = _model_config(Path(start.model_id))
        pages = max(2, -(-(start.max_pool_tokens or 1 << 18) // PAGE_TOKENS))
        longest = config.get("max_position_embeddings", 1 << 17)
        self.ready = Ready(
            rows=start.max_rows,
            pages=pages,
            page_tokens=PAGE_TOKENS,
            max_nodes=start.speculate,
            vocab=config.get("vocab_size", 32000),
            device="echo",
            dtype="none",
            drafter="echo" if start.speculate else "none",
            max_tokens=min(start.max_total_tokens or longest, longest),
            max_step_tokens=start.max_step_tokens or 4096,
            step_seconds=(1e-4, 1e-3),
            memory={"kv": 0},
        )
        self._rows: dict[int, _Row] = {}
        self._pool: list[list[int]] = [[-1] * PAGE_TOKENS for _ in range(pages)]
        self._fail_at = 0

    resting = False

    def rest(self, wanted: Callable[[], bool]) -> None:
        return None

    def step(self, plan: StepPlan) -> StepResult:
        for dropped in plan.drop:
            self._rows.pop(dropped, None)
        for admit in plan.admit:
            self._admit(admit)
        emits: list[Emit] = []
        nodes = 0
        for feed in plan.feed:
            row = self._rows.get(feed.row)
            if row is None:
                continue
            nodes += feed.guess
            emit = self._feed(row, feed)
            if emit is not None:
                emits.append(emit)
                if emit.finish or emit.error:
                    del self._rows[feed.row]
        return StepResult(plan.step, emits, rows=len(emits), nodes=nodes)

    def inject(self, message: Inject) -> None:
        """`fail`: the row that next reaches `value` generated tokens ends with an error."""
        if message.kind == "fail":
            self._fail_at = int(message.value)

    def _admit(self, admit: Admit) -> None:
        if admit.row in self._rows:
            raise PlanError(f"row {admit.row} is admitted while it is still running")
        if not 0 <= admit.row < self.ready.rows:
            raise PlanError(f"row {admit.row} does not exist, there are {self.ready.rows}")
        if not 0 <= admit.computed < len(admit.tokens) or admit.computed % PAGE_TOKENS:
            raise PlanError(f"row {admit.row}: {admit.computed} tokens computed of {len(admit.tokens)}, pages of {PAGE_TOKENS}")
        for index in range(admit.computed // PAGE_TOKENS):
            page = admit.pages[index]
            if self._pool[page] != admit.tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]:
                raise PlanError(f"row {admit.row}: page {page} does not hold the tokens from {index * PAGE_TOKENS} on")
        self._rows[admit.row] = _Row(admit)

    def _feed(self, row: _Row, feed: Feed) -> Emit | None:
        row.pages += feed.pages
        start, end = row.computed, row.computed + feed.known
        if feed.known < 1 or end > len(row.tokens):
            raise PlanError(f"row {feed.row}: fed up to token {end}, but it has {len(row.tokens)}")
        if end > len(row.pages) * PAGE_TOKENS:
            raise PlanError(f"row {feed.row}: fed up to token {end}, but its {len(row.pages)} pages do not reach that far")
        for position in range(start, end):
            self._pool[row.pages[position // PAGE_TOKENS]][position % PAGE_TOKENS] = row.tokens[position]
        row.computed = end
        params = row.params
        prompt: list[float] = []
        if params.prompt_logprobs and start + 1 < params.prompt_tokens:
            prompt = [logprob(token) for token in row.tokens[start + 1 : min(end + 1, params.prompt_tokens)]]
        if end < len(row.tokens):
            return Emit(feed.row, prompt_logprobs=prompt) if prompt else None
        return self._pick(row, feed, prompt)

    def _pick(self, row: _Row, feed: Feed, prompt: list[float]) -> Emit:
        """Commit one token, and before it as many guesses as the digest says were right."""
        params = row.params
        accepted = row.digest % (feed.guess + 1)
        new: list[int] = []
        finish: Finish = ""
        while len(new) <= accepted and not finish:
            token = _choose(row.digest, self.ready.vocab, params.stop_ids, row.may_stop)
            new.append(token)
            row.digest = zlib.crc32(token.to_bytes(4, "little"), row.digest)
            if len(row.tokens) + len(new) - params.prompt_tokens >= params.max_new_tokens:
                finish = "length"
            elif token in params.stop_ids:
                finish = "eos_token"
        accepted = len(new) - 1
        row.tokens += new
        row.computed += accepted
        if self._fail_at and len(row.tokens) - params.prompt_tokens >= self._fail_at:
            self._fail_at = 0
            return Emit(feed.row, error="a fault was injected into this row")
        for position in range(row.computed - accepted, row.computed):
            self._pool[row.pages[position // PAGE_TOKENS]][position % PAGE_TOKENS] = row.tokens[position]
        return Emit(
            feed.row,
            new,
            [logprob(token) for token in new] if params.logprobs else [],
            [self._top(token, params.top_n) for token in new] if params.top_n else [],
            feed.guess,
            accepted,
            finish,
            "",
            prompt,
        )

    def _top(self, token: int, count: int) -> list[tuple[int, float]]:
        return [((token + i) % self.ready.vocab, logprob(token) - i / 2) for i in range(count)]


def _model_config(folder: Path) -> dict[str, int]:
    """config.json of the model folder, or nothing: a load test needs no model."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    config: dict[str, int] = json.loads(file.read_text())
    return config
