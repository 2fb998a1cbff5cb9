"""A tiny model and a tiny front for engine tests: two layers of random weights over the real ops, and plans made by hand."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import llguidance
import torch

from forerun.backends.base import AttentionSpec, Backend, Draws, Ops, Picks, Pool, PoolSpec, Weight
from forerun.backends.registry import open_backend
from forerun.engine.batch import Batch
from forerun.engine.drafters.draft import Draft, Drafter, Place, Silent
from forerun.engine.drafters.speculator import Speculator
from forerun.engine.engine import Engine
from forerun.engine.grammar import Grammars, Threads
from forerun.engine.models.model import Output, Shared
from forerun.engine.rows import RowTable
from forerun.engine.sampler import Sampler
from forerun.messages import Admit, Emit, Feed, Ready, SamplingParams, StepPlan

VOCAB = 97
LONGEST = 160
ROWS = 16
PAGES = 120
NODES = 24


@dataclasses.dataclass(eq=False)
class TinyHead:
    """A `Head`. `chosen`: how many choices it made; `made`: of how many logits it was asked."""

    ops: Ops
    weight: Weight
    chosen: int = 0
    made: int = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.made += 1
        return self.ops.logits(hidden, self.weight)

    def choose(self, hidden: torch.Tensor, draws: Draws) -> Picks:
        self.chosen += 1
        return self.ops.choose(hidden, self.weight, draws)


STOP = VOCAB - 1
"""the token that ends an answer which follows a grammar"""


class Alphabet:
    """A tokenizer for grammars over the tiny vocabulary: printable ASCII (95 tokens), one token of two characters, and STOP."""

    eos_token_id, bos_token_id, special_token_ids = STOP, None, (STOP,)
    tokens = (*(bytes([code]) for code in range(32, 127)), b'{"', b"")

    def __call__(self, text: bytes) -> list[int]:
        found = []
        while text:
            token = self.tokens.index(text[:2]) if text[:2] in self.tokens[:STOP] else self.tokens.index(text[:1])
            found.append(token)
            text = text[len(self.tokens[token]) :]
        return found


class AtOnce(Executor):
    """Does every job where it is given, so that no row ever waits: nothing then depends on time."""

    def submit(self, job: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(job(*args, **named))
        except Exception as error:
            done.set_exception(error)
        return done


@functools.cache
def tables() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Alphabet()), eos_token=STOP)


@functools.cache
def tiny_grammars() -> Grammars:
    return Grammars(tables, Threads(AtOnce(), AtOnce()))


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(Alphabet.tokens[token] for token in tokens).decode()


class TinyModel:
    """A decoder of two layers, hidden size 32. `format`: of its matrices, "" = as `dtype`; `kv`: the pool's type, None = `dtype`."""

    vocab, hidden, width, layers, max_tokens, weight_bytes, dtype = VOCAB, 32, 400, 2, LONGEST, 1 << 16, "float32"

    def __init__(
        self, backend: Backend, seed: int = 0, dtype: torch.dtype = torch.float32, format: str = "", kv: torch.dtype | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.pool = PoolSpec(2, 1, 16, kv or dtype)
        self.facts: dict[str, str] = {}
        self.ops = backend.ops
        self.spec = AttentionSpec(2, 1, 16, 0.25)
        format = format or ("f32" if dtype == torch.float32 else "bf16")
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.table = draw(VOCAB, 32).to(dtype)
        self.raw = [[draw(*shape) * 0.25 for shape in ((64, 32), (32, 32), (96, 32), (32, 48))] for _ in range(self.layers)]
        self.raw_head = draw(VOCAB, 32) * 0.6
        self.blocks = [tuple(backend.pack(matrix, format) for matrix in block) for block in self.raw]
        self.head = backend.pack(self.raw_head, format)
        self.end = TinyHead(self.ops, self.head)
        self.ones = torch.ones(32)
        angles = torch.outer(torch.arange(LONGEST + 64).float(), 1e4 ** (-torch.arange(8) / 8))
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, batch: Batch, pool: Pool, taps: tuple[int, ...] = ()) -> Output:
        ops, spec = self.ops, self.spec
        residual = ops.embed(self.table, batch.tokens)
        x = ops.norm(residual, self.ones, 1e-5)
        tapped = {-1: residual}
        for layer, (qkv_weight, out, gate_up, down) in enumerate(self.blocks):
            qkv = ops.rope(ops.matmul(x, qkv_weight), batch.positions, self.cos, self.sin, spec)
            ops.write_kv(qkv, pool, layer, batch.slots, spec)
            x, residual = ops.add_norm(ops.matmul(ops.attention(qkv, pool, layer, batch, spec), out), residual, self.ones, 1e-5)
            x, residual = ops.add_norm(ops.matmul(ops.gate(ops.matmul(x, gate_up), "silu"), down), residual, self.ones, 1e-5)
            tapped[layer] = residual
        tapped[self.layers] = x
        hidden = ops.take(x, batch.logit_rows)
        return Output(None, ops.concat([tapped[tap] for tap in taps]) if taps else None, hidden, self.end)

    def shared(self) -> Shared:
        return Shared(self.table, 1.0, self.head, norm=self.ones, eps=1e-5)


class Watched:
    """The backend, but what it captures is counted in `calls` (rows, logit rows) and may be spoilt by `spoil(batch, logits)`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.calls: list[tuple[int, int]] = []
        self.spoil: Callable[[Batch, torch.Tensor], None] | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def capture(self, function: Callable[[Batch], Output], example: Batch | None) -> Callable[[Batch], Output]:
        captured = self._backend.capture(function, example)

        def watched(batch: Batch) -> Output:
            output: Output = captured(batch)
            self.calls.append((batch.rows, batch.logit_rows.shape[0]))
            if self.spoil is not None:
                self.spoil(batch, output.logits)
            return output

        return watched


def tiny_engine(
    drafter: Drafter | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    format: str = "",
    kv: torch.dtype | None = None,
    step_nodes: int = ROWS * NODES,
    grammars: Grammars | None = None,
) -> Engine:
    backend = Watched(open_backend("cpu", 1))
    model = TinyModel(backend, seed, dtype, format, kv)
    size = backend.caps.page_tokens
    ready = Ready(ROWS, PAGES, size, NODES, VOCAB, backend.name, model.dtype, "none", LONGEST, 64)
    rows = RowTable(ROWS, LONGEST, NODES, VOCAB, size, grammars or tiny_grammars())
    drafter = drafter or Silent()
    drafter.needs.attach(Place(tuple(backend.pool(spec, PAGES) for spec in drafter.needs.pools), rows.table, ROWS, LONGEST))
    nodes = min(NODES, drafter.needs.most or NODES)  # as a worker asks for no more than the drafter makes
    speculator = Speculator(drafter, VOCAB, LONGEST, nodes, step_nodes)
    return Engine(ready, backend, model, backend.pool(model.pool, PAGES), rows, Sampler(backend.ops, VOCAB, 0.5, 2.0), speculator)


@dataclasses.dataclass(eq=False)
class Sequence_:
    """A request as the tests' front sees it, and what came back for it. Equal to no other, whatever they have in common."""

    prompt: list[int]
    params: SamplingParams
    row: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    finish: str = ""
    error: str = ""
    drafted: int = 0
    accepted: int = 0

    @property
    def answer(self) -> tuple[object, ...]:
        """All that must not depend on batch, chunks, guesses or accidents."""
        return self.tokens, self.logprobs, self.top, self.finish, self.error

    @property
    def over(self) -> bool:
        return bool(self.finish or self.error)

    @property
    def all(self) -> list[int]:
        return self.prompt + self.tokens


class Front:
    """Admits, feeds and drops by hand, one plan a step. Owns the pages."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.free_pages = list(range(engine.ready.pages))
        self.users = [0] * engine.ready.pages
        self.free_rows = list(range(engine.ready.rows))
        self.running: list[Sequence_] = []
        self.steps = itertools.count(1)
        self._admits: list[Admit] = []
        self._drops: list[int] = []

    def admit(self, sequence: Sequence_, shared: Sequence[int] = ()) -> None:
        """`shared`: pages that hold the first len(shared) · P tokens already."""
        size = self.engine.ready.page_tokens
        sequence.row = self.free_rows.pop(0)
        sequence.pages = list(shared)
        for page in shared:
            self.users[page] += 1
        sequence.computed = len(shared) * size
        self._admits.append(Admit(sequence.row, sequence.all, sequence.computed, list(shared), sequence.params))
        self.running.append(sequence)

    def leave(self, sequence: Sequence_) -> None:
        """Preempt or drop it."""
        self.running.remove(sequence)
        unsent = [admit for admit in self._admits if admit.row == sequence.row]
        if unsent:
            self._admits.remove(unsent[0])
        else:
            self._drops.append(sequence.row)
        self._release(sequence)

    def _release(self, sequence: Sequence_) -> None:
        self.free_rows.append(sequence.row)
        for page in sequence.pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free_pages.append(page)
        sequence.pages = []

    def step(self, shares: dict[int, int] | None = None, guess: int = 0, price: float = 0.0) -> list[Emit]:
        """One plan. `shares`: known tokens for each running sequence (by place in `running`); all that is left when not given."""
        size, feeds, fed = self.engine.ready.page_tokens, [], []
        for place, sequence in enumerate(self.running):
            left = len(sequence.all) - sequence.computed
            known = left if shares is None else min(left, shares.get(place, 0))
            if not known:
                continue
            most = guess if known == left else 0
            need = -(-(sequence.computed + known + most) // size) - len(sequence.pages)
            granted = [self.free_pages.pop(0) for _ in range(max(0, need))]
            for page in granted:
                self.users[page] += 1
            sequence.pages += granted
            feeds.append(Feed(sequence.row, known, most, granted))
            fed.append((sequence, known))
        return self._send(feeds, fed, budget=guess * len(feeds), price=price)

    def _send(self, feeds: list[Feed], fed: list[tuple[Sequence_, int]], **terms: Any) -> list[Emit]:
        """A plan with these terms, and what came of it. `fed`: the known tokens of each sequence."""
        plan = StepPlan(next(self.steps), self._admits, feeds, self._drops, **terms)
        self._admits, self._drops = [], []
        result = self.engine.step(plan)
        for sequence, known in fed:
            sequence.computed = min(sequence.computed + known, len(sequence.all) - 1)
        by_row = {sequence.row: sequence for sequence in self.running}
        for emit in result.emit:
            self._hear(by_row[emit.row], emit)
        return result.emit

    def _hear(self, sequence: Sequence_, emit: Emit) -> None:
        sequence.tokens += emit.tokens
        sequence.logprobs += emit.logprobs
        sequence.top += emit.top
        sequence.prompt_logprobs += emit.prompt_logprobs
        sequence.prompt_top += emit.prompt_top
        sequence.drafted += emit.drafted
        sequence.accepted += emit.accepted
        sequence.finish, sequence.error = emit.finish, emit.error
        if emit.tokens:
            sequence.computed = len(sequence.all) - 1
        if sequence.over:
            self.running.remove(sequence)
            self._release(sequence)

    def run(self, guess: int = 0, steps: int = 1000) -> None:
        while self.running and steps:
            self.step(guess=guess)
            steps -= 1
        assert not self.running


def alone(prompt: list[int], params: SamplingParams, **engine: object) -> Sequence_:
    """The plain answer: one row, one prompt chunk, no guesses."""
    sequence = Sequence_(prompt, params)
    front = Front(tiny_engine(**engine))  # type: ignore[arg-type]
    front.admit(sequence)
    front.run()
    return sequence


def params_for(prompt: list[int], **changes: object) -> SamplingParams:
    fields: dict[str, object] = {"seed": 11, "prompt_tokens": len(prompt), "max_new_tokens": 24, **changes}
    return SamplingParams(**fields)  # type: ignore[arg-type]


def random_tree(generator: torch.Generator, nodes: int, vocab: int, likely: Sequence[int] = ()) -> Draft:
    """Any tree at all: random parents, tokens of which some are `likely`, duplicate siblings included."""
    token, parent = [], []
    for i in range(nodes):
        parent.append(int(torch.randint(-1, i, (1,), generator=generator)) if i else -1)
        use = likely and bool(torch.rand(1, generator=generator) < 0.6)
        token.append(
            likely[int(torch.randint(len(likely), (1,), generator=generator))]
            if use
            else int(torch.randint(vocab, (1,), generator=generator))
        )
    return Draft(token, parent, [0.5] * nodes, [False] * nodes)
