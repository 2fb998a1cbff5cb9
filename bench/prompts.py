"""Where prompts come from: a file of conversations, or words drawn at random."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

COMMON = (
    "the time year people way day man thing woman life child world school state family student group country problem hand part place "
    "case week company system program question work government number night point home water room mother area money story fact month "
    "lot right study book eye job word business issue side kind head house service friend father power hour game line end member law "
    "car city community name president team minute idea body information back parent face others level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force education"
)
WORDS = COMMON.split()


class PromptError(ValueError):
    """A prompt file that cannot be used; the message says which line and why."""


def from_file(path: Path) -> Iterator[str]:
    """The file's prompts over and over, in its order. Raises PromptError at once."""
    return itertools.cycle(read(path))


def read(path: Path) -> list[str]:
    """The first turn of each line's {"turns": [...]}. Raises PromptError."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(str(json.loads(line)["turns"][0]))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise PromptError(f'{path}, line {number}: expected {{"turns": ["first message", …]}} ({error!r})') from error
    if not prompts:
        raise PromptError(f"{path} has no prompts")
    return prompts


def synthetic(words: int, seed: int = 0) -> Iterator[str]:
    """Endless prompts of so many common words (about as many tokens). They differ from the first word on, so that no prefix cache
    can help; the same seed gives the same prompts."""
    dice = random.Random(seed)
    for number in itertools.count():
        yield " ".join([f"{number}", *dice.choices(WORDS, k=max(1, words) - 1)])
