"""Which draft token is which target token.

Ids mean nothing by themselves: two models understand each other where their ids stand for the same text. Equal tables need no translation.
Otherwise tokens are matched one by one by the text they stand for (token-level intersection, Timor et al. 2502.05202), whatever way
the two files spell it. A draft token that the target lacks is never proposed; a target token that the draft lacks is read to it as its
unknown token. Exactness is the verification's business: a bad match here costs acceptance and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.engine.errors import StartError

Ids = NDArray[np.int64]
LEAST_KNOWN = 0.5
"""share of the draft's tokens that the target must know"""


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """`to_target[d]`: the target's id of draft token d, −1 = it has none. `to_draft[t]`: what target token t is read as, −1 = as nothing.
    `same`: the ids are equal, neither table is needed."""

    to_target: Ids
    to_draft: Ids
    same: bool

    @property
    def shared(self) -> int:
        """Tokens that both know."""
        return int((self.to_target >= 0).sum())


def match(target: Path, draft: Path, target_size: int, draft_size: int) -> Vocabulary:
    """From two model folders with a tokenizer.json, and the rows of the models' output heads (which may be padded). StartError when there
    is none, or when the two know too few tokens of each other."""
    theirs, ours = texts(target), texts(draft)
    theirs, ours = theirs[:target_size], ours[:draft_size]
    ids = {text: id for id, text in reversed(list(enumerate(theirs))) if text is not None}
    to_target = np.full(draft_size, -1, np.int64)
    for id, text in enumerate(ours):
        if text is not None:
            to_target[id] = id if id < len(theirs) and theirs[id] == text else ids.get(text, -1)
    known, listed = int((to_target >= 0).sum()), sum(text is not None for text in ours)
    if known < max(1, LEAST_KNOWN * listed):
        raise StartError(
            f"the target knows {known} of the {listed} tokens of the draft model {draft}: it was made for another tokenizer",
            "use a draft model with the target's tokenizer, or --speculator suffix, which needs none",
        )
    same = known == len(theirs) == listed and bool((to_target[:known] == np.arange(known)).all())
    to_draft = np.full(target_size, unknown_id(draft, ours, draft_size), np.int64)
    for id in np.flatnonzero(to_target >= 0)[::-1]:
        to_draft[to_target[id]] = id
    return Vocabulary(to_target, to_draft, same)


def texts(folder: Path) -> list[bytes | None]:
    """For each id the text it stands for; None where the tokenizer has no such id."""
    description = _read(folder / "tokenizer.json")
    model: dict[str, Any] = description.get("model") or {}
    vocab = model.get("vocab") or {}
    pieces = vocab.items() if isinstance(vocab, dict) else ((entry[0], id) for id, entry in enumerate(vocab))
    spell = _byte_level if '"ByteLevel"' in json.dumps([description.get("pre_tokenizer"), description.get("decoder")]) else _spaced
    found = {id: spell(piece) for piece, id in pieces}
    found |= {added["id"]: added["content"].encode() for added in description.get("added_tokens") or []}
    return [found.get(id) for id in range(max(found, default=-1) + 1)]


def unknown_id(folder: Path, ours: list[bytes | None], size: int) -> int:
    """What the draft reads in place of a token that it does not know: its unknown token, else the one that pads or ends a text, else −1."""
    model: dict[str, Any] = _read(folder / "tokenizer.json").get("model") or {}
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    settings = _read(folder / "tokenizer_config.json", needed=False) | _read(folder / "special_tokens_map.json", needed=False)
    for name in (model.get("unk_token"), *(settings.get(kind) for kind in ("unk_token", "pad_token", "eos_token", "bos_token"))):
        text = name["content"] if isinstance(name, dict) else name
        if text is not None and text.encode() in ours[:size]:
            return ours.index(text.encode())
    return -1


def _read(file: Path, needed: bool = True) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not needed:
            return {}
        raise StartError(
            f"{file.parent} has no {file.name}, so that draft and target tokens cannot be compared",
            "save the model's tokenizer there in its fast form (AutoTokenizer.from_pretrained(…).save_pretrained(…))",
        ) from error
    except (OSError, ValueError) as error:
        raise StartError(f"{file} cannot be read: {error}", "fetch the model again") from error
    return found


def _spaced(piece: str) -> bytes:
    """SentencePiece's spelling: ▁ is a space, <0x0A> a byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace("▁", " ").encode()


def _alphabet() -> dict[str, int]:
    """The character that stands for each byte in GPT-2's spelling: itself where it is printable, else one of those from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:
        return piece.encode()
