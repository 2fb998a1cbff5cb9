"""What a draft would earn: how often its guesses hold, and how many tokens a step would bring.

Which token the target picks does not depend on speculation, so a text that was written once tells exactly what a draft would have
earned on it.

    hits[p, d]   guess d + 1 of a draft that starts at place p holds, if those before it do
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.train.kinds.registry import Draft
from forerun.train.shards import Record

DEPTH = 8
LENGTHS = (1, 2, 4, 8)
Hits = NDArray[np.bool_]


def by_position(texts: Sequence[Hits]) -> list[float]:
    """P(guess d + 1 holds | those before it did), over every place behind which there is enough text; the list ends where nothing got so
    far."""
    rates: list[float] = []
    for depth in range(DEPTH):
        starts = [hits[1 : max(1, len(hits) - depth), : depth + 1] for hits in texts]
        reached = sum(int(part[:, :depth].all(1).sum()) for part in starts)
        if not reached:
            break
        rates.append(sum(int(part.all(1).sum()) for part in starts) / reached)
    return rates


def tokens_a_step(texts: Sequence[Hits], guesses: int) -> float:
    """Tokens over steps when each step verifies a chain of so many guesses. The first token of a text comes from its prompt."""
    tokens = steps = 0
    for hits in texts:
        at = 1
        while at < len(hits):
            chain = hits[at, : min(guesses, len(hits) - at - 1)]
            held = len(chain) if chain.all() else int(chain.argmin())
            tokens, steps, at = tokens + held + 1, steps + 1, at + held + 1
    return tokens / max(1, steps)


def measure(draft: Draft, texts: Sequence[Record]) -> dict[str, Any]:
    """`first`: share of first guesses that hold; `positions`: the same for each further one, given the ones before it; `tokens_a_step`: by
    the number of guesses."""
    hits = [draft.hits(text, DEPTH) for text in texts]
    rates = by_position(hits)
    return {
        "texts": len(texts),
        "tokens": sum(text.generated for text in texts),
        "first": round(rates[0], 4) if rates else 0.0,
        "positions": [round(rate, 4) for rate in rates],
        "tokens_a_step": {str(guesses): round(tokens_a_step(hits, guesses), 3) for guesses in LENGTHS},
    }


def line(measured: dict[str, Any]) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in measured["positions"][:4])
    lengths = ", ".join(f"{length:.2f} at {guesses}" for guesses, length in measured["tokens_a_step"].items())
    return f"guesses hold {rates}; tokens a step {lengths}"
