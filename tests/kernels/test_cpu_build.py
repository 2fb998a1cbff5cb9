"""The library is built once for these sources, and the failure to build one says what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.kernels.build import BuildError
from forerun.kernels.cpu import build as module


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources with nothing built."""
    for path in module.HERE.iterdir():
        if path.suffix in (".h", ".cpp"):
            shutil.copy(path, tmp_path)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "places", lambda: [tmp_path / "one", tmp_path / "two"])
    return tmp_path


def test_a_change_of_the_sources_is_a_new_library(sources: Path) -> None:
    before = module.fingerprint()
    assert module.fingerprint() == before
    (sources / "vec.h").write_text((sources / "vec.h").read_text() + "\n")
    assert module.fingerprint() != before


def test_what_is_built_is_found(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any of the places; then no compiler is needed."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert module.built() is None
    with pytest.raises(BuildError, match=r"install g\+\+"):
        module.build()
    (sources / "two").mkdir()
    library = sources / "two" / f"libforerun_cpu-{module.fingerprint()}.so"
    library.touch()
    assert module.build() == library


def test_the_compilers_words_are_in_the_error(sources: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no compiler here")
    (sources / "pool.cpp").write_text("this is not C++")
    (sources / "isa.cpp").write_text("")
    with pytest.raises(BuildError, match="this is not C"):
        module.build()
    assert module.built() is None


def test_a_build_is_announced_and_nothing_else(sources: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A start that compiles for half a minute must not look like one that hangs."""
    monkeypatch.setattr(module, "compiler", lambda: "cc")
    monkeypatch.setattr(module, "_objects", lambda *args: [])
    monkeypatch.setattr(module, "_link", lambda cxx, objects, flags, target: target.write_text("") or target)
    module.build()
    assert "building the CPU kernels" in capfd.readouterr().err
    module.build()
    assert capfd.readouterr().err == ""


def test_older_libraries_go(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no compiler here")
    monkeypatch.setattr(module, "_objects", lambda *args: [])
    monkeypatch.setattr(module, "_link", lambda cxx, objects, flags, target: target.write_text("") or target)
    first = module.build()
    (sources / "vec.h").write_text("")
    second = module.build()
    assert second != first and list(first.parent.glob("*.so")) == [second]


def test_sources_that_change_during_a_build(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are built again: a library never has the name of other sources than its own."""
    built: list[str] = []

    def link(cxx: str, objects: list[Path], flags: tuple[str, ...], target: Path) -> Path:
        built.append((sources / "vec.h").read_text())
        if len(built) == 1:
            (sources / "vec.h").write_text("changed")
        target.write_text(built[-1])
        return target

    monkeypatch.setattr(module, "compiler", lambda: "cc")
    monkeypatch.setattr(module, "_objects", lambda *args: [])
    monkeypatch.setattr(module, "_link", link)
    library = module.build()
    assert len(built) == 2 and library.read_text() == "changed"
    assert [*library.parent.glob("*.so")] == [library]


def test_what_a_killed_build_left_goes(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next one; folders of others stay."""
    left, other = sources / "one" / f"{module.OBJECTS}of-long-ago", sources / "one" / "of-others"
    for folder in (left, other):
        folder.mkdir(parents=True)
        (folder / "scalar.o").touch()
    monkeypatch.setattr(module, "compiler", lambda: "cc")
    monkeypatch.setattr(module, "_objects", lambda *args: [])
    monkeypatch.setattr(module, "_link", lambda cxx, objects, flags, target: target.write_text("") or target)
    library = module.build()
    assert set(library.parent.iterdir()) == {library, library.parent / "lock", other}


def test_a_place_that_cannot_be_written_is_passed_over(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "one").write_text("a file where a folder should be")
    monkeypatch.setattr(module, "_objects", lambda *args: [])
    monkeypatch.setattr(module, "_link", lambda cxx, objects, flags, target: target.write_text("") or target)
    if shutil.which("c++") is None:
        pytest.skip("no compiler here")
    assert module.build().parent == sources / "two"


def test_every_form_is_chosen_at_run_time() -> None:
    """What is compiled for a machine is what forms.cpp looks for, and every machine has the scalar form."""
    text = (module.HERE / "forms.cpp").read_text()
    for machine, forms in {**module.MACHINES, "riscv64": module.instruction_sets("riscv64")}.items():
        assert "scalar" in forms, machine
        assert all(f"&kernels_{form}" in text for form in forms), machine
        assert all(f"*products_{Path(source).stem}" in text for source in module.products(machine)), machine


def test_what_an_emulated_check_needs_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "this_machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "argv", ["build", "--check", "--machine", "aarch64"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert module.main() == 1
    said = capsys.readouterr().err
    assert "no aarch64-linux-gnu-g++ and no qemu-aarch64" in said and "apt-get install g++-aarch64-linux-gnu qemu-user" in said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_kernels_of_aarch64() -> None:
    """Cross-compiled and emulated: `make test-aarch64`."""
    try:
        module._emulation("aarch64")
    except BuildError as error:
        if module.this_machine() != "aarch64":
            pytest.skip(str(error))
    command = [sys.executable, "-m", "forerun.kernels.cpu.build", "--check", "--machine", "aarch64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on neonbf16 neon scalar: 0 failures" in done.stdout or module.this_machine() == "aarch64"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_kernels_are_clean_under_sanitizers() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no compiler here")
    done = subprocess.run([sys.executable, "-m", "forerun.kernels.cpu.build", "--check"], capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
