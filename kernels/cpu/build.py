"""Builds the CPU kernels with the machine's C++ compiler: one object an instruction set, one shared library.

Needs only the standard library. The library's name holds a hash of sources, flags and machine, so a change builds anew and an old
library is never loaded. `python -m forerun.kernels.cpu.build` builds by hand, `--check` builds and runs the kernel test under
AddressSanitizer and UBSan, `--check --machine aarch64` does so with a cross compiler and an emulator.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from forerun.kernels.build import BuildError, compiler, remove_older, run, status, this_machine
from forerun.kernels.build import places as build_places

HERE = Path(__file__).resolve().parent
SOURCES = ("isa.cpp", "run.cpp", "pool.cpp", "forms.cpp")
COMMON = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra")
SANITIZE = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
FEWER_ROWS = "-DFR_ROWS=2"  # in a tile of the scalar form, whose plain arrays sanitizers make slow to compile
WIDE = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mprefer-vector-width=512")
# Here gcc orders loads before it gives out registers, and so needs more of them than there are.
ARM = ("-fno-schedule-insns", "-Wno-ignored-optimization-argument")
SCALAR: dict[str, tuple[str, ...]] = {"scalar": ("-O2", "-DFR_SCALAR")}
DOTS = (*WIDE, "-mavx512bf16", "-mavx512vnni")
MACHINES: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"avx512bf16": DOTS, "avx512": WIDE, "avx2": ("-mavx2", "-mfma"), **SCALAR},
    "aarch64": {"neonbf16": (*ARM, "-march=armv8.2-a+bf16"), "neon": ARM, **SCALAR},
}
"""What is compiled for a machine: a form of the kernels for each instruction set, and its flags."""

PRODUCTS: dict[str, dict[str, tuple[str, ...]]] = {"x86_64": {"amx.cpp": DOTS}}
"""Sources of forms that have products of their own and all else from another form, and their flags."""

OBJECTS = "building-"
"""How the names of folders begin that hold the objects of a build."""

EMULATED = {"aarch64": ("max", "cortex-a72")}
"""Processors that the kernel test runs on elsewhere: with everything there is, and without bf16 dot products."""


def instruction_sets(machine: str) -> dict[str, tuple[str, ...]]:
    """An unknown machine has the scalar form."""
    return MACHINES.get(machine, SCALAR)


def products(machine: str) -> dict[str, tuple[str, ...]]:
    return PRODUCTS.get(machine, {})


def fingerprint() -> str:
    """Of sources, flags and machine; not of the compiler, so that a library built elsewhere serves where there is none."""
    machine = this_machine()
    digest = hashlib.sha256(repr((COMMON, instruction_sets(machine), products(machine), machine)).encode())
    for path in sorted([*HERE.glob("*.h"), *(HERE / name for name in (*SOURCES, *products(machine)))]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def places() -> list[Path]:
    return build_places(HERE)


def built() -> Path | None:
    """The library for these sources, if it exists."""
    name = f"libforerun_cpu-{fingerprint()}.so"
    return next((place / name for place in places() if (place / name).is_file()), None)


def build() -> Path:
    """The library, built if it is missing. BuildError if that is impossible."""
    if found := built():
        return found
    cxx = compiler()
    for place in places():
        try:
            place.mkdir(parents=True, exist_ok=True)
            with open(place / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two processes that start together build once
                while not (found := built()):  # a second time, should the sources change meanwhile
                    _build_in(place, cxx)
                return found
        except OSError:
            continue
    raise BuildError(f"none of these folders can be written: {', '.join(map(str, places()))}")


def _build_in(place: Path, cxx: str) -> None:
    """Builds there, for who holds the lock: folders of objects are then of builds that were killed. Nothing is left if the sources changed
    meanwhile, as some objects may be older than others."""
    for left in place.glob(f"{OBJECTS}*"):
        shutil.rmtree(left)
    sources = fingerprint()
    with tempfile.TemporaryDirectory(dir=place, prefix=OBJECTS) as folder:
        print(f"building the CPU kernels with {cxx}: once, less than a minute on two cores", file=sys.stderr, flush=True)
        made = _link(cxx, _objects(cxx, this_machine(), Path(folder)), ("-shared",), Path(folder) / "made.so")
        if fingerprint() != sources:
            return
        target = place / f"libforerun_cpu-{sources}.so"
        os.replace(made, target)
    remove_older(target, "libforerun_cpu-*.so", HERE)


def check(machine: str) -> int:
    """Builds check.cpp and all kernels with sanitizers and runs it; its exit status. Another machine than this one is emulated."""
    foreign = machine != this_machine()
    cxx, runs = _emulation(machine) if foreign else (compiler(), [[]])
    with tempfile.TemporaryDirectory() as folder:
        objects = _objects(cxx, machine, Path(folder), (*SANITIZE, FEWER_ROWS), ("check.cpp",))
        program = _link(cxx, objects, SANITIZE, Path(folder) / "check")
        # An emulated process cannot be stopped from outside to look for leaks.
        options = ["env", "ASAN_OPTIONS=detect_leaks=0"] if foreign else []
        return max(subprocess.run([*options, *run, program], check=False).returncode for run in runs)


def _emulation(machine: str) -> tuple[str, list[list[str]]]:
    """The cross compiler, and the beginnings of commands that run what it makes. BuildError says what to install."""
    if machine not in EMULATED:
        raise BuildError(f"{machine} is not emulated; there are {', '.join(EMULATED)}")
    compilers, emulators = f"{machine}-linux-gnu-g++", f"qemu-{machine}"
    missing = [name for name in (compilers, emulators) if not shutil.which(name)]
    if missing:
        raise BuildError(f"no {' and no '.join(missing)} here; Debian: apt-get install g++-{machine}-linux-gnu qemu-user")
    return compilers, [[emulators, "-L", f"/usr/{machine}-linux-gnu", "-cpu", cpu] for cpu in EMULATED[machine]]


def _objects(cxx: str, machine: str, folder: Path, flags: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> list[Path]:
    """`flags` have the last word: the level of a form's optimisation, too."""
    forms = instruction_sets(machine).items()
    jobs = [((*COMMON, *extra, *flags, f"-DFR_ISA={isa}"), HERE / "isa.cpp", folder / f"{isa}.o") for isa, extra in forms]
    jobs += [((*COMMON, *extra, *flags), HERE / name, folder / f"{name}.o") for name, extra in products(machine).items()]
    jobs += [((*COMMON, *flags), HERE / name, folder / f"{name}.o") for name in (*SOURCES[1:], *more)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: run([cxx, *job[0], "-c", str(job[1]), "-o", str(job[2])]), jobs))
    return [job[2] for job in jobs]


def _link(cxx: str, objects: list[Path], flags: tuple[str, ...], target: Path) -> Path:
    run([cxx, "-pthread", *flags, *map(str, objects), "-o", str(target)])
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the CPU kernels.")
    parser.add_argument("--check", action="store_true", help="build and run the kernel test with sanitizers")
    parser.add_argument(
        "--machine", default=this_machine(), choices=(this_machine(), *EMULATED), help="of --check: emulated if it is not this one"
    )
    options = parser.parse_args()
    if options.check:
        return status(lambda: check(options.machine))
    return status(show)


def show() -> int:
    print(build())
    return 0


if __name__ == "__main__":
    sys.exit(main())
