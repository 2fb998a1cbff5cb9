"""What every build of C++ needs: this machine's name and compiler, places for libraries, and one error. Only the standard library."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
SAME = {"AMD64": "x86_64", "arm64": "aarch64"}


class BuildError(RuntimeError):
    """No compiler, or it failed; the message says what to do."""


def this_machine() -> str:
    return SAME.get(platform.machine(), platform.machine())


def compiler() -> str:
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError("no C++ compiler found; install g++ or clang++ (Debian: apt-get install g++)")


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}")
    if done.stderr:
        sys.stderr.write(done.stderr)


def places(sources: Path) -> list[Path]:
    """Where a library may lie: beside its sources, else in the user's cache (an installed package may not be writable)."""
    try:
        return [sources / "_build", Path.home() / ".cache" / "forerun"]
    except RuntimeError:  # a user without a home, as in a container that runs under any id
        return [sources / "_build"]


def remove_older(library: Path, names: str, sources: Path) -> None:
    """In the sources' own folder: what older ones left there serves nobody. `names`: the pattern that libraries of these sources have."""
    if library.parent.parent == sources:
        for old in library.parent.glob(names):
            if old != library:
                old.unlink(missing_ok=True)


def status(act: Callable[[], int]) -> int:
    """Exit status of a command that builds: what `act` returns, or 1 with the error said."""
    try:
        return act()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
