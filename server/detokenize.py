"""Token ids to text, one at a time. Owns the increments: each is whole characters, and together they are what the tokenizer's own decode
gives for all ids at once (special tokens skipped). Knows neither requests nor stop strings.

Three ways, chosen once from the tokenizer's decoder:

    bytes    byte-level BPE: a token is bytes. An increment is what those bytes complete.
    local    Metaspace, WordPiece, byte fallback, none: behind the first visible text, what a token adds depends on nothing before it.
             Two exceptions: the beginning (a leading space is stripped) is decoded whole until it shows text; byte tokens
             (<0xE2><0x82><0xAC>) are text when they complete a character.
    window   anything else: decode a window twice and take what is new.

One deliberate difference: decode turns a whole run of byte tokens into U+FFFD when any byte of it is bad. Characters that have left
stay (holding them until the run ends would keep an emoji from the reader, and lose it before an end-of-sequence token): the run is
U+FFFD from its first bad byte on.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tokenizers


class Detokenizer(Protocol):
    """One sequence's text. Not reusable after `flush`."""

    def push(self, token_id: int) -> str:
        """The text this token completes; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The rest, once no more tokens come: an incomplete character is what decode makes of it (U+FFFD)."""
        ...


class Vocabulary(Protocol):
    """Makes the detokenizers of one tokenizer and keeps what they share."""

    def detokenizer(self, context: Sequence[int]) -> Detokenizer: ...


def vocabulary(tokenizer: tokenizers.Tokenizer, special: frozenset[int]) -> Vocabulary:
    """The cheapest way that is exact for this tokenizer's decoder."""
    steps = _steps(tokenizer)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteVocabulary(tokenizer, special)
    if _is_local(steps):
        anchor = _anchor(tokenizer, special)
        if anchor is not None:
            return LocalVocabulary(tokenizer, anchor, special, any(step["type"] == "ByteFallback" for step in steps))
    return WindowVocabulary(tokenizer)


def _steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder as a flat list of its steps."""
    if tokenizer.decoder is None:
        return []

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        return [part for inner in step["decoders"] for part in flat(inner)] if step["type"] == "Sequence" else [step]

    return flat(json.loads(tokenizer.decoder.__getstate__()))


def _is_local(steps: Iterable[dict[str, Any]]) -> bool:
    """Before Fuse every step sees one token at a time; behind it, the whole text."""
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif not fused:
            if kind not in ("Replace", "Strip", "Metaspace", "WordPiece", "ByteFallback"):
                return False
        elif kind == "Replace":
            if len(step["pattern"].get("String", "")) != 1:
                return False
        elif kind != "Strip" or step["stop"]:
            return False
    return True


def _anchor(tokenizer: tokenizers.Tokenizer, special: frozenset[int]) -> int | None:
    """A token with visible text to stand before others, so that they are not the beginning."""
    ids = (i for i in range(tokenizer.get_vocab_size(with_added_tokens=False)) if i not in special)
    return next((i for i in ids if _byte(tokenizer, i) is None and tokenizer.decode([i]).isalnum()), None)


def _byte(tokenizer: tokenizers.Tokenizer, token_id: int) -> int | None:
    """The byte that a token like <0xE2> stands for."""
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", tokenizer.id_to_token(token_id) or "")
    return int(match[1], 16) if match else None


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


class ByteVocabulary:
    """What it knows of a token is found out when the token first comes up: to read a whole large vocabulary takes longer than all texts."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special: frozenset[int]) -> None:
        self.whole: list[str | None] = [None] * tokenizer.get_vocab_size(with_added_tokens=True)
        """by token id: its text, if that is whole characters (a list, since looking up is most of what a token costs)"""
        self._broken: dict[int, bytes] = {}
        self._tokenizer = tokenizer
        self._special = special
        self._alphabet = _byte_of_char()

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        """A prompt ends with a whole character, so the context does not matter."""
        return ByteDetokenizer(self)

    def bytes_of(self, token_id: int) -> bytes:
        """A special token has none, nor has an id that does not exist."""
        data = self._broken.get(token_id)
        if data is None:
            data = self._read(token_id)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                self._broken[token_id] = data
            else:
                if token_id < len(self.whole):
                    self.whole[token_id] = text
        return data

    def _read(self, token_id: int) -> bytes:
        token = "" if token_id in self._special else self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes([self._alphabet[char] for char in token])
        except KeyError:
            return token.encode()


class ByteDetokenizer:
    __slots__ = ("_pending", "_vocabulary", "_whole")

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self._whole = vocabulary.whole
        self._pending = b""
        """the beginning of a character"""

    def push(self, token_id: int) -> str:
        if not self._pending and token_id < len(self._whole):
            whole = self._whole[token_id]
            if whole is not None:
                return whole
        data = self._pending + self._vocabulary.bytes_of(token_id)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text = self._pending.decode(errors="replace")
        self._pending = b""
        return text


class LocalVocabulary(dict[int, str | int | None]):
    """Token id → the text it adds behind other text, or the byte it is; None for what decode leaves out (special tokens, ids that do not
    exist). Filled as tokens come up."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, anchor: int, special: frozenset[int], byte_fallback: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._anchor = anchor
        self._special = special
        self._skip = len(tokenizer.decode([anchor]))
        self._byte_fallback = byte_fallback

    def __missing__(self, token_id: int) -> str | int | None:
        found: str | int | None = None
        if token_id not in self._special and self._tokenizer.id_to_token(token_id) is not None:
            byte = _byte(self._tokenizer, token_id) if self._byte_fallback else None
            found = self.inner([token_id]) if byte is None else byte
        self[token_id] = found
        return found

    def inner(self, ids: Sequence[int]) -> str:
        """What these tokens add behind other text."""
        return self._tokenizer.decode([self._anchor, *ids])[self._skip :]

    def outer(self, ids: Sequence[int]) -> str:
        """What these tokens are at the beginning."""
        return self._tokenizer.decode(ids)

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        shown = self.outer(context[-16:]) or self.outer(context)
        return LocalDetokenizer(self, None if shown else [token_id for token_id in context if self[token_id] is not None])


class LocalDetokenizer:
    __slots__ = ("_beginning", "_bytes", "_ids", "_spoilt", "_vocabulary")

    def __init__(self, vocabulary: LocalVocabulary, beginning: list[int] | None) -> None:
        self._vocabulary = vocabulary
        self._beginning = beginning
        """all ids that are not left out, while they show no text yet, then None"""
        self._bytes = b""
        """the beginning of a character, and the ids it came as"""
        self._ids: list[int] = []
        self._spoilt = False
        """the run of byte tokens had a bad byte: what else comes of it is bad too"""

    def push(self, token_id: int) -> str:
        text = self._vocabulary[token_id]
        if text is None:
            return ""
        if isinstance(text, int):
            return self._push_byte(token_id, text)
        if self._beginning is None:
            if text and (self._bytes or self._spoilt):
                return self._end_run() + text
            return text
        if self._bytes and text:
            return self._end_run() + text
        return self._begin([token_id])

    def flush(self) -> str:
        return self._end_run()

    def _push_byte(self, token_id: int, byte: int) -> str:
        if self._spoilt:
            return "\ufffd"
        self._bytes += bytes((byte,))
        self._ids.append(token_id)
        try:
            _, used = utf_8_decode(self._bytes, "strict", False)
        except UnicodeDecodeError:
            text = self._end_run()
            self._spoilt = True
            return text
        if not used:
            return ""
        ids, self._ids, self._bytes = self._ids, [], b""
        return self._vocabulary.inner(ids) if self._beginning is None else self._begin(ids)

    def _end_run(self) -> str:
        """The bytes that complete no character, one U+FFFD each as decode does."""
        text = "\ufffd" * len(self._bytes)
        if text:
            self._beginning = None
        self._bytes, self._ids, self._spoilt = b"", [], False
        return text

    def _begin(self, ids: list[int]) -> str:
        assert self._beginning is not None
        self._beginning += ids
        text = self._vocabulary.outer(self._beginning)
        if text:
            self._beginning = None
        return text


class WindowVocabulary:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        return WindowDetokenizer(self._tokenizer, list(context[-_KEPT:]))


_KEPT = 16
"""tokens a window keeps of what is already out"""
_WINDOW = 64
_LONGEST = 2 * _WINDOW
"""a window that still says nothing new for certain says it as it is: U+FFFD that stays is no character that is still to be completed"""


class WindowDetokenizer:
    __slots__ = ("_ids", "_sent", "_tokenizer")

    def __init__(self, tokenizer: tokenizers.Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = context
        self._sent = tokenizer.decode(context)
        """the text of the window that is out; the window's text begins with it, or what is new waits"""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if len(self._ids) < _LONGEST and (text.endswith("\ufffd") or not text.startswith(self._sent)):
            return ""
        new = text[len(self._sent) :]
        self._sent = text
        if len(self._ids) > _WINDOW:
            self._ids = self._ids[-_KEPT:]
            self._sent = self._tokenizer.decode(self._ids)
        return new

    def flush(self) -> str:
        return self._tokenizer.decode(self._ids)[len(self._sent) :]
