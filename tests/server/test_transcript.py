"""Transcripts: which rule ends a sequence, and numbers as single precision prints them."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forerun.messages import SamplingParams
from forerun.router.request import Run
from forerun.server.stops import StopMatcher
from forerun.server.transcript import Transcript, shortest
from tests.server.front import byte_level

TOKENIZER = byte_level()
EOS = TOKENIZER.eos_ids[0]
HALF = TOKENIZER._encode("한", True)[0]


def transcript(limit: int, *stops: str) -> Transcript:
    params = SamplingParams(0, 1, limit, stop_ids=TOKENIZER.eos_ids)
    return Transcript(TOKENIZER, TOKENIZER.detokenizer([1]), StopMatcher(stops, keep=True) if stops else None, params)


def said(made: Transcript, *tokens: int) -> list[str]:
    return [token.text for token in made.extend(Run(list(tokens), [], [], []))]


def test_the_limit_comes_before_the_end_of_sequence_and_that_before_stops() -> None:
    made = transcript(2, "</s>")
    said(made, 1, EOS)
    assert made.finish == "length"
    made = transcript(3, "</s>")
    said(made, 1, EOS)
    assert made.finish == "eos_token"
    made = transcript(3, "hello")
    said(made, *TOKENIZER._encode("hello", True))
    assert made.finish == "stop_sequence"


def test_special_tokens_are_shown_and_searched_but_are_no_text() -> None:
    start = TOKENIZER._rust.token_to_id("<s>")
    made = transcript(9, "s>")
    assert said(made, 1, start) == [TOKENIZER.token_text(1), "<s>"]
    assert (made.finish, made.text()) == ("stop_sequence", TOKENIZER.token_text(1))


def test_an_incomplete_character_at_the_end() -> None:
    made = transcript(2)
    assert said(made, 64, HALF)[1] == made.text()[1:] == "\ufffd"
    made = transcript(9)
    assert said(made, 64, HALF, EOS) == [made.text(), "", "</s>"]


@pytest.mark.parametrize("accepted", [0, 2, 4, 5])
@pytest.mark.parametrize("place", [0, 1, 3, 4])
@pytest.mark.parametrize("rule", ["stop", "eos", "limit"])
def test_what_guessing_did_is_counted_as_far_as_the_text_goes(rule: str, place: int, accepted: int) -> None:
    """A run of `accepted` guesses and what follows them is cut behind token `place`: usage and guesses count what was kept."""
    tokens = [*TOKENIZER._encode("abcdef", True)]
    assert len(tokens) == 6
    made = transcript(2 + place if rule == "limit" else 99, *(["abcdef"[place]] if rule == "stop" else []))
    said(made, TOKENIZER._encode("x", True)[0])
    if rule == "eos":
        tokens[place] = EOS
    kept = made.extend(Run(tokens[: accepted + 1], [], [], [], drafted=5, accepted=accepted))
    told = made.speculation()
    cut = place <= accepted
    assert len(kept) == (place + 1 if cut else accepted + 1) and bool(made.finish) == cut
    assert (told.drafted, told.accepted, told.steps) == (5, min(accepted, len(kept)), 2)
    assert made.generated == 1 + len(kept)
    assert made.generated - told.steps - told.accepted == (-1 if cut and accepted > place else 0)
    assert not made.finish or (made.extend(Run([64], [], [], [], 3, 3)), made.speculation()) == ([], told)


def test_nothing_comes_behind_the_end() -> None:
    made = transcript(9, "hello")
    hello = TOKENIZER._encode("hello", True)
    assert len(said(made, *hello, 1, 2, 3)) == len(hello)
    assert said(made, 1) == []
    assert made.generated == len(hello)


def test_alternatives_are_shown_like_tokens() -> None:
    first, second = transcript(9).alternatives([(EOS, -0.5), (64, -math.inf)])
    assert (first.text, first.special, first.logprob) == ("</s>", True, -0.5)
    assert (second.special, second.logprob) == (False, -math.inf)


def single(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


SINGLES = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
LOGPROBS = st.floats(width=32, min_value=-2048, max_value=0, allow_subnormal=False)


@given(SINGLES | LOGPROBS | st.integers(-9999, 0).map(lambda number: single(number / 1000)))
@example(9252989495672832.0)
@example(single(-1e-6))
@example(single(-1e-3))
@example(-0.0009765625)
def test_shortest_is_the_shortest_decimal_of_a_single(value: float) -> None:
    digits = next(digits for digits in range(1, 10) if single(float(f"{value:.{digits}g}")) == value)
    assert shortest(value) == float(f"{value:.{digits}g}")


def test_edges_of_powers_of_ten_and_two_are_short() -> None:
    near = [single(-(10.0**power) * (1 + step * 2.0**-24)) for power in range(-8, 5) for step in range(-40, 41)]
    for value in near + [-(2.0**power) for power in range(-30, 12)]:
        digits = next(digits for digits in range(1, 10) if single(float(f"{value:.{digits}g}")) == value)
        assert shortest(value) == float(f"{value:.{digits}g}")


def test_numbers_that_are_none() -> None:
    assert math.isnan(shortest(math.nan))
    assert shortest(-math.inf) == -math.inf


@pytest.mark.parametrize("short", [-0.1, -1.5351562, 0.0, -12.0, -3.4e38])
def test_shortest_examples(short: float) -> None:
    assert shortest(single(short)) == short
