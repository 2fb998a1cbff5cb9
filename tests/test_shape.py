"""The shape of the tree, as rules: who may import whom, how large things get, and words that must not appear.

These are guides to good shape. When one is in the way of clearer code, change the rule here and say why; never game it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("forerun", "server", "router", "engine", "backends", "kernels", "bench", "train")
LINKED = PARTS[1:]

MAY_IMPORT = {
    "forerun": {"forerun"},
    "server": {"server", "router", "forerun"},
    "router": {"router", "forerun"},
    "engine": {"engine", "backends", "kernels", "forerun"},
    "backends": {"backends", "kernels", "forerun"},
    "kernels": {"kernels"},
    "bench": set(PARTS),
    "train": {"train", "engine", "backends", "kernels", "forerun"},
}
"""Downward only. `engine` may use `kernels` for the parts that are plain torch (the dice) or the host's work on any device (look-ups);
a device it reaches through `backends.base`."""

ENTRY_POINTS = {"forerun/cli.py", "forerun/launch.py", "forerun/doctor.py"}
"""They put the parts together, so they import from all of them (lazily where a part is optional)."""


def sources(*parts: str) -> list[Path]:
    found: list[Path] = []
    for part in parts:
        pattern = "*.py" if part == "forerun" else "**/*.py"
        found += [path for path in sorted((ROOT / part).glob(pattern)) if "__pycache__" not in path.parts]
    assert found
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(module: str) -> str | None:
    """`forerun.router.pages` → `router`; `forerun.messages` → `forerun`; anything else → None."""
    first, _, rest = module.partition(".")
    if first != "forerun":
        return None
    second = rest.partition(".")[0]
    return second if second in LINKED else "forerun"


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative import"
            if node.module == "forerun":
                yield from (f"forerun.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("part", PARTS)
def test_imports_go_downward(part: str) -> None:
    for path in sources(part):
        if name_of(path) in ENTRY_POINTS:
            continue
        for module in imports(ast.parse(path.read_text())):
            target = part_of(module)
            assert target is None or target in MAY_IMPORT[part], f"{name_of(path)} imports {module}"
            assert module.partition(".")[0] not in LINKED, f"{name_of(path)}: import forerun.{module}, not {module}"


@pytest.mark.parametrize("part", ["forerun", "server", "router"])
def test_the_front_never_imports_a_tensor_library(part: str) -> None:
    for path in sources(part):
        for module in imports(ast.parse(path.read_text())):
            assert module.partition(".")[0] not in {"torch", "transformers", "numpy"}, f"{name_of(path)} imports {module}"


def test_devices_are_named_in_their_folders_only() -> None:
    for path in sources("server", "router", "engine"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            named = re.search(r"\b(cuda|npu|ascend)\b", line, re.IGNORECASE)
            assert not named, f"{name_of(path)}:{number} names a device: {line.strip()}"


def test_environment_is_read_in_one_place() -> None:
    for path in sources(*PARTS):
        if name_of(path) == "forerun/config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in {"environ", "getenv"}, f"{name_of(path)}:{node.lineno} reads the environment"


def own_classes() -> set[str]:
    """Classes of ours that carry behaviour. Messages (frozen data with a tag) and exceptions may be told apart by their type."""
    names: set[str] = set()
    for path in sources(*PARTS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                data = bases & {"Message", "Struct", "Exception", "ValueError", "RuntimeError", "NamedTuple"}
                if not data:
                    names.add(node.name)
    return names


def test_nobody_asks_what_class_something_is() -> None:
    ours = own_classes()
    for path in sources(*PARTS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                asked = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                assert not asked & ours, f"{name_of(path)}:{node.lineno} asks for {asked & ours}"


def test_files_and_functions_stay_small() -> None:
    for path in sources("forerun", "server", "router", "engine", "backends", "bench", "train"):
        text = path.read_text()
        lines = text.count("\n")
        assert lines <= 400, f"{name_of(path)} has {lines} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 50, f"{name_of(path)}:{node.lineno} {node.name} has {length} lines"


def test_every_module_says_what_it_is() -> None:
    for path in sources(*PARTS):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{name_of(path)} has no docstring"


UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]) + r")\b|NotImplementedError\(\)")


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_nothing_is_left_unfinished() -> None:
    for path in tracked("*.py", "*.cpp", "*.h", "Makefile", "Dockerfile", "*.sh"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not UNFINISHED.search(line), f"{name_of(path)}:{number}: {line.strip()}"


def test_symbolic_links_are_committed() -> None:
    for part in LINKED:
        link = ROOT / "forerun" / part
        assert link.is_symlink() and link.resolve() == ROOT / part


def test_documents_name_files_that_exist() -> None:
    """A page that follows a token through the files is worth nothing once a file was renamed."""
    pattern = re.compile(r"`((?:forerun|server|router|engine|backends|kernels|bench|tools|tests)/[\w./-]+\.(?:py|md|cpp|h|sh))`")
    for page in tracked("*.md"):
        for name in pattern.findall(page.read_text()):
            assert (ROOT / name).exists(), f"{name_of(page)} names {name}"
