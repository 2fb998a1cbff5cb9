"""Increments are whole characters and together equal the tokenizer's own decode, whatever the ids."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import cast

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.server.detokenize import WindowDetokenizer, _byte, vocabulary
from forerun.server.text import Tokenizer
from tests.server import tiny

TOKENIZERS = {name: Tokenizer(make()) for name, make in tiny.EXACT.items()}
LOCAL = [name for name in TOKENIZERS if name not in ("byte_level", "suffix", "repeats")]
PROMPTS = ["hello the", "the", "한글 hello", "a"]


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    size = TOKENIZERS[name].vocab_size
    return st.lists(st.one_of(st.integers(0, size - 1), st.integers(size - 6, size + 3), st.integers(0, min(size, 260) - 1)), max_size=40)


def expected(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What decode gives, except that of a run of byte tokens with a bad byte the whole characters before it stay. Found by decoding
    with a token of text U+FFFD in the place of each spoilt byte."""
    if b"ByteFallback" not in (tokenizer._rust.decoder.__getstate__() if tokenizer._rust.decoder else b""):
        return tokenizer.decode(ids)
    bad = tokenizer._rust.token_to_id("\ufffd")
    ids = [token_id for token_id in ids if tokenizer._rust.id_to_token(token_id) and not tokenizer.is_special(token_id)]
    values = [_byte(tokenizer._rust, token_id) for token_id in ids]
    for start, end in runs(values):
        whole = 0
        for length in range(1, end - start + 1):
            with contextlib.suppress(UnicodeDecodeError):
                bytes(values[start : start + length]).decode()
                whole = length
        ids[start + whole : end] = [bad] * (end - start - whole)
    return tokenizer.decode(ids)


def runs(values: list[int | None]) -> list[tuple[int, int]]:
    edges = [i for i in range(len(values) + 1) if (i < len(values) and values[i] is not None) != (i > 0 and values[i - 1] is not None)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def pieces_of(tokenizer: Tokenizer, context: list[int], ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(context)
    return [*[detokenizer.push(token_id) for token_id in ids], detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_equal_one_decode(name: str, data: st.DataObject) -> None:
    tokenizer, ids = TOKENIZERS[name], data.draw(ids_of(name))
    assert "".join(pieces_of(tokenizer, [], ids)) == expected(tokenizer, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(seed=st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_long_answers_too(name: str, seed: random.Random) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [seed.randrange(tokenizer.vocab_size) for _ in range(400)]
    assert "".join(pieces_of(tokenizer, [], ids)) == expected(tokenizer, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_pieces_continue_their_context(name: str, data: st.DataObject) -> None:
    """Behind a prompt the text is what decode adds to the prompt's (A06, A07: a leading space is kept)."""
    tokenizer, ids = TOKENIZERS[name], data.draw(ids_of(name))
    context = TOKENIZERS[name]._rust.encode(data.draw(st.sampled_from(PROMPTS))).ids
    whole, before = expected(tokenizer, context + ids), tokenizer.decode(context)
    if whole.startswith(before):
        assert "".join(pieces_of(tokenizer, context, ids)) == whole[len(before) :]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_context_without_text_is_the_beginning(name: str, data: st.DataObject) -> None:
    tokenizer, ids = TOKENIZERS[name], data.draw(ids_of(name))
    bos = tokenizer._rust.token_to_id("<s>")
    assert "".join(pieces_of(tokenizer, [bos] * data.draw(st.integers(0, 40)), ids)) == expected(tokenizer, ids)


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma"])
@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_real_text_never_shows_a_replacement_character(name: str, text: str) -> None:
    """A01: no piece has a U+FFFD that the text lacks, also where a character takes several tokens."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer._rust.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    pieces = pieces_of(tokenizer, [], ids)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.binary(min_size=1, max_size=6), max_size=20))
@settings(max_examples=300, deadline=None)
def test_any_bytes_in_any_cut(parts: list[bytes]) -> None:
    """The incremental decoder agrees with the tokenizer's (Rust's) idea of where a broken character ends."""
    tokenizer = TOKENIZERS["byte_level"]
    letters = {value: key for key, value in tokenizer._vocabulary._alphabet.items()}  # type: ignore[attr-defined]
    ids = [tokenizer._rust.token_to_id(letters[byte]) for part in parts for byte in part]
    assert "".join(pieces_of(tokenizer, [], ids)) == tokenizer.decode(ids) == b"".join(parts).decode(errors="replace")


def test_an_emoji_leaves_when_it_is_whole() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer._rust.encode("a🧵b").ids
    pieces = pieces_of(tokenizer, [], ids)
    assert [piece for piece in pieces if piece] == ["a", "🧵", "b"]
    assert "".join(pieces_of(tokenizer, [], ids[:3])) == "a\ufffd"


def test_ids_that_do_not_exist_have_no_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    a = tokenizer._rust.encode("a").ids
    assert pieces_of(tokenizer, [], [tokenizer.vocab_size, *a, 10**9, *a])[:4] == ["", "a", "", "a"]


def bytes_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [tokenizer._rust.token_to_id(f"<0x{byte:02X}>") for byte in data]


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_byte_tokens_leave_when_they_complete_a_character(name: str) -> None:
    """Also right before an end-of-sequence token, which is when most emojis come."""
    tokenizer = TOKENIZERS[name]
    ids = [*bytes_of(tokenizer, "🧵é".encode()), tokenizer._rust.token_to_id("</s>")]
    assert pieces_of(tokenizer, [], ids) == ["", "", "", "🧵", "", "é", "", ""]


def test_a_bad_byte_spoils_the_rest_of_its_run() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = [*bytes_of(tokenizer, b"\xc3\xa9\xff\x41"), tokenizer._rust.token_to_id("m"), *bytes_of(tokenizer, b"\xc3\xa9")]
    assert pieces_of(tokenizer, [], ids) == ["", "é", "\ufffd", "\ufffd", "m", "", "é", ""]


@pytest.mark.parametrize("name", ["llama", "gemma"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_runs_of_good_bytes_equal_one_decode(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    others = st.lists(st.integers(257, tokenizer.vocab_size - 1), max_size=3)
    characters = st.text(max_size=3).map(lambda text: bytes_of(tokenizer, text.encode()))
    ids = [token_id for part in data.draw(st.lists(st.one_of(characters, others))) for token_id in part]
    text = "".join(pieces_of(tokenizer, [], ids))
    assert text == tokenizer.decode(ids)


def test_spaces_of_sentencepiece_are_kept() -> None:
    """A07: tokens decoded one by one lose their spaces; increments do not."""
    tokenizer = TOKENIZERS["llama"]
    prompt = tokenizer._rust.encode("hello").ids
    the = tokenizer._rust.token_to_id("▁the")
    assert pieces_of(tokenizer, prompt, [the, the, the]) == [" the", " the", " the", ""]
    assert pieces_of(tokenizer, [], [the, the]) == ["the", " the", ""]


@pytest.mark.parametrize("text", ["see 'more", "is n't", "a .", "a , b", " 's"])
def test_spaces_before_punctuation_are_kept(text: str) -> None:
    """A05: no clean-up of English contractions."""
    for name in ("byte_level", "llama", "gemma"):
        tokenizer = TOKENIZERS[name]
        ids = tokenizer._rust.encode(text, add_special_tokens=False).ids
        whole = "".join(pieces_of(tokenizer, [], ids))
        assert whole == tokenizer.decode(ids)
        assert whole.strip() == text.strip()


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.id_to_token, self._inner, self.decoded = inner.id_to_token, inner, 0

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return self._inner.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_token_costs_no_more_the_longer_the_text(name: str) -> None:
    """Also where the same one comes for ever, and shows nothing: special ones, ids that do not exist, bytes that complete no character,
    U+FFFD as a text of its own; behind a prompt with text and behind one without."""
    tokenizer = TOKENIZERS[name]
    size, special = tokenizer.vocab_size, sorted(tokenizer._special)
    kinds = {*special, *range(0, size, 7), size - 1, size + 3, tokenizer._rust.token_to_id("\ufffd") or 0}
    for token_id in sorted(kinds):
        for context in ([], tokenizer._rust.encode("hello").ids, special[:1] * 400):
            known = vocabulary(tokenizer._rust, frozenset(special))
            counting = known._tokenizer = Counting(tokenizer._rust)  # type: ignore[attr-defined, assignment]
            detokenizer = known.detokenizer(context)
            before = counting.decoded
            for _ in range(300):
                detokenizer.push(token_id)
            assert counting.decoded - before <= 300 * 128


def test_what_stays_unclear_leaves_as_it_is() -> None:
    """A text of U+FFFD, as tokens of their own, is no character that is still to be completed."""

    class Unclear:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(i) if i else "\ufffd" for i in ids)

    ids = [*b"before", *[0] * 1000, *b"behind", 0]
    detokenizer = WindowDetokenizer(cast(tokenizers.Tokenizer, Unclear()), [])
    pieces = [detokenizer.push(token_id) for token_id in ids]
    silent = max(len(list(run)) for said, run in itertools.groupby(pieces, key=bool) if not said)
    assert silent <= 128 and "".join([*pieces, detokenizer.flush()]) == "before" + 1000 * "\ufffd" + "behind\ufffd"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_flush_without_tokens_is_empty(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for context in ([], tokenizer._rust.encode("hello").ids):
        assert tokenizer.detokenizer(context).flush() == ""


def test_each_decoder_gets_its_way() -> None:
    ways = {name: type(TOKENIZERS[name]._vocabulary).__name__ for name in TOKENIZERS}
    assert ways.pop("byte_level") == "ByteVocabulary"
    assert ways.pop("suffix") == ways.pop("repeats") == "WindowVocabulary"
    assert set(ways.values()) == {"LocalVocabulary"}
    assert set(ways) == set(LOCAL)
