"""What `--speculator` may say, and the cure for what it may not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forerun.config import SPECULATORS
from forerun.engine.drafters.dag import Dag
from forerun.engine.drafters.draft import Commit
from forerun.engine.drafters.ngram import Ngram
from forerun.engine.drafters.registry import AUTO, DRAFTERS, Setting, open_drafter
from forerun.engine.errors import StartError


def test_none_is_silent_and_auto_is_one_of_them() -> None:
    assert open_drafter("none", Setting()).needs.most == 0
    assert AUTO in DRAFTERS and type(open_drafter("auto", Setting())) is type(open_drafter(AUTO, Setting()))


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_nodes_are_asked_for_or_chosen(name: str) -> None:
    assert open_drafter(name, Setting(nodes=5)).needs.most == 5
    assert open_drafter(name, Setting()).needs.most == 16
    assert open_drafter(name, Setting()).needs.lazy


@pytest.mark.parametrize(
    "spec, cure", [("eagle", "suffix"), ("", "none"), ("ngram=4", "--speculator ngram"), ("suffix=tree", "suffix=chain")]
)
def test_what_nobody_knows_is_refused_with_a_cure(spec: str, cure: str) -> None:
    with pytest.raises(StartError) as error:
        open_drafter(spec, Setting())
    assert cure in error.value.cure


def siblings(spec: str, tree: bool) -> bool:
    drafter = open_drafter(spec, Setting(tree=tree))
    drafter.absorb(Commit([0], [0], [[1, 2, 3, 7, 1, 2, 3, 8, 1, 2]], [3]))
    return drafter.propose([0], [8])[0].parent.count(-1) > 1


def test_siblings_where_wanted_and_possible() -> None:
    assert siblings("suffix", tree=True)
    assert not siblings("suffix=chain", tree=True) and not siblings("suffix", tree=False)


def test_the_command_line_knows_them_all() -> None:
    """It says so before a worker is started, so it has a list of its own."""
    assert list(SPECULATORS) == sorted(DRAFTERS)


def test_a_drafter_is_imported_when_it_is_chosen() -> None:
    code = (
        "import sys; from forerun.engine.drafters import registry; loaded = lambda *names: [m for m in sys.modules if m.endswith(names)]; "
        "assert not loaded('ngram', 'suffix'); registry.open_drafter('ngram', registry.Setting()); assert not loaded('lookups', 'grams')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("spec", ["suffix+suffix=private", "suffix+suffix"])
def test_who_is_named_twice_is_joined_with_itself(spec: str) -> None:
    assert type(open_drafter(spec, Setting())) is Dag


def test_who_is_replaced_is_not_looked_for_in_native_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "suffix", DRAFTERS["ngram"])
    assert type(open_drafter("suffix", Setting())) is Ngram
