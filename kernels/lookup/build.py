"""Builds the look-ups with the machine's C++ compiler: one source, one small library, a few seconds.

As with the kernels (`kernels/cpu/build.py`) the library's name holds a hash of sources, flags and machine. It is a library of its own
because who changes one should not wait for the other, and because where the model runs on another device only this one is needed.
`python -m forerun.kernels.lookup.build` builds by hand, `--check` builds and runs their test under AddressSanitizer and UBSan.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from forerun.kernels.build import BuildError, compiler, remove_older, run, status, this_machine
from forerun.kernels.build import places as build_places

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "lookup.cpp"
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra")
SANITIZE = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
NAME = "libforerun_lookup-"


def name() -> str:
    digest = hashlib.sha256(repr((FLAGS, this_machine())).encode())
    for path in sorted([*HERE.glob("*.h"), SOURCE]):
        digest.update(path.name.encode() + path.read_bytes())
    return f"{NAME}{digest.hexdigest()[:16]}.so"


def places() -> list[Path]:
    return build_places(HERE)


def built() -> Path | None:
    """The library for these sources, if it exists."""
    return next((place / name() for place in places() if (place / name()).is_file()), None)


def build() -> Path:
    """The library, built if it is missing. BuildError if that is impossible. Two processes that start together build twice, and one library
    takes the other's place."""
    if found := built():
        return found
    cxx, target = compiler(), name()
    for place in places():
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place) as folder:
                made = Path(folder) / "made.so"
                run([cxx, *FLAGS, "-shared", str(SOURCE), "-o", str(made)])
                os.replace(made, place / target)
            remove_older(place / target, f"{NAME}*.so", HERE)
            return place / target
        except OSError:
            continue
    raise BuildError(f"none of these folders can be written: {', '.join(map(str, places()))}")


def check() -> int:
    """Builds check.cpp and the look-ups with sanitizers and runs it; its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "check"
        run([compiler(), *FLAGS, *SANITIZE, str(SOURCE), str(HERE / "check.cpp"), "-o", str(program)])
        return subprocess.run([program], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the look-ups.")
    parser.add_argument("--check", action="store_true", help="build and run their test with sanitizers")
    options = parser.parse_args()
    return status(check if options.check else show)


def show() -> int:
    print(build())
    return 0


if __name__ == "__main__":
    sys.exit(main())
