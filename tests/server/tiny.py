"""Tiny tokenizers of every decoder style, built on the spot."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

TEXT = "hello world the quick brown fox sees a 'more n't . , 12 añ 한글"


def byte_level() -> Tokenizer:
    """GPT-2's kind. Vocabulary: all bytes, a few merges, halves of characters, special and plain added tokens (one of them looks like
    the alphabet's name of byte 0xE9)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in ["Ġthe", "hello", "Ġquick", "ðŁ", "íķ", "Ã±"]:
        part = word[0]
        for char in word[1:]:
            if part + char not in vocab:
                vocab[part + char] = len(vocab)
                merges.append((part, char))
            part += char
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer)


def _sentencepiece_vocab() -> dict[str, int]:
    vocab = {"<unk>": 0}
    pieces = [*[f"<0x{byte:02X}>" for byte in range(256)], "▁", "▁▁", "▁the", "▁hello", "he", "llo", "한", "▁'", "m", "\n", "\ufffd", "#"]
    for piece in [*pieces, *sorted(set(TEXT) - {" "})]:
        vocab.setdefault(piece, len(vocab))
    return vocab


def llama() -> Tokenizer:
    """Llama-2's kind: byte fallback, one leading space stripped."""
    tokenizer = Tokenizer(models.BPE(vocab=_sentencepiece_vocab(), merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", len(_sentencepiece_vocab()))])
    return _with_added(tokenizer)


def gemma() -> Tokenizer:
    """Gemma's kind: byte fallback, nothing stripped."""
    tokenizer = llama()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace(scheme: str = "always") -> Tokenizer:
    tokenizer = llama()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def wordpiece(cleanup: bool = True) -> Tokenizer:
    words = ["[UNK]", "hello", "##lo", "##", "the", ".", ",", "n't", "'m", "'", "##s", "do", "?", "한글"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=cleanup)
    return _with_added(tokenizer)


def plain() -> Tokenizer:
    """No decoder: tokens joined by spaces."""
    tokenizer = wordpiece()
    tokenizer.decoder = None
    return tokenizer


def suffix() -> Tokenizer:
    """openai-gpt's kind: the end of a word is marked, and is a space only if another token follows."""
    words = ["<unk>", "hello</w>", "wor", "ld</w>", "a", "</w>", ".</w>", "é"]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return _with_added(tokenizer)


def repeats() -> Tokenizer:
    """A speech model's kind: a token equal to the one before it is nothing."""
    tokenizer = suffix()
    tokenizer.decoder = decoders.CTC(pad_token="a", word_delimiter_token="wor", cleanup=False)
    return tokenizer


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("é", special=False), AddedToken(" two words ", special=False)])
    return tokenizer


EXACT = {
    "byte_level": byte_level,
    "llama": llama,
    "gemma": gemma,
    "metaspace": metaspace,
    "metaspace_never": lambda: metaspace("never"),
    "wordpiece": wordpiece,
    "wordpiece_raw": lambda: wordpiece(cleanup=False),
    "plain": plain,
    "suffix": suffix,
    "repeats": repeats,
}
