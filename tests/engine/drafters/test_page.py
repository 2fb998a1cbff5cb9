"""What docs/drafters.md says about writing a drafter works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.drafters.layouts import BEST_FIRST
from forerun.engine.drafters.registry import DRAFTERS, Setting
from tests.engine.test_identity import fresh, truth
from tests.engine.test_registered import Watched
from tests.engine.tiny import Front, tiny_engine

PAGE = (Path(__file__).parents[3] / "docs" / "drafters.md").read_text()


@pytest.mark.parametrize("kind", ["greedy", "everything"])
def test_the_drafter_of_the_page(kind: str) -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Echo" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    answers = [truth(kind, seed, length) for seed, length in ((1, 21), (2, 5), (3, 40))]
    drafter = names["Echo"].open("", Setting())
    watched = Watched(drafter)
    front = Front(tiny_engine(watched))
    sequences = [fresh(answer) for answer in answers]
    for sequence in sequences:
        front.admit(sequence)
    front.run(guess=8)  # more than it says it makes, as every identity test asks for
    assert [s.answer for s in sequences] == [a.answer for a in answers] and not drafter._rows and not watched.rows
    assert sum(s.drafted for s in sequences) > 0 and (kind != "greedy" or sum(s.accepted for s in sequences) > 0)


def test_every_drafter_is_on_the_page() -> None:
    table = PAGE.partition("`--speculate N`")[0] + PAGE.partition("## Lookahead")[2]
    assert all(re.search(rf"`{name}[=\[`,]|speculator {name}|[+`]{name}=", table) for name in DRAFTERS), sorted(DRAFTERS)
    assert set(BEST_FIRST) <= set(DRAFTERS)
