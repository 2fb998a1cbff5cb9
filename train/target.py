"""The target as a writer: many texts at once, each the same whatever it is written beside.

Continuous batching without a front: a row is filled the moment it is free. Each row owns a run of pages, so there is nothing to
allocate. A text depends on its job alone (the model is batch invariant and the dice are those of `forerun/dice.md`), which is what
makes a resumed run write what an uninterrupted one would have. Knows nothing of drafts or of what the texts are for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.backends.registry import open_backend
from forerun.engine.batch import build
from forerun.engine.models.load import load_model
from forerun.engine.rows import RowTable, Share
from forerun.kernels.dice import signed
from forerun.messages import Admit, Feed, SamplingParams, Start, StepPlan

CHOICES = 64
"""a sampled token is one of so many most likely ones"""
STEP_TOKENS = 1024
"""prompt tokens of a step after which no further prompt is begun"""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A text to be written. `seed` throws its dice; without `sample` it is greedy. `limit`: most generated tokens. `states`: those that the
    target has while it writes are wanted."""

    number: int
    prompt: list[int]
    limit: int
    sample: bool
    seed: int
    states: bool = False


@dataclasses.dataclass(slots=True)
class Written:
    """What was written so far. `tokens`: generated ids; `candidates`, `logprobs`: for each of them, what was most likely; `states`: pieces
    of what the target thought while it read all tokens but the newest, bfloat16 [tokens, layers · hidden], where the job wants them and the
    target has `layers`."""

    job: Job
    tokens: list[int] = dataclasses.field(default_factory=list)
    candidates: list[NDArray[np.uint32]] = dataclasses.field(default_factory=list)
    logprobs: list[NDArray[np.float16]] = dataclasses.field(default_factory=list)
    states: list[Tensor] = dataclasses.field(default_factory=list)


class Target:
    """`rows`: texts side by side; `longest`: most tokens of a text, prompt included; `width`: candidates kept at each place; `layers`:
    whose hidden states are kept, in this order."""

    def __init__(self, start: Start, rows: int, longest: int, width: int, layers: Sequence[int] = ()) -> None:
        self._backend = open_backend(start.device, start.threads, start.memory_fraction)
        self._model = load_model(start, self._backend, lambda stage, done, total: None)
        self.vocab = self._model.vocab
        self.longest = min(longest, self._model.max_tokens)
        self.stops = stop_ids(Path(start.model_id))
        if beyond := [layer for layer in layers if not -1 <= layer <= self._model.layers]:
            raise ValueError(
                f"the target has no layer {beyond[0]}: it has 0 to {self._model.layers}, the last of them is the final norm, and -1 is "
                "what the first one reads"
            )
        self._rows = rows
        self._width = min(width, self.vocab)
        self._pages = -(-self.longest // self._backend.caps.page_tokens)
        pool = self._backend.pool(self._model.pool, rows * self._pages)
        self._table = RowTable(rows, self.longest, 0, self.vocab, self._backend.caps.page_tokens)
        self._run = self._backend.capture(lambda batch: self._model.forward(batch, pool, tuple(layers)), None)

    def write(self, next_job: Callable[[], Job | None]) -> Iterator[Written]:
        """Texts as they are finished. `next_job` is asked whenever there is room; None means nothing to do for now, and ends the writing
        once no text is under way."""
        running: dict[int, Written] = {}
        with torch.inference_mode():
            while True:
                plan = StepPlan(0, *self._admissions(running, next_job))
                if not running:
                    return
                admitted = {admit.row for admit in plan.admit}
                plan.feed.extend(Feed(row, 1) for row in running if row not in admitted)
                shares, errors, _ = self._table.apply(plan)
                if errors:
                    raise ValueError(errors[0].error)
                yield from self._step(shares, running)

    def _admissions(self, running: dict[int, Written], next_job: Callable[[], Job | None]) -> tuple[list[Admit], list[Feed]]:
        admits: list[Admit] = []
        feeds: list[Feed] = []
        tokens = 0
        for row in range(self._rows):
            if row in running or tokens >= STEP_TOKENS:
                continue
            job = next_job()
            if job is None:
                break
            running[row] = Written(job)
            limit = min(job.limit, self.longest - len(job.prompt))
            params = SamplingParams(job.seed, len(job.prompt), limit, sample=job.sample, stop_ids=self.stops)
            admits.append(Admit(row, job.prompt, 0, list(range(row * self._pages, (row + 1) * self._pages)), params))
            feeds.append(Feed(row, len(job.prompt)))
            tokens += len(job.prompt)
        return admits, feeds

    def _step(self, shares: list[Share], running: dict[int, Written]) -> Iterator[Written]:
        output = self._run(build(shares, self._table.table, self._backend.device))
        if output.taps is not None:
            for share, states in zip(shares, torch.split(output.taps, [share.known for share in shares])):
                text = running[share.row.number]
                if text.job.states:
                    text.states.append(states.to("cpu", torch.bfloat16, copy=True))  # a part would keep the whole step's
        logits = output.logits
        values, ids = torch.topk(logits, min(CHOICES, self.vocab))
        places = self._picks(shares, values, ids).tolist()
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[:, : self._width]).half().cpu().numpy()
        ids = ids.cpu()
        candidates = ids[:, : self._width].numpy().astype(np.uint32)
        for i, share in enumerate(shares):
            row = share.row
            token = int(ids[i, places[i]])
            text = running[row.number]
            text.tokens.append(token)
            text.candidates.append(candidates[i])
            text.logprobs.append(logprobs[i])
            row.commit([token], row.computed + share.known)
            if row.generated >= row.params.max_new_tokens or token in row.params.stop_ids:
                self._table.end(row.number)
                yield running.pop(row.number)

    def _picks(self, shares: list[Share], values: Tensor, ids: Tensor) -> Tensor:
        """Which of the candidates each row takes: the first, or where it samples (temperature 1) the one with the luckiest dice."""
        places = torch.zeros(len(shares), dtype=torch.int64)
        sampled = [i for i, share in enumerate(shares) if share.row.params.sample]
        if sampled:
            count = ids.shape[1]
            rows = [shares[i].row for i in sampled]
            seeds = torch.tensor([signed(row.params.seed) for row in rows]).repeat_interleave(count)
            indices = torch.tensor([row.generated for row in rows]).repeat_interleave(count)
            noise = self._backend.ops.noise_at(seeds, indices, ids[sampled].flatten()).view(len(sampled), count)
            places[sampled] = (values[sampled] + noise).argmax(-1)
        return places


def stop_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer, from generation_config.json or config.json. ValueError when neither names one."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    raise ValueError(f"{folder} does not say which token ends an answer: add eos_token_id to its config.json")
