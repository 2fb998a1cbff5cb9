"""From `Start` to an engine that is ready: open the device, load the model, plan the memory, warm up, measure.

The memory plan comes before the pool is made and is kept to afterwards: weights are loaded, activations of the largest step are
reserved, head room is left, and what remains (or what all rows could ever use, if that is less) becomes the KV pool. Knows no device
and no architecture.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from forerun.backends.base import Backend
from forerun.backends.registry import open_backend
from forerun.engine.drafters.draft import Drafter, Needs, Place
from forerun.engine.drafters.layouts import find_heads
from forerun.engine.drafters.registry import AUTO, Host, Setting, open_drafter
from forerun.engine.drafters.speculator import Speculator
from forerun.engine.engine import PROMPT_ROWS, Engine
from forerun.engine.errors import StartError
from forerun.engine.grammar import Grammars, tables
from forerun.engine.models.load import find, load_model
from forerun.engine.models.model import Model
from forerun.engine.profile import Profiler, Script, scratch_pages
from forerun.engine.rejection import Rejection
from forerun.engine.rows import RowTable
from forerun.engine.sampler import Sampler
from forerun.engine.verify import follow
from forerun.messages import NO_GRAMMARS, Admit, Feed, Ready, SamplingParams, Start, StepPlan

log = logging.getLogger(__name__)

ReportProgress = Callable[[str, int, int], None]

HEAD_ROOM = 500 << 20
"""bytes left alone: interpreter, allocator, the front beside us"""
STEP_TOKENS = 2048
"""known tokens of a step when nothing is asked for"""
STEP_NODES = 128
"""Guessed nodes of a step, unless one row alone may have more: each needs room for its logits, and where steps get longer with their rows
(everywhere, before that) so many never pay."""
ROW_COPIES = 3
"""A recorded forward keeps its memory, with half as much room again: one for steps with logits and one for steps without."""
SHARED_PART = 0.5
"""how much of memory that other programs use too an unasked-for pool may take"""
SHORTEST = 256
"""tokens of a sequence below which a server is of no use"""
ROOM_CURE = "give more memory, or lower --max-total-tokens, or ask for it by name if its guesses are worth shorter sequences"
PATIENCE_SECONDS = 2.0
"""a warm-up step slower than this is the last; longer ones are extrapolated"""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What fits. `longest`: tokens of a sequence; `nodes`: guesses of a row; `step_nodes`: of all rows in a step; bytes in `memory`."""

    rows: int
    longest: int
    step_tokens: int
    nodes: int
    step_nodes: int
    pages: int
    memory: dict[str, int]


def build_engine(start: Start, progress: ReportProgress) -> Engine:
    """StartError (with its cure) when the model cannot be served as asked."""
    try:
        backend = open_backend(start.device, start.threads, start.memory_fraction)
    except ValueError as wrong:
        raise StartError(str(wrong), "see `forerun doctor` for what this machine offers") from wrong
    grammars = Grammars(functools.partial(tables, start.tokenizer))
    model = load_model(start, backend, progress)
    host = Host(start, backend, model, progress)
    setting = Setting(start.speculate, backend.caps.tree_attention and start.acceptance == "dice", host)
    if start.speculator == "auto":
        spec, drafter = open_auto(find(start), setting, functools.partial(leaves_room, start, backend, model))
    else:
        spec, drafter = start.speculator, open_drafter(start.speculator, setting)
    return assemble(msgspec.structs.replace(start, speculator=spec), backend, model, drafter, progress, grammars)


def open_auto(folder: Path, setting: Setting, fits: Callable[[Needs], None]) -> tuple[str, Drafter]:
    """What `--speculator auto` is: the look-ups, which are asked first, and what lies for this target in or beside the model's folder. What
    is not right for it, or too large (`fits` raises StartError), is no reason not to start, nor to do without what else was found."""
    spec = AUTO
    drafter: Drafter | None = None
    for found in find_heads(folder):
        try:
            drafter = _fitting(f"{spec}+{found}", setting, fits)
            spec = f"{spec}+{found}"
        except StartError as refused:
            log.warning("--speculator auto found %s, but it cannot be used: %s; %s", found, refused.error, refused.cure)
        except Exception as error:  # a file or a configuration that nobody thought of
            log.warning(
                "--speculator auto found %s, but it cannot be read (%r); to see why, ask for it by name", found, error, exc_info=True
            )
        gc.collect()  # weights that are not used make room for the KV pool: a drafter and what it declares hold each other
    return spec, open_drafter(AUTO, setting) if drafter is None else drafter


def _fitting(spec: str, setting: Setting, fits: Callable[[Needs], None]) -> Drafter:
    drafter = open_drafter(spec, setting)
    fits(drafter.needs)
    return drafter


def leaves_room(start: Start, backend: Backend, model: Model, needs: Needs) -> None:
    """StartError for heads beside which sequences could not be as long as without them."""
    longest = plan_memory(start, backend, model, Needs(most=needs.most), freed=needs.weight_bytes).longest
    try:
        fits = plan_memory(start, backend, model, needs).longest
    except StartError as refused:
        raise StartError(f"{refused.error} with it", ROOM_CURE) from refused
    if fits < longest:
        raise StartError(f"sequences could have {fits} tokens beside it instead of {longest}", ROOM_CURE)


def assemble(
    start: Start, backend: Backend, model: Model, drafter: Drafter, progress: ReportProgress, grammars: Grammars | None = None
) -> Engine:
    """An engine around a loaded model. `grammars`: their tables may still be on the way."""
    sizes = plan_memory(start, backend, model, drafter.needs)
    rows = RowTable(sizes.rows, sizes.longest, sizes.nodes, model.vocab, backend.caps.page_tokens, grammars)
    lacks = grammars.why_not() if grammars else ""
    ready = Ready(
        rows=sizes.rows,
        pages=sizes.pages,
        page_tokens=backend.caps.page_tokens,
        max_nodes=sizes.nodes,
        vocab=model.vocab,
        device=backend.name,
        dtype=model.dtype,
        drafter=AUTO if start.speculator == "auto" else start.speculator,
        max_tokens=sizes.longest,
        max_step_tokens=sizes.step_tokens,
        memory=sizes.memory,
        facts=model.facts | backend.facts() | ({NO_GRAMMARS: lacks} if lacks else {}),
        max_step_nodes=sizes.step_nodes,
    )
    rejects = start.acceptance == "rejection"
    sampler = Sampler(backend.ops, model.vocab, start.watermark_gamma, start.watermark_delta)
    pool = backend.pool(model.pool, sizes.pages + scratch_pages(sizes.rows, sizes.nodes, backend.caps.page_tokens))
    pools = tuple(backend.pool(spec, sizes.pages) for spec in drafter.needs.pools)
    drafter.needs.attach(Place(pools, rows.table, sizes.rows, sizes.longest))

    def speculator(drafter: Drafter) -> Speculator:
        return Speculator(drafter, model.vocab, sizes.longest, sizes.nodes, sizes.step_nodes, rejects)

    accept = Rejection(backend.ops, sampler) if rejects else follow
    engine = Engine(ready, backend, model, pool, rows, sampler, speculator(drafter), accept)
    engine.ready = msgspec.structs.replace(ready, step_seconds=warm_up(engine, progress))
    if sizes.nodes:
        profiler = Profiler(engine.beside(speculator(Script(sizes.nodes))), start, progress)
        engine.ready = msgspec.structs.replace(engine.ready, **msgspec.structs.asdict(profiler.look()))
        engine.profiler = profiler
    return engine


def plan_memory(start: Start, backend: Backend, model: Model, needs: Needs, freed: int = 0) -> Sizes:
    """Divide what is free after loading, and `freed` bytes more. The longest sequence must fit: where nobody asked for a length, the length
    gives way; where somebody did, that is an error. `needs`: the drafter's."""
    size, specs = backend.caps.page_tokens, (model.pool, *needs.pools)
    page_bytes = sum(spec.position_bytes for spec in specs) * size
    nodes = min(needs.most, start.speculate or needs.most, backend.caps.max_nodes)
    longest = min(start.max_total_tokens or model.max_tokens, model.max_tokens)
    step_tokens = min(start.max_step_tokens or STEP_TOKENS, start.max_rows * longest)
    step_nodes = min(start.max_rows * nodes, max(STEP_NODES, nodes))
    activations = activation_bytes(model, needs, step_tokens, start.max_rows + step_nodes)
    scratch = scratch_pages(start.max_rows, nodes, size) * model.pool.position_bytes * size
    free = backend.memory()[0] + freed
    left = max(0, free - activations - scratch - HEAD_ROOM)
    fit, one = left // page_bytes, -(-longest // size)
    usable = max(int(fit * SHARED_PART), min(fit, one)) if backend.caps.shared_memory else fit
    asked = -(-start.max_pool_tokens // size) if start.max_pool_tokens else usable
    pages = min(start.max_rows * -(-(longest + nodes) // size), asked)
    needed = max(pages, one if start.max_total_tokens else min(one, asked if start.max_pool_tokens else -(-SHORTEST // size)))
    if needed > fit:
        raise too_little(free, activations, left, fit * size, needed * size)
    if needed > pages:
        raise StartError(
            f"the KV pool is to have {pages * size} tokens, but a sequence may have {longest}",
            f"raise --max-batch-total-tokens to {longest} or lower --max-total-tokens to {pages * size}",
        )
    memory = {
        "weights": model.weight_bytes + needs.weight_bytes,
        "kv": pages * page_bytes + scratch,
        "activations": activations,
        "head_room": HEAD_ROOM,
    }
    return Sizes(start.max_rows, min(longest, pages * size), min(step_tokens, pages * size), nodes, step_nodes, pages, memory)


def activation_bytes(model: Model, needs: Needs, step_tokens: int, verified: int) -> int:
    """What the largest step keeps alive at once. `verified`: its rows that may have logits, beside those of scored prompts."""
    width = model.width + 2 * len(needs.layers) * model.hidden  # what is tapped stays until it is joined
    logits = 2 * (verified + PROMPT_ROWS) * model.vocab
    return 4 * ((step_tokens + verified) * width * ROW_COPIES + logits) + needs.work_bytes


def too_little(free: int, activations: int, left: int, fit_tokens: int, needed_tokens: int) -> StartError:
    """`free`, `activations`, `left`: bytes; the tokens that fit into what is left, and those that are needed."""
    return StartError(
        f"{_mb(left)} MB are left for KV ({_mb(free)} free, {_mb(activations)} for activations, {_mb(HEAD_ROOM)} head room): "
        f"{fit_tokens} tokens, but {needed_tokens} are asked for",
        f"set --max-total-tokens and --max-batch-total-tokens to at most {fit_tokens}, or give more memory"
        if fit_tokens >= SHORTEST
        else "give more memory, or lower --max-batch-prefill-tokens",
    )


def _mb(count: int) -> int:
    return count >> 20


def warm_up(engine: Engine, progress: ReportProgress) -> tuple[float, float]:
    """Run prompts of growing length up to the largest step, then all rows at once, then one row. Returns the seconds of a decode step
    of one row and of the largest prompt step."""
    ready = engine.ready
    largest = ready.max_step_tokens
    tokens = min(128, largest)
    progress("warming", 0, largest)
    _prompt_step(engine, tokens)  # the first step of a process pays for what is made once (a second and more): it measures nothing
    prompt_seconds = _prompt_step(engine, tokens)
    while tokens < largest:
        previous, tokens = tokens, min(4 * tokens, largest)
        if prompt_seconds * tokens / previous > PATIENCE_SECONDS:
            prompt_seconds *= largest / previous
            break
        prompt_seconds = _prompt_step(engine, tokens)
        progress("warming", tokens, largest)
    _decode_steps(engine, min(ready.rows, ready.pages), 1)
    decode_seconds = _decode_steps(engine, 1, 5)
    progress("warming", largest, largest)
    return decode_seconds, prompt_seconds


def _admit(row: int, count: int, pages: range, generate: int) -> Admit:
    params = SamplingParams(seed=0, prompt_tokens=count, max_new_tokens=generate)
    return Admit(row, [0] * count, 0, list(pages), params)


def _prompt_step(engine: Engine, tokens: int) -> float:
    """Seconds of a step that computes so many prompt tokens, spread over as few rows as can hold them."""
    ready = engine.ready
    most = ready.max_tokens // ready.page_tokens * ready.page_tokens or ready.max_tokens
    admits: list[Admit] = []
    page = 0
    while tokens > 0 and len(admits) < ready.rows and page < ready.pages:
        count = min(tokens, most, (ready.pages - page) * ready.page_tokens)
        last = page - -count // ready.page_tokens
        admits.append(_admit(len(admits), count, range(page, last), 1))
        tokens, page = tokens - count, last
    began = time.perf_counter()
    engine.step(StepPlan(0, admits, [Feed(admit.row, len(admit.tokens)) for admit in admits]))
    return time.perf_counter() - began


def _decode_steps(engine: Engine, rows: int, count: int) -> float:
    """Median seconds of `count` decode steps of `rows` rows."""
    feeds = [Feed(row, 1) for row in range(rows)]
    engine.step(StepPlan(0, [_admit(row, 1, range(row, row + 1), count + 2) for row in range(rows)], feeds))
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        engine.step(StepPlan(0, feed=feeds))
        seconds.append(time.perf_counter() - began)
    engine.step(StepPlan(0, drop=list(range(rows))))
    return statistics.median(seconds)
