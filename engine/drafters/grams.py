"""Guesses from what the target says after a few tokens, in any text: `--speculator grams=DIR`, best as `suffix+grams=DIR`.

A back-off model of n-grams (Katz 1987) of the target's own greedy choices, counted once by `forerun train-drafter --kind grams`. It
needs no network, no KV and nothing of the text but its last tokens, so it guesses where a text says something for the first time, which
is where look-ups are silent: `suffix` knows the text, this knows the writer.

    … on the one        behind "on the one" nothing is known, behind "the one" nothing is, behind "one":  hand 0.31  of 0.22  who 0.04
                        hand: behind "the one hand" nothing, behind "one hand":  , 0.81

The longest context that is known answers, for it was smoothed by the shorter ones when it was counted. The tree grows by the product of
these chances. What is known never changes, so equal texts have equal drafts.
"""

from __future__ import annotations

import dataclasses
from array import array
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.drafting import fingerprint
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Terms
from forerun.engine.drafters.history import fresh
from forerun.engine.drafters.registry import Host, Setting
from forerun.engine.drafters.vocabulary import texts
from forerun.engine.errors import StartError
from forerun.engine.models.load import find
from forerun.engine.weights import open_checkpoint, read_config
from forerun.hub import ModelNotFound, locate

MOST = 8
"""guesses for a row: what comes after them hardly ever holds (measured on chat, code and copied text)"""
ORDER = 3
"""tokens of the longest context"""
WORD = 21
"""bits of a token in a key"""
MOST_VOCAB = (1 << WORD) - 1
"""ids of more tokens would share bits"""
MASKS = tuple((1 << WORD * order) - 1 for order in range(ORDER, 0, -1))
"""what is left of a key for contexts of 3, 2 and 1 tokens"""
FOLLOWERS = 4
"""tokens that are remembered behind a context"""
SURE = 255
"""the chance that stands for certainty"""
INDEX_BYTES = 120
"""of a context in a dict of its place: two ints and their share of the dict"""
LEAST_SURVIVAL = 0.01
SLACK = 0.5
"""Nodes down to so many times the price are mentioned: a row's experience may say that they are likelier."""
_TYPES = {"keys": torch.int64, "tokens": torch.int32, "chances": torch.uint8}
"""of what is stored"""
_CURE = "make one for this target with forerun train-drafter --kind grams"
_CHANCE = [min(stored / SURE, 0.98) for stored in range(SURE + 1)]


def extended(key: int, token: int) -> int:
    """The context of `ORDER` tokens, the newest in the lowest bits, that ends with `token`. A token is stored as its id plus one, so that
    keys of different lengths differ; 0 is a context of nothing."""
    return (key << WORD | token + 1) & MASKS[0]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Table:
    """`keys` int64 [n]: contexts of 1 to `ORDER` tokens (`extended`), none twice. `tokens` int32 [n, FOLLOWERS]: what follows each, the
    likeliest first, −1 = no more. `chances` uint8 [n, FOLLOWERS]: how likely, in parts of `SURE`. `vocab`: ids that the target has;
    `tokenizer`: fingerprint of what they stand for, "" = not known."""

    keys: NDArray[np.int64]
    tokens: NDArray[np.int32]
    chances: NDArray[np.uint8]
    vocab: int
    tokenizer: str = ""

    @staticmethod
    def read(folder: Path, host: Host | None = None) -> Table:
        """StartError for a folder that holds something else, values that cannot be, or a table that is not of `host`'s target. Values are
        read last: until then the header alone says what there is."""
        config: dict[str, Any] = read_config(folder) or {}
        if config.get("model_type") != "grams":
            raise StartError(f"{folder} holds no table of n-grams", _CURE)
        vocab, tokenizer = config.get("vocab_size"), str(config.get("tokenizer_fingerprint", ""))
        checkpoint = open_checkpoint(folder)
        views = {name: checkpoint.read(name) for name in _TYPES if name in checkpoint.names()}
        count = views["keys"].numel() if "keys" in views else -1
        whole = {name: (kind, (count,) if name == "keys" else (count, FOLLOWERS)) for name, kind in _TYPES.items()}
        if {name: (view.dtype, tuple(view.shape)) for name, view in views.items()} != whole or not isinstance(vocab, int):
            raise StartError(f"the table of n-grams in {folder} is damaged", _CURE)
        if vocab > MOST_VOCAB:
            raise StartError(
                f"the table of n-grams in {folder} is of {vocab} tokens, {MOST_VOCAB} fit into keys", "use --speculator suffix"
            )
        if host is not None:
            _check(vocab, tokenizer, folder, host)
        keys, tokens, chances = (view.clone().numpy() for view in views.values())
        checkpoint.release()
        if count and not -1 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            raise StartError(f"the table of n-grams in {folder} has tokens beyond its {vocab}", _CURE)
        return Table(keys, tokens, chances, vocab, tokenizer)

    @staticmethod
    def find(value: str, setting: Setting) -> Table:
        """Of a folder or hub id."""
        if not value:
            raise StartError("--speculator grams does not say which table", "use --speculator suffix+grams=DIR")
        try:
            folder = locate(value, None, setting.host.start.hub_cache if setting.host else None)
        except ModelNotFound as error:
            raise StartError(str(error), _CURE) from error
        return Table.read(folder, setting.host)

    @property
    def bytes(self) -> int:
        """What a `Grams` of it takes, with the index of its contexts."""
        return INDEX_BYTES * len(self.keys) + self.tokens.nbytes + self.chances.nbytes


class Grams:
    """`most`: nodes of a draft. `tree`: siblings may be verified; without, the draft is the likeliest path. Of a row only its last tokens
    are kept."""

    def __init__(self, table: Table, most: int = MOST, tree: bool = True) -> None:
        self.needs = Needs(most=most, lazy=True, weight_bytes=table.bytes)
        self._tree = tree
        self._place = dict(zip(table.keys.tolist(), range(0, FOLLOWERS * len(table.keys), FOLLOWERS)))
        self._tokens = array("i", table.tokens.tobytes())
        self._chances = table.chances.tobytes()
        self._rows: dict[int, tuple[int, int]] = {}
        """tokens that were told, and the context behind them"""

    @classmethod
    def open(cls, value: str, setting: Setting) -> Grams:
        """`value`: the folder or hub id of a table."""
        return cls(Table.find(value, setting), min(setting.nodes or MOST, MOST), setting.tree)

    def absorb(self, commit: Commit) -> None:
        for i, number in enumerate(commit.rows):
            known, key = self._rows.get(number, (0, 0)) if commit.start[i] else (0, 0)
            new = fresh(commit, i, known)
            for token in new[-ORDER:]:
                key = extended(key, token)
            self._rows[number] = known + len(new), key

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        least = max(LEAST_SURVIVAL, SLACK * terms.price)
        return [
            self._propose(self._rows[number][1], most, least) if number in self._rows else Draft.none()
            for number, most in zip(rows, budget)
        ]

    def forget(self, rows: list[int]) -> None:
        for number in rows:
            self._rows.pop(number, None)

    def _propose(self, key: int, most: int, least: float) -> Draft:
        """The likeliest `most` nodes behind a context, best first (so a parent comes before its child)."""
        token: list[int] = []
        parent: list[int] = []
        confidence: list[float] = []
        waiting: list[tuple[float, int, int, int, float, int]] = []
        """(−survival, order, token, parent, confidence, the context that the parent ends): nodes that may be next"""
        place, tokens, chances = self._place, self._tokens, self._chances
        at, survival, count = -1, 1.0, 0
        while len(token) < most:
            first = place.get(key)
            if first is None:
                first = place.get(key & MASKS[1])
            if first is None:
                first = place.get(key & MASKS[2], -1)
            if first >= 0:
                for follower in range(first, first + FOLLOWERS):
                    chance = _CHANCE[chances[follower]]
                    if survival * chance < least:
                        break
                    count += 1
                    heappush(waiting, (-survival * chance, count, tokens[follower], at, chance, key))
            if not waiting:
                break
            if not self._tree:
                del waiting[1:]
            negative, _, guess, above, chance, key = heappop(waiting)
            token.append(guess)
            parent.append(above)
            confidence.append(chance)
            at, survival, key = len(token) - 1, -negative, extended(key, guess)
        return Draft(token, parent, confidence, [False] * len(token))


def _check(vocab: int, tokenizer: str, folder: Path, host: Host) -> None:
    """StartError for a table of other tokens than the target's."""
    target = find(host.start)
    if vocab != host.model.vocab:
        raise StartError(f"the table of n-grams in {folder} is of {vocab} tokens, the target has {host.model.vocab}", _CURE)
    if tokenizer and (target / "tokenizer.json").is_file() and tokenizer != fingerprint(texts(target)):
        raise StartError(f"the table of n-grams in {folder} was counted with another tokenizer than the target's", _CURE)
