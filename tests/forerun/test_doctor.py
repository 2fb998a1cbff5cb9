"""The doctor's findings, on machines made of files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forerun import doctor
from forerun.backends.cpu.memory import Limits
from forerun.config import Config
from forerun.kernels.build import this_machine
from forerun.kernels.cpu.build import instruction_sets, products

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 8 GiB in a version 2 cgroup without limits."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {6 * GIB // 1024} kB\n")
    (tmp_path / "proc/cpuinfo").write_text("model name\t: A CPU\nflags\t\t: fma avx2 avx512_bf16 other\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    return tmp_path


def test_cores_follow_affinity_and_quota(root: Path) -> None:
    """E11: threads come from the cgroup and the affinity."""
    allowed = len(os.sched_getaffinity(0))
    assert doctor.cores(Limits(root)).text.startswith(f"{allowed} of {os.cpu_count()}")
    (root / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    found = doctor.cores(Limits(root))
    assert (found.state, found.text.startswith("1 of")) == ("warning", True)
    assert allowed == 1 or "quota allows 1" in found.text


def test_memory_follows_the_cgroup(root: Path) -> None:
    assert doctor.memory(Limits(root)).text.startswith("6.0 GiB available of 8.0 GiB")
    (root / "sys/fs/cgroup/memory.max").write_text(str(2 * GIB))
    (root / "sys/fs/cgroup/memory.current").write_text(str(GIB))
    assert doctor.memory(Limits(root)).text.startswith("1.0 GiB available of 2.0 GiB")


def test_instructions(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.instructions(root).text == "A CPU: avx2 fma avx512_bf16"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    (root / "proc/cpuinfo").write_text("Features\t: fp asimd evtstrm bf16\n")
    assert doctor.instructions(root).text == "aarch64: asimd bf16" and doctor.instructions(root).state == "ok"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (root / "proc/cpuinfo").write_text("flags: sse2\n")
    assert doctor.instructions(root).state == "warning"
    (root / "proc/cpuinfo").unlink()
    assert "none" in doctor.instructions(root).text


def test_device_files(root: Path) -> None:
    assert "the CPU" in doctor.devices(root).text
    for name in ("nvidia0", "nvidiactl", "davinci0", "null"):
        (root / "dev" / name).touch()
    assert doctor.devices(root).text == "NVIDIA: nvidia0 nvidiactl; Ascend: davinci0"


def test_channels_work_here_and_are_missed_where_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.channels().state in ("ok", "warning")

    def banned(*_: object) -> int:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "memfd_create", banned)
    assert (doctor.channels().state, "seccomp" in doctor.channels().text) == ("fault", True)


def test_a_missing_model_is_a_fault() -> None:
    (found,) = doctor.model(Config.parse(["--model-id", "/no/where"], {}), GIB)
    assert (found.state, found.topic) == ("fault", "model")


def test_a_model_that_will_be_fetched_is_a_warning_unless_that_is_forbidden(tmp_path: Path) -> None:
    flags = ["--model-id", "org/name", "--huggingface-hub-cache", str(tmp_path)]
    (found,) = doctor.model(Config.parse(flags, {}), GIB)
    assert (found.state, "fetch" in found.text) == ("warning", True)
    (found,) = doctor.model(Config.parse([*flags, "--hf-hub-offline"], {}), GIB)
    assert (found.state, "hf download org/name" in found.text) == ("fault", True)


def test_a_model_too_large_or_too_short_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (tmp_path / "m.gguf").write_bytes(bytes(100))
    found = doctor.model(Config.parse(["--model-id", str(tmp_path), "--max-total-tokens", "65"], {}), available=99)
    assert [finding.state for finding in found] == ["ok", "warning", "warning"]


def test_an_unusable_device_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """E09, E12: a device that was asked for and cannot be opened is named, never replaced in silence."""
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 0)
    (found,) = doctor.choice(Config())
    assert (found.state, found.topic) == ("fault", "device")


def test_the_probe_answers_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.loads(doctor.probe("cpu", "1", "1.0"))
    assert told["device"] == "cpu"
    assert told["dtypes"]
    form = told["facts"]["kernels"]
    built = {*instruction_sets(this_machine()), *(Path(source).stem for source in products(this_machine()))}
    assert form.removeprefix("native, ") in built or form == "torch reference (slow)"


def test_run_prints_lines_or_json_and_tells_by_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "choice", lambda config: [])
    assert doctor.run(Config()) == 0
    assert capsys.readouterr().out.startswith("ok       version       forerun ")
    config = Config.parse(["--model-id", "/no/where", "--json-output"], {})
    assert doctor.run(config) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["state"] for line in lines} >= {"ok", "fault"}
