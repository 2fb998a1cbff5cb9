"""Builds the look-ups with the machine's C++ compiler: one source, one small library, a few seconds.

As with the kernels (`kernels/cpu/build.py`) the library's name holds a hash of sources, flags and machine. It is a library of its own
because who changes one should not wait for the other, and because where the model runs on another device only this one is needed.
`python -m forerun.kernels.lookup.build` builds by hand.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from forerun.kernels.cpu import build as kernels

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "lookup.cpp"
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra")
NAME = "libforerun_lookup-"


def name() -> str:
    digest = hashlib.sha256(repr((FLAGS, kernels.this_machine())).encode())
    for path in sorted([*HERE.glob("*.h"), SOURCE]):
        digest.update(path.name.encode() + path.read_bytes())
    return f"{NAME}{digest.hexdigest()[:16]}.so"


def places() -> list[Path]:
    return [HERE / "_build", *kernels.places()[1:]]


def built() -> Path | None:
    """The library for these sources, if it exists."""
    return next((place / name() for place in places() if (place / name()).is_file()), None)


def build() -> Path:
    """The library, built if it is missing. BuildError if that is impossible. Two processes that start together build twice, and one library
    takes the other's place."""
    if found := built():
        return found
    cxx, target = kernels.compiler(), name()
    for place in places():
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place) as folder:
                made = compile_to(Path(folder) / "made.so", cxx)
                os.replace(made, place / target)
            return place / target
        except OSError:
            continue
    raise kernels.BuildError(f"none of these folders can be written: {', '.join(map(str, places()))}")


def compile_to(target: Path, cxx: str, flags: tuple[str, ...] = ()) -> Path:
    kernels.run([cxx, *FLAGS, *flags, str(SOURCE), "-o", str(target)])
    return target


def main() -> int:
    try:
        print(build())
    except kernels.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
