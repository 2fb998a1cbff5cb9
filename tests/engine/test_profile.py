"""The profile: what is looked at when a worker starts, what is measured in idle moments, what is remembered, and what it leaves behind."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.backends.base import Backend
from forerun.backends.registry import open_backend
from forerun.engine import profile
from forerun.engine.build import assemble
from forerun.engine.drafters.draft import Needs, Silent
from forerun.engine.engine import Engine
from forerun.engine.profile import Profiler
from forerun.messages import Emit, Profile, Ready, Start, StepPlan, StepResult
from tests.engine.tiny import Front, Sequence_, TinyModel, params_for

DENSE = [*range(1, 33), *profile.BUCKETS]


class Guessing(Silent):
    """Might guess, but never does."""

    needs = Needs(most=8)


def built(start: Start, heard: list[tuple[str, int, int]] | None = None) -> Engine:
    backend: Backend = open_backend("cpu", 1)
    said = heard if heard is not None else []
    return assemble(start, backend, TinyModel(backend), Guessing(), lambda *progress: said.append(progress))


LIMITS = {name: getattr(profile, name) for name in ("PATIENCE", "LOOK_SECONDS", "MOST_SECONDS")}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured does not depend on how busy this machine is."""
    for name in LIMITS:
        monkeypatch.setattr(profile, name, 1e9)


def nobody() -> bool:
    return False


def rested(resting: Engine | Profiler, wanted: Callable[[], bool] = nobody) -> Profile:
    """Idle moments until the profile is there."""
    for _ in range(10000):
        found = resting.rest(wanted)
        if found is not None:
            assert not resting.resting and resting.rest(wanted) is None
            return found
    raise AssertionError("never complete")


def answered(engine: Engine, prompt: list[int], shared: tuple[int, ...] = ()) -> tuple[list[int], list[int]]:
    """The answer to a prompt, and the pages it was written to."""
    sequence = Sequence_(prompt, params_for(prompt, max_new_tokens=5))
    front = Front(engine)
    front.free_pages = [page for page in front.free_pages if page not in shared]
    front.admit(sequence, shared)
    front.step()
    pages = list(sequence.pages)
    front.run()
    return sequence.tokens, pages


def test_a_rough_profile_at_once_and_the_whole_one_when_there_was_time() -> None:
    heard: list[tuple[str, int, int]] = []
    engine = built(Start("model", max_rows=5), heard)
    assert [rows for rows, _ in engine.ready.costs] == list(profile.ROUGH[0]) and engine.ready.rough and engine.resting
    stages = [(done, total) for stage, done, total in heard if stage == "profiling"]
    assert stages[-1][0] == stages[-1][1] and stages == sorted(stages)
    found = rested(engine)
    assert [rows for rows, _ in found.costs] == [*range(1, 33), 40] and not found.rough
    assert all(seconds > 0 for _, seconds in found.costs)
    assert found.segment_seconds >= 0 and all(read >= 0 and score >= 0 for _, read, score in found.contexts)


def test_what_was_cached_is_as_before() -> None:
    """Pages of a sequence that has ended may be hit by the next one: its answer is the same as without the profile in between."""
    prompt = list(range(1, 40))
    engine = built(Start("model", max_rows=5, max_pool_tokens=256))
    first, pages = answered(engine, prompt)
    rested(engine)
    again, _ = answered(engine, [*prompt, *first], tuple(pages[:2]))
    assert again == answered(built(Start("model", max_rows=5)), [*prompt, *first])[0]


def test_it_waits_while_a_row_is_running() -> None:
    engine = built(Start("model", max_rows=3))
    prompt = [1, 2, 3]
    front = Front(engine)
    front.admit(Sequence_(prompt, params_for(prompt, max_new_tokens=5)))
    front.step()
    assert not engine.resting and engine.rest(nobody) is None
    front.run()
    assert engine.resting


def test_whoever_wants_a_step_waits_for_one_at_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is broken off, each size is measured as often as it should be, and no step of the profile follows a wish."""
    dice = random.Random(1)
    after: list[StepPlan] = []
    step = Engine.step
    sampled = 0
    wish = False

    def watched(self: Engine, plan: StepPlan) -> StepResult:
        nonlocal sampled
        sampled += bool(plan.feed) and not plan.admit
        after.extend([plan] if wish and (plan.feed or plan.admit) else [])
        return step(self, plan)

    def wanted() -> bool:
        nonlocal wish
        wish = dice.random() < 0.3
        return wish

    monkeypatch.setattr(Engine, "step", watched)
    engine = built(Start("model", max_rows=4))
    sampled = 0
    while engine.resting:
        wish = False
        engine.rest(wanted)
    assert not after
    broken, sampled = sampled, 0
    other = built(Start("model", max_rows=4))
    sampled = 0
    rested(other)
    assert broken == sampled > 150


@pytest.mark.parametrize(
    ("start", "most"), [({"max_rows": 1}, 9), ({"max_rows": 2, "max_total_tokens": 40}, 18), ({"max_rows": 2, "max_pool_tokens": 48}, 18)]
)
def test_no_more_rows_than_there_is_room_for(start: dict[str, int], most: int) -> None:
    found = rested(built(Start("model", **start)))  # type: ignore[arg-type]
    assert [rows for rows, _ in found.costs] == list(range(1, most + 1))


def test_where_a_step_cannot_be_measured_nothing_is_said() -> None:
    engine = built(Start("model", max_rows=2, max_total_tokens=20))
    assert engine.ready.costs == [] and not engine.resting


@pytest.mark.parametrize("good", [0, 1, 5, 60, 200])
def test_a_row_that_ends_with_an_error_is_no_measurement(good: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At whatever step it happens: nothing is told that was not measured, nothing is written down, and every row is dropped."""
    machine = Machine(stairs)
    run, rows, steps = machine.step, set[int](), 0

    def failing(plan: StepPlan) -> StepResult:
        nonlocal steps
        steps += bool(plan.feed)
        rows.difference_update(plan.drop)
        rows.update(admit.row for admit in plan.admit)
        result = run(plan)
        return msgspec.structs.replace(result, emit=[Emit(0, error="out of luck")]) if plan.feed and steps > good else result

    machine.step = failing  # type: ignore[method-assign]
    profiler = machine.profiler(Start("model", hub_cache=str(tmp_path)))
    looked = profiler.look()
    assert bool(looked.costs) == (good > 20)
    while profiler.resting:
        assert profiler.rest(nobody) in (None, Profile())
    assert not rows and not list(tmp_path.rglob("*.json"))
    assert caplog.text.count("out of luck") == 1


def test_a_step_has_the_rows_it_is_measured_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    step = Engine.step

    def watched(self: Engine, plan: StepPlan) -> StepResult:
        result = step(self, plan)
        if plan.budget:
            seen.append((plan.budget + len(plan.feed), result.rows))
        return result

    monkeypatch.setattr(Engine, "step", watched)
    rested(built(Start("model", max_rows=4)))
    assert len(seen) > 60
    assert all(wanted == rows for wanted, rows in seen)


def test_it_is_remembered_as_long_as_the_machine_is_as_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "ALIKE", 1e9)
    start = Start("model", max_rows=2, hub_cache=str(tmp_path))
    rested(built(start))
    (file,) = (tmp_path / ".forerun").iterdir()
    known = msgspec.json.decode(file.read_bytes(), type=Profile)
    monkeypatch.setattr(profile, "SAME", 1e9)
    marked = msgspec.structs.replace(known, costs=[known.costs[0], (2, 123.0)])
    file.write_bytes(msgspec.json.encode(marked))
    engine = built(start)
    assert engine.ready.costs[-1] == (2, 123.0) and not engine.ready.rough and not engine.resting
    monkeypatch.setattr(profile, "SAME", 1.6)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, costs=[(1, 1e3), (2, 1e3)])))
    assert built(start).resting, "another machine"
    file.write_text("nonsense")
    engine = built(start)
    assert engine.resting
    rested(engine)
    assert len(msgspec.json.decode(file.read_bytes(), type=Profile).costs) == 18
    rested(built(msgspec.structs.replace(start, dtype="float32", model_id="other")))
    assert len(list((tmp_path / ".forerun").iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / ".forerun").write_text("in the way")
    assert rested(built(Start("model", max_rows=2, hub_cache=str(tmp_path)))).costs


class Machine:
    """A stepper that computes nothing: steps take what `seconds` says of their rows, times a noise that is rarely large."""

    def __init__(self, seconds: Callable[[int], float], seed: int = 0) -> None:
        self.now = 0.0
        self.longest = 0.0
        self.seconds = seconds
        self._dice = random.Random(seed)
        plain = seconds(1)
        self.ready = Ready(8, 256, 16, 16, 100, "cpu", "f32", "suffix", 2000, 2048, (plain, 100 * plain), max_step_nodes=128)

    def step(self, plan: StepPlan) -> StepResult:
        rows = sum(feed.known + feed.guess for feed in plan.feed)
        outlier = 4.0 if self._dice.random() < 0.05 else 1.0
        took = self.seconds(rows) * self._dice.uniform(0.97, 1.05)
        self.longest = max(self.longest, took)
        self.now += took * outlier
        return StepResult(plan.step)

    def profiler(self, start: Start | None = None) -> Profiler:
        return Profiler(self, start or Start("model"), lambda *_: None, clock=lambda: self.now)


def stairs(rows: int) -> float:
    return 0.010 + 0.0001 * rows + 0.003 * (rows > 12)


@pytest.mark.parametrize("seed", range(5))
def test_one_step_in_twenty_that_takes_four_times_as_long_spoils_no_count(seed: int) -> None:
    profiler = Machine(stairs, seed).profiler()
    profiler.look()
    found = rested(profiler)
    assert [rows for rows, _ in found.costs] == [rows for rows in DENSE if rows <= 128]
    assert [tokens for tokens, _, _ in found.contexts] == [256, 1024]
    off = [abs(seconds / stairs(rows) - 1) for rows, seconds in found.costs]
    assert statistics.median(off) < 0.04 and max(off) < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_others_slow_down_for_seconds_has_the_same_shape(seed: int) -> None:
    """Slower by up to two thirds, now and then, as a machine is while another server starts on it: sizes are to each other as ever, so
    that guesses, whose price is a difference of sizes, are as dear as ever."""
    dice, until, slower = random.Random(seed), 0.0, 1.0
    machine = Machine(stairs, seed)

    def busy(rows: int) -> float:
        nonlocal until, slower
        if machine.now > until:
            until, slower = machine.now + dice.uniform(0.5, 3.0), dice.choice((1.0, 1.0, 1.3, 1.7))
        return slower * stairs(rows)

    machine.seconds = busy
    profiler = machine.profiler()
    profiler.look()
    slower_by = [seconds / stairs(rows) for rows, seconds in rested(profiler).costs]
    off = [abs(each / statistics.median(slower_by) - 1) for each in slower_by]
    assert statistics.median(off) < 0.03 and max(off) < 0.5 and sorted(off)[-3] < 0.1


def test_a_machine_that_got_slower_keeps_its_profile_and_one_that_changed_does_not(tmp_path: Path) -> None:
    """Slower in all sizes alike, it is corrected for while it runs (`router/controller/cost.py`); another staircase is measured again."""
    start = Start("model", hub_cache=str(tmp_path))

    def again(seconds: Callable[[int], float]) -> bool:
        profiler = Machine(seconds).profiler(start)
        found = profiler.look()
        return len(found.costs) == len(DENSE) - 2 and not profiler.resting

    assert not again(stairs)
    profiler = Machine(stairs).profiler(start)
    profiler.look()
    rested(profiler)
    assert again(stairs)
    assert again(lambda rows: 1.5 * stairs(rows))
    assert not again(lambda rows: 0.01 * max(1.0, rows / 6))
    assert not again(lambda rows: 3 * stairs(rows))


@given(st.sampled_from(["threads", "cores", "kernels", "build"]), st.text(min_size=1, max_size=8))
def test_a_profile_is_of_these_threads_and_these_kernels(fact: str, other: str) -> None:
    """Both make another staircase, though a single plain step may take as long as before."""
    start, ready = Start("model", hub_cache="cache"), Machine(stairs).ready
    usual = {"threads": "2", "cores": "2", "kernels": "native, avx512", "build": "0123abcd"}
    files = [profile._file(msgspec.structs.replace(ready, facts=facts), start) for facts in (usual, usual | {fact: other}, dict(usual))]
    assert files[0] == files[2] and (files[0] == files[1]) is (usual[fact] == other)
    assert profile._file(msgspec.structs.replace(ready, device="npu"), start) not in files


def test_a_start_is_short_and_no_idle_step_is_long_whatever_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LIMITS.items():
        monkeypatch.setattr(profile, name, value)
    for plain, start, most in ((0.001, 0.2, 15.0), (0.010, 1.2, 15.0), (0.1, 2.0, 30.0), (0.8, 8.0, 200.0)):
        machine = Machine(lambda rows, plain=plain: plain * (1 + max(0, rows - 8) / 10))  # type: ignore[misc]
        profiler = machine.profiler()
        rough = profiler.look()
        assert machine.now < start and rough.costs[0][0] == 1 and len(rough.costs) >= 2, f"{plain} s a step"
        machine.now = machine.longest = 0.0
        found = rested(profiler)
        assert machine.now < most and len(found.costs) >= 4, f"{plain} s a step"
        assert machine.longest < 1.5 * max(LIMITS["MOST_SECONDS"], profile.MOST_PLAIN * plain), f"{plain} s a step"


def test_a_model_of_seconds_a_step_is_left_alone_when_it_is_idle() -> None:
    """A step of many rows would look like a worker that hangs."""
    machine = Machine(lambda rows: 6.0 + rows / 4)
    profiler = machine.profiler()
    assert len(profiler.look().costs) >= 2 and not profiler.resting
    steps = machine.now
    assert profiler.rest(nobody) is None and machine.now == steps


def test_what_was_begun_too_long_ago_is_begun_again() -> None:
    """The machine may be another one by now: nothing is mixed from before and after a long pause."""
    machine = Machine(stairs)
    profiler = machine.profiler()
    profiler.look()
    for _ in range(10):
        profiler.rest(nobody)
    machine.now += 2 * profile.STALE_SECONDS
    machine.seconds = lambda rows: 2 * stairs(rows)
    off = [abs(seconds / stairs(rows) / 2 - 1) for rows, seconds in rested(profiler).costs]
    assert max(off) < 0.2
