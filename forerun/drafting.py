"""What a worker and a draft service say to each other: token ids over HTTP, as msgpack.

    POST /v1/hello   Hello ─▶ Welcome        who drafts for whom; Refusal (409) if their tokens are not the same
    POST /v1/ask     Ask   ─▶ Answer         what became true of some sequences ─▶ guesses at how they go on; Refusal (409) to a stranger

The worker owns the truth. It says of each sequence what the service should know already (`base` tokens) and what came since; a service
that knows something else (it was started anew, or made room for others) names the sequence in `lost` and is told all of it next time; one
that has no room for it names it in `full`, and is left alone with it for a while. Every guess names the length it was built on. A worker
that lost its trust begins a new *epoch*; whatever is of an older one counts for nothing. Nothing that a
service says can change a text: guesses are verified like any others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from forerun.messages import SamplingParams

HELLO, ASK = "/v1/hello", "/v1/ask"
VERSION = 1


class Hello(msgspec.Struct, frozen=True, tag=True):
    """`session`: a name that only this worker has. `vocab`: token ids are below it. `tokens`: `fingerprint` of them."""

    session: str
    epoch: int
    vocab: int
    tokens: str
    version: int = VERSION


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """`most`: guesses that it makes of a sequence. `drafter`: what it is, for people."""

    epoch: int
    most: int
    drafter: str


class Heard(msgspec.Struct, frozen=True):
    """Of sequence `key`: behind its first `base` tokens came these. At most `most` guesses are wanted. `params`, `scope`: how its tokens
    are chosen, and whose it is, told with base = 0 only."""

    key: int
    base: int
    tokens: list[int]
    most: int
    params: SamplingParams | None = None
    scope: str = ""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """`closed`: sequences that are over."""

    session: str
    epoch: int
    rows: list[Heard]
    closed: list[int] = []


class Guess(msgspec.Struct, frozen=True):
    """A tree of guesses behind the first `base` tokens of sequence `key`; lists as in `engine.drafters.draft.Draft`."""

    key: int
    base: int
    token: list[int]
    parent: list[int]
    confidence: list[float]


class Answer(msgspec.Struct, frozen=True, tag=True):
    """`lost`: sequences of which the service does not know the base. `full`: those that it has no room for now."""

    epoch: int
    drafts: list[Guess]
    lost: list[int] = []
    full: list[int] = []


class Refusal(msgspec.Struct, frozen=True, tag=True):
    error: str
    cure: str = ""


def fingerprint(texts: Iterable[bytes | None]) -> str:
    """Of the texts that a tokenizer's ids stand for, in order: two that agree in it mean the same by every id."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(b"-" if text is None else b"+%d:" % len(text) + text)
    return digest.hexdigest()[:32]
