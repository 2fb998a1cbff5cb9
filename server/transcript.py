"""What one sequence has said so far: tokens become text, stop strings cut it, and the end is recognised.

Used alike by a stream of events and by a collected answer, so that both always say the same. Knows no socket and no JSON layout beyond
the token structs. Invariants: the pieces of the tokens that are not special, put together, are `text()`; nothing comes after `finish`.

The native routes show special tokens in the events and leave them out of the text. On `/v1` there is only the text: special tokens are
nothing, unless they are marks that somebody reads (`marks`), and what may become a stop string is held back until it is clear.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Sequence
from typing import Protocol

from forerun.messages import SamplingParams
from forerun.router.request import Run
from forerun.server.schema import FinishReason, Origin, PrefillToken, Speculation, Token

_single = struct.Struct("<f").pack
_USUAL = [10.0**exponent for exponent in range(-6, 4)]
_SIX_DIGITS = [10.0 ** (6 - exponent) for exponent in range(-6, 4)]
"""[i] brings what is below `_USUAL[i]` to six digits before the point"""


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text this id adds; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What an incomplete character comes to."""
        ...


class StopMatcher(Protocol):
    def push(self, text: str) -> tuple[str, bool]:
        """The part of the text that may be shown, and whether a stop string ended in it."""
        ...

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        ...


class Vocabulary(Protocol):
    """What a transcript needs of a tokenizer."""

    def is_special(self, token_id: int) -> bool: ...
    def token_text(self, token_id: int) -> str: ...


class Transcript:
    """One sequence. `params` tell when a token ends it, by the rules the worker follows too; `stops` is None when there are none. `marks`:
    special tokens that are text, and with it the rule of `/v1`; None = the rule of the native routes. `endings`: special tokens that are
    stop strings themselves, which they can be although they are not text."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        detokenizer: Detokenizer,
        stops: StopMatcher | None,
        params: SamplingParams,
        marks: frozenset[str] | None = None,
        endings: frozenset[str] = frozenset(),
    ) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = detokenizer
        self._stops = stops
        self._marks = marks
        self._endings = endings
        self._stop_ids = params.stop_ids
        self._max_new_tokens = params.max_new_tokens
        self._pieces: list[str] = []
        self.generated = 0
        self.prompt_logprobs: list[float] = []
        self.prompt_top: list[list[tuple[int, float]]] = []
        self.finish: FinishReason | None = None
        self.drafted = self.accepted = self.steps = 0

    def text(self) -> str:
        return "".join(self._pieces)

    def extend(self, run: Run) -> list[Token]:
        """The run's tokens up to the one that ends the sequence; what was committed behind it is dropped. Token i is `run.tokens[i]`."""
        if run.prompt_logprobs:
            self.prompt_logprobs += run.prompt_logprobs
            self.prompt_top += run.prompt_top
        if not run.tokens or self.finish:
            return []
        said: list[Token] = []
        logprobs = run.logprobs
        for index, token_id in enumerate(run.tokens):
            said.append(self._push(token_id, shortest(logprobs[index]) if logprobs else None))
            if self.finish:
                break
        self.steps += 1
        self.drafted += run.drafted
        self.accepted += min(run.accepted, len(said))
        return said

    def alternatives(self, top: list[tuple[int, float]]) -> list[Token]:
        """The most likely tokens at one place, as they are shown."""
        vocabulary = self._vocabulary
        return [Token(other, vocabulary.token_text(other), shortest(logprob), vocabulary.is_special(other)) for other, logprob in top]

    def origin(self, index: int, run: Run) -> Origin:
        """Of the index-th token of the run that was heard last: accepted guesses come first, then what the model picked behind them."""
        return Origin(self.steps, index < run.accepted)

    def speculation(self) -> Speculation:
        return Speculation(self.drafted, self.accepted, self.steps)

    def _push(self, token_id: int, logprob: float | None) -> Token:
        special = self._vocabulary.is_special(token_id)
        text = self._detokenizer.push(token_id)
        shown = self._vocabulary.token_text(token_id) if special else text
        stopped = False
        if special and self._marks is not None and shown not in self._marks:
            stopped = shown in self._endings
            shown = ""
        elif self._stops is not None:
            shown, stopped = self._stops.push(shown)
        self.generated += 1
        # TGI's order: the limit, then the end of sequence, then the stop strings.
        if self.generated >= self._max_new_tokens:
            self.finish = "length"
        elif token_id in self._stop_ids:
            self.finish = "eos_token"
        elif stopped:
            self.finish = "stop_sequence"
        # An incomplete character at the end is part of the text, unless a special token follows and nobody could be shown it.
        if self.finish and not stopped and not special:
            shown += self._passed(self._detokenizer.flush())
        if self.finish and self._marks is not None and self._stops is not None:
            shown += self._stops.flush()
        if not special or self._marks is not None:
            self._pieces.append(shown)
        return Token(token_id, shown, logprob, special)

    def _passed(self, text: str) -> str:
        """The end of the text, behind what is held back before it."""
        if not text or self._marks is None or self._stops is None:
            return text
        return self._stops.push(text)[0]


def prefill(vocabulary: Vocabulary, tokens: Sequence[int], logprobs: Sequence[float]) -> list[PrefillToken]:
    """The prompt's tokens; the first has no log-probability, nothing comes before it."""
    known: list[float | None] = [None, *map(shortest, logprobs)]
    return [PrefillToken(token, vocabulary.token_text(token), logprob) for token, logprob in zip(tokens, known, strict=True)]


def shortest(value: float) -> float:
    """The double whose shortest decimal is that of the 32-bit float `value`: JSON says -0.1, not -0.10000000149011612. Every decimal of six
    digits survives single precision, so it is never one of five if that of six is not; nine always suffice.

    Log-probabilities as they are usual are rounded by arithmetic, which is exact for them and costs half."""
    if not _USUAL[0] < -value < _USUAL[-1]:
        return _shortest(value)
    single = _single(value)
    scale = _SIX_DIGITS[bisect.bisect_left(_USUAL, -value)]
    while True:
        short = round(value * scale) / scale
        if _single(short) == single:
            return short
        scale *= 10.0


def _shortest(value: float) -> float:
    single = _single(value)
    for form in (".6g", ".7g", ".8g"):
        short = float(format(value, form))
        if _single(short) == single:
            return short
    return float(format(value, ".9g"))
