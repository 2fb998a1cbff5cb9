"""A world for heads to be trained in: the tiny target, its texts, and options as they are given."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import numpy as np

from forerun.messages import Start
from forerun.train.kinds.registry import Setting, options
from forerun.train.shards import Record
from forerun.train.taps import Taps


def texts(count: int, prompt: int = 7, generated: int = 16, vocab: int = 512) -> list[Record]:
    """Random tokens, each certain to the target."""
    dice = np.random.default_rng(3)
    found = []
    for number in range(count):
        tokens = dice.integers(4, vocab, prompt + number + generated).astype(np.uint32)
        written = tokens[prompt + number :, None]
        found.append(Record(number, 256, prompt + number, tokens, written, np.zeros((generated, 1), np.float16)))
    return found


def setting(folder: Path) -> Setting:
    start = Start(model_id=str(folder), device="cpu", threads=1, dtype="float32")
    return Setting(folder, texts(12), 0, functools.cache(lambda layers: Taps(start, layers)))


def asked(kind: str, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options(kind, parser)
    return parser.parse_args(words)
