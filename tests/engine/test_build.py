"""The memory plan, its errors, and an engine assembled around a tiny model."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from forerun.backends.base import Backend, Pool, PoolSpec
from forerun.backends.registry import open_backend
from forerun.engine import build
from forerun.engine.batch import Batch
from forerun.engine.build import HEAD_ROOM, ROW_COPIES, STEP_NODES, Sizes, assemble, build_engine, leaves_room, plan_memory
from forerun.engine.drafters.draft import Needs, Silent
from forerun.engine.drafters.registry import Setting, open_drafter
from forerun.engine.errors import StartError
from forerun.engine.models.model import Output
from forerun.engine.profile import scratch_pages
from forerun.messages import Start
from tests.engine.drafters.companions import write_tiny
from tests.engine.drafters.nets import write_eagle3
from tests.engine.tiny import Front, Sequence_, TinyModel, params_for

MB = 1 << 20


class Machine:
    """A backend with so much free memory, shared with others or not."""

    def __init__(self, free: int, shared: bool = False) -> None:
        self._backend = open_backend("cpu", 1)
        self._free = free
        self.caps = dataclasses.replace(self._backend.caps, shared_memory=shared)

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def memory(self) -> tuple[int, int]:
        return self._free, 2 * self._free


class Card:
    """What the plan must know of a model: 1 kB of KV a position, 4096 positions."""

    vocab, hidden, width, layers, max_tokens, weight_bytes, dtype = 1000, 64, 2000, 8, 4096, 7 * MB, "bfloat16"
    pool = PoolSpec(8, 1, 32, torch.bfloat16)


def plan(free_for_kv: int, shared: bool = False, nodes: int = 0, **start: int) -> Sizes:
    asked = Start("model", **start)  # type: ignore[arg-type]
    needs = Needs(most=nodes)
    rest = plan_memory(asked, Machine(1 << 50), Card(), needs).memory["activations"] + HEAD_ROOM  # type: ignore[arg-type]
    return plan_memory(asked, Machine(free_for_kv + rest, shared), Card(), needs)  # type: ignore[arg-type]


def test_the_pool_takes_what_is_left() -> None:
    sizes = plan(100 * MB)
    assert sizes.pages * 16 == 100 * 1024 and sizes.longest == 4096 and sizes.memory["kv"] == 100 * MB
    assert sizes.memory["weights"] == 7 * MB and sizes.memory["head_room"] == HEAD_ROOM


def test_entries_of_8_bits_make_room_for_more() -> None:
    class Small(Card):
        pool = PoolSpec(8, 1, 32, torch.int8)

    pages = [plan_memory(Start("model", max_rows=1000), Machine(1 << 30), card(), Needs()).pages for card in (Card, Small)]  # type: ignore[arg-type]
    assert pages[1] / pages[0] == pytest.approx(64 / 36, rel=1e-3)


def test_never_more_than_all_rows_could_use() -> None:
    assert plan(1 << 40, max_rows=4).pages == 4 * 256
    assert plan(1 << 40, max_rows=4, max_total_tokens=100).pages == 4 * 7
    assert plan(1 << 40, max_rows=4, max_total_tokens=100, nodes=20).pages == 4 * 8
    assert plan(1 << 40, max_pool_tokens=5000).pages == 313


def test_half_of_a_memory_that_others_use_too() -> None:
    assert plan(100 * MB, shared=True).pages * 16 == 50 * 1024
    assert plan(100 * MB, shared=True, max_pool_tokens=90 * 1024).pages * 16 == 90 * 1024
    assert plan(6 * MB, shared=True).longest == 4096, "but the longest sequence, if it fits"


def test_the_length_gives_way_where_nobody_asked_for_one() -> None:
    assert plan(2 * MB).longest == 2048
    with pytest.raises(StartError, match="left for KV") as error:
        plan(2 * MB, max_total_tokens=4096)
    assert "--max-total-tokens" in error.value.cure and "2048" in error.value.cure


@pytest.mark.parametrize("start", [{}, {"max_pool_tokens": 100_000}, {"max_total_tokens": 1000}])
def test_too_little_memory_names_the_cure(start: dict[str, int]) -> None:
    with pytest.raises(StartError) as error:
        plan(MB // 8, **start)
    assert "more memory" in error.value.cure


def test_a_sequence_that_the_pool_cannot_hold() -> None:
    with pytest.raises(StartError) as error:
        plan(1 << 40, max_total_tokens=4000, max_pool_tokens=2000)
    assert "--max-batch-total-tokens" in error.value.cure


def test_logits_are_reserved_for_the_guesses_of_a_step_and_not_for_those_of_all_rows() -> None:
    reserve = lambda nodes, rows: plan(1 << 40, nodes=nodes, max_rows=rows).memory["activations"]  # noqa: E731
    one_row = 4 * (Card.width * ROW_COPIES + 2 * Card.vocab)
    assert reserve(16, 128) - reserve(0, 128) == STEP_NODES * one_row
    assert reserve(16, 2) - reserve(0, 2) == 32 * one_row
    assert plan(1 << 40, nodes=16).step_nodes == STEP_NODES
    assert plan(1 << 40, nodes=500, max_rows=3).step_nodes == 500, "one row may have what it may have"


def test_a_drafters_pools_and_work_are_part_of_the_plan() -> None:
    """Each position costs its entry in every pool; pools of several drafters add up."""
    own = PoolSpec(2, 1, 32, torch.float32)
    plain, needs = Needs(most=4), Needs(most=4, pools=(own, own), weight_bytes=3 * MB, work_bytes=5 * MB)
    before, after = (plan_memory(Start("model"), Machine(1000 * MB), Card(), each) for each in (plain, needs))  # type: ignore[arg-type]
    assert after.memory["weights"] - before.memory["weights"] == 3 * MB
    assert after.memory["activations"] - before.memory["activations"] == 5 * MB
    scratch = 16 * 1024 * scratch_pages(128, 4, 16)  # what the profile writes to, in the target's pool alone
    assert after.pages == (1000 * MB - after.memory["activations"] - scratch - HEAD_ROOM) // (16 * (1024 + 2 * 512))


def heads(weights: int = 0, work: int = 0, kv: int = 0) -> Needs:
    """Of a drafter; `kv`: bytes of a position."""
    return Needs(most=4, weight_bytes=weights, work_bytes=work, pools=(PoolSpec(1, 1, kv // 4, torch.bfloat16),) if kv else ())


def room(free_for_kv: int, needs: Needs, **start: int) -> str:
    """What is wrong with these heads where so much is left for KV without them."""
    asked = Start("model", **start)  # type: ignore[arg-type]
    beside = plan_memory(asked, Machine(1 << 50), Card(), Needs(most=4))  # type: ignore[arg-type]
    free = free_for_kv + beside.memory["activations"] + beside.memory["kv"] % (1 << 10) + HEAD_ROOM
    scratch = scratch_pages(asked.max_rows, 4, 16) * Card.pool.position_bytes * 16
    try:
        leaves_room(asked, Machine(free + scratch - needs.weight_bytes), Card(), needs)  # type: ignore[arg-type]
    except StartError as refused:
        assert "ask for it by name" in refused.cure
        return refused.error
    return ""


def test_found_heads_that_leave_no_room_are_left_out() -> None:
    """Whatever it is that takes the room: weights, working memory or entries; the server starts without them, as if they were not there."""
    assert room(5 * MB, heads(weights=MB)) == ""
    assert "instead of 4096" in room(5 * MB, heads(weights=2 * MB))
    assert "instead of 4096" in room(5 * MB, heads(work=2 * MB))
    assert "instead of 4096" in room(5 * MB, heads(kv=1024))
    assert "with it" in room(5 * MB, heads(weights=5 * MB))
    assert "with it" in room(5 * MB, heads(weights=2 * MB), max_total_tokens=4000)
    assert room(5 * MB, heads(weights=2 * MB), max_total_tokens=3000) == ""
    with pytest.raises(StartError, match="are left for KV"):  # without them as well: that is no matter of theirs
        leaves_room(Start("model"), Machine(MB), Card(), heads())  # type: ignore[arg-type]


def test_auto_starts_without_heads_that_leave_no_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the folders to the engine; one line says so and how to have them."""
    folder = write_tiny(tmp_path / "model")
    write_eagle3(tmp_path / "model-eagle3")
    start = Start(str(folder), max_rows=2, max_total_tokens=128, max_step_tokens=64, speculator="auto", threads=1)
    engine = build_engine(start, lambda *_: None)
    assert engine.ready.drafter == f"suffix+eagle={tmp_path / 'model-eagle3'}"
    free = engine.ready.memory["activations"] + engine.ready.memory["kv"] + HEAD_ROOM  # less what the heads need
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "open_backend", lambda *_: Machine(free - 3 * MB))
        engine = build_engine(start, lambda *_: None)
    assert engine.ready.drafter == "suffix"
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "model-eagle3" in line and "ask for it by name" in line


def test_no_memory_at_all() -> None:
    with pytest.raises(StartError):
        plan_memory(Start("model"), Machine(0), Card(), Needs())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "start", [{}, {"max_step_tokens": 10}, {"max_pool_tokens": 32, "max_rows": 5}, {"max_rows": 1}, {"max_total_tokens": 20}]
)
def test_assembled_and_warm(start: dict[str, int]) -> None:
    backend: Backend = open_backend("cpu", 1)
    heard: list[tuple[str, int, int]] = []
    asked = Start("model", **{"max_rows": 3, **start})  # type: ignore[arg-type]
    engine = assemble(asked, backend, TinyModel(backend), Silent(), lambda *progress: heard.append(progress))
    ready = engine.ready
    assert heard[0][0] == heard[-1][0] == "warming" and heard[-1][1] == heard[-1][2]
    assert all(seconds > 0 for seconds in ready.step_seconds)
    assert ready.rows == asked.max_rows and ready.max_tokens <= ready.pages * ready.page_tokens
    most = min(start.get("max_step_tokens", 2048), ready.rows * min(160, start.get("max_total_tokens", 160)))
    assert ready.max_step_tokens == min(most, ready.pages * ready.page_tokens), "no step can have more known tokens than the pool"
    prompt = [1, 2, 3]
    sequence = Sequence_(prompt, params_for(prompt, max_new_tokens=5))
    front = Front(engine)
    front.admit(sequence)
    front.run()
    assert len(sequence.tokens) == 5


class ColdModel(TinyModel):
    """Its first step pays for what is made once."""

    cold = True

    def forward(self, batch: Batch, pool: Pool, taps: tuple[int, ...] = ()) -> Output:
        if self.cold:
            time.sleep(1)
        self.cold = False
        return super().forward(batch, pool, taps)


@pytest.mark.parametrize("start", [{}, {"max_step_tokens": 10}, {"max_rows": 1}])
def test_the_first_step_of_a_process_is_no_measurement(start: dict[str, int]) -> None:
    """Patience with a silent worker and the size of prompt chunks come from it."""
    backend: Backend = open_backend("cpu", 1)
    asked = Start("model", **{"max_rows": 3, **start})  # type: ignore[arg-type]
    engine = assemble(asked, backend, ColdModel(backend), Silent(), lambda *progress: None)
    assert max(engine.ready.step_seconds) < 1


@pytest.mark.parametrize("start", [{"device": "abacus"}, {"threads": -1}, {"memory_fraction": 0.0}])
def test_a_device_that_cannot_be_opened(start: dict[str, object]) -> None:
    with pytest.raises(StartError):
        build_engine(Start("model", **start), lambda *progress: None)  # type: ignore[arg-type]


class Eager(Silent):
    """Would guess more than anybody asks for."""

    needs = Needs(most=1 << 20)


@pytest.mark.parametrize("speculate", [1, 7])
def test_no_drafter_gets_more_guesses_than_speculate_says(speculate: int) -> None:
    backend: Backend = open_backend("cpu", 1)
    asked = Start("model", max_rows=3, speculate=speculate)
    assert assemble(asked, backend, TinyModel(backend), Eager(), lambda *progress: None).ready.max_nodes == speculate


@pytest.mark.parametrize("speculator, speculate, nodes", [("none", 0, 0), ("auto", 0, 16), ("ngram", 5, 5), ("suffix=chain", 1, 1)])
def test_the_drafter_that_was_asked_for(speculator: str, speculate: int, nodes: int) -> None:
    drafter = open_drafter(speculator, Setting(speculate))
    assert drafter.needs.most == nodes
    backend: Backend = open_backend("cpu", 1)
    asked = Start("model", max_rows=3, speculator=speculator, speculate=speculate)
    ready = assemble(asked, backend, TinyModel(backend), drafter, lambda *progress: None).ready
    assert ready.max_nodes == nodes and ready.drafter == ("suffix" if speculator == "auto" else speculator)
