"""What grammars cost in the libraries that are installed: `python tools/grammar_libraries.py TOKENIZER.json` (llguidance, xgrammar).

For each grammar the milliseconds until it can be used, and the microseconds of a mask and of reading a token along a text that follows it.
xgrammar is no dependency of this project: install it beside it to compare.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import tokenizers

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "mails": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age"],
}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
    "required": ["v"],
}
WIDE = {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(300)}, "required": [f"f{i}" for i in range(300)]}
CASES: dict[str, tuple[Any, str]] = {
    "person": (PERSON, json.dumps({"name": "Jo Smith the first", "age": 33, "mails": ["a@b.de"]})),
    "recursive": ({"$defs": {"n": NODE}, "$ref": "#/$defs/n"}, json.dumps({"v": 1, "c": [{"v": 2, "c": []}]})),
    "300 fields": (WIDE, json.dumps({f"f{i}": "some text" for i in range(300)})),
    "5000 values": ({"enum": [f"value number {i}" for i in range(5000)]}, '"value number 77"'),
    "regex": (r"[a-z]+@[a-z]+\.(com|org)", "abc@defgh.com"),
}


class Llguidance:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        import llguidance

        self._library = llguidance.LLMatcher
        self._tables = llguidance.LLTokenizer(tokenizer.to_str())

    def compile(self, grammar: Any) -> tuple[Callable[[], object], Callable[[int], bool]]:
        library = self._library
        made = library.grammar_from_regex(grammar) if isinstance(grammar, str) else library.grammar_from_json_schema(grammar)
        matcher = library(self._tables, made, log_level=0)
        return matcher.compute_bitmask, matcher.consume_token


class Xgrammar:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        import xgrammar

        size = tokenizer.get_vocab_size()
        names = [tokenizer.id_to_token(i) for i in range(size)]
        info = xgrammar.TokenizerInfo(names, vocab_type=xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[0])
        self._library = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, size)

    def compile(self, grammar: Any) -> tuple[Callable[[], object], Callable[[int], bool]]:
        regex = isinstance(grammar, str)
        made = self._compiler.compile_regex(grammar) if regex else self._compiler.compile_json_schema(json.dumps(grammar))
        matcher = self._library.GrammarMatcher(made)
        return lambda: matcher.fill_next_token_bitmask(self._mask), matcher.accept_token


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return call(), time.perf_counter() - began


def main(file: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(file)
    for name, library in (("llguidance", Llguidance), ("xgrammar", Xgrammar)):
        if find_spec(name) is None:
            print(f"{name}: not installed")
            continue
        found, seconds = timed(lambda library=library: library(tokenizer))
        print(f"{name}: {seconds * 1e3:.0f} ms to load it and the tokenizer")
        for case, (grammar, text) in CASES.items():
            (mask, read), seconds = timed(lambda found=found, grammar=grammar: found.compile(grammar))
            masks, reads = [], []
            for token in tokenizer.encode(text, add_special_tokens=False).ids:
                masks.append(timed(mask)[1])
                held, took = timed(lambda read=read, token=token: read(token))
                reads.append(took)
                if not held:
                    break
            middle, most = np.median(masks) * 1e6, max(masks) * 1e6
            print(
                f"  {case:12} {seconds * 1e3:8.1f} ms   mask {middle:6.0f} us, at most {most:7.0f}   token {np.median(reads) * 1e6:5.0f} us"
            )


if __name__ == "__main__":
    main(sys.argv[1])
