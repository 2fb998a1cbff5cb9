"""Matchers: what they allow, that drafts and accidents change nothing, and that nobody waits for a slow one."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from forerun.engine import grammar
from forerun.engine import matcher as matching
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Room, Terms
from forerun.engine.grammar import Grammars
from forerun.engine.matcher import Bits, Followed, GrammarError, Matcher, allows, join
from forerun.messages import SamplingParams
from tests.engine.tiny import (
    STOP,
    VOCAB,
    Alphabet,
    Front,
    Sequence_,
    alone,
    params_for,
    random_tree,
    tables,
    text_of,
    tiny_engine,
    tiny_grammars,
)

PROMPT = [5, 60, 7, 7, 31]
SHAPE = r'\{"(on|off)":[0-9]{2,4}\}'
ROOMY = Room(64, 64, VOCAB, 0.0)


def regex(pattern: str) -> str:
    return str(LLMatcher.grammar_from_regex(pattern))


def params(pattern: str = SHAPE, **changes: object) -> SamplingParams:
    return params_for(PROMPT, grammar=regex(pattern), stop_ids=(STOP,), **changes)


@functools.cache
def compiled(pattern: str) -> LLMatcher:
    return LLMatcher(tables(), regex(pattern), log_level=0)


def matcher(pattern: str, ends: Sequence[int] = (STOP,)) -> Matcher:
    return Matcher(compiled(pattern), [STOP], ends, lambda token: tables().decode_bytes([token]))


def allowed(bits: np.ndarray) -> str:
    """The characters whose tokens are allowed; `$` for the end."""
    return "".join("$" if token == STOP else text_of([token]) for token in range(VOCAB) if allows(bits, token))


def say(text: str) -> list[int]:
    return Alphabet()(text.encode())


def test_the_end_comes_where_the_grammar_may_end() -> None:
    reader = matcher("ab|abc")
    assert allowed(reader.advance([])) == "a"
    assert allowed(reader.advance(say("a"))) == "b"
    assert allowed(reader.advance(say("b"))) == "c$"
    assert allowed(reader.advance(say("c"))) == "$"


def test_only_the_rows_own_ends_end_it() -> None:
    x = say("x")[0]
    reader = matcher("ab", ends=[x])
    assert allowed(reader.advance(say("ab"))) == "x"
    with pytest.raises(GrammarError, match="the model has no token for that"):
        matcher("ab", ends=[]).advance(say("ab"))


def forced(reader: Matcher, said: str = "", room: Room = ROOMY) -> str:
    """What must come behind that, as one is told who has no guesses of his own."""
    followed = reader.follow(Draft.none(), reader.advance(say(said)), room)
    assert followed.draft.parent == list(range(-1, followed.draft.count - 1)) and len(followed.masks) == followed.draft.count
    return text_of(followed.draft.token)


def test_forced_tokens() -> None:
    reader = matcher(SHAPE)
    assert forced(reader) == '{"o'
    assert forced(reader, '{"on') == '":'
    assert forced(reader, '":') == ""


@pytest.mark.parametrize(("nodes", "depth", "count"), [(2, 9, 2), (9, 1, 1), (9, 0, 0)])
def test_forced_tokens_fit_in_the_room(nodes: int, depth: int, count: int) -> None:
    reader = matcher("abcdefghijkl")
    whole = reader.follow(Draft.none(), reader.advance([]), ROOMY).draft.token
    followed = reader.follow(Draft.none(), reader.advance([]), ROOMY._replace(nodes=nodes, depth=depth))
    assert len(whole) > 2 and followed.draft.token == whole[:count]


def test_an_end_is_not_forced() -> None:
    """It comes with the token before it, whether guessed or not."""
    reader = matcher("ab")
    assert forced(reader) == "ab" and forced(reader, "ab") == ""


def test_the_longest_of_several_beginnings_is_forced() -> None:
    """As where `"name"` must come and the model has tokens for `"`, `"n` and `"name"`; two ways on are none."""
    reader, (a, b, c) = matcher("x"), say("abc")
    bits = np.zeros((VOCAB + 7) // 8, np.uint8)
    for token in (a, b, c):
        bits[token >> 3] |= 1 << (token & 7)
    reader._text = {a: b"na", b: b"name", c: b"n"}.__getitem__
    assert reader._only(bits) == b
    reader._text = {a: b"na", b: b"no", c: b"n"}.__getitem__
    assert reader._only(bits) is None


def test_a_long_forced_text_is_not_walked_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile grammars take long for each mask."""
    monkeypatch.setattr(matching, "FORCED_SECONDS", -1.0)
    assert forced(matcher(SHAPE)) == ""


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 8), st.sampled_from([SHAPE, "(a|ab|abc){3,9}", r"[^x]{0,7}x?", "((on|off),)*on"]))
def test_following_a_draft_changes_nothing(seed: int, size: int, pattern: str) -> None:
    """Masks behind a path are those of a matcher that really read it, and after the draft the matcher stands where it stood."""
    generator = torch.Generator().manual_seed(seed)
    reader = matcher(pattern)
    root = reader.advance([])
    for _ in range(3):
        draft = random_tree(generator, size, VOCAB, say('{"onfab,x12'))
        followed = reader.follow(draft, root, Room(0, 0, VOCAB, 0.0))
        for path in followed.draft.paths():
            fresh = matcher(pattern)
            fresh.advance(reader._read)
            before = fresh.advance(path[:-1])
            assert allows(before, path[-1]), "only legal guesses are left"
            if path[-1] != STOP:
                assert (fresh.advance(path[-1:]) == followed.masks[tuple(path)]).all()
        assert followed.draft.count == sum(_legal(pattern, [*reader._read, *path]) for path in draft.paths())
        again = matcher(pattern)
        assert (again.advance(reader._read) == reader.advance([])).all()
        token = next((t for t in say("onf1a{x") if allows(root, t)), None)
        if token is None:
            return
        root = reader.advance([token])


def _legal(pattern: str, tokens: Sequence[int]) -> bool:
    reader = matcher(pattern)
    for token in tokens:
        try:
            if not allows(reader.advance([]), token):
                return False
            if token != STOP:
                reader.advance([token])
        except GrammarError:
            return False
    return STOP not in tokens[:-1]


def test_probes_and_drawn_guesses_stay() -> None:
    reader = matcher("[a-c]{3}")
    root = reader.advance([])
    a, b, z = say("abz")
    probes = Draft([z, b, a, z], [-1, 0, -1, 2], [0.5] * 4, [True, False, False, False])
    kept = reader.follow(probes, root, ROOMY)
    assert kept.draft.token == [z, b, a] and set(kept.masks) == {(a,)}
    drawn = Draft([a, z], [-1, 0], [0.5] * 2, [False] * 2, law=[np.ones(VOCAB) / VOCAB] * 2)
    assert reader.follow(drawn, root, ROOMY).draft is drawn


def test_drawn_guesses_into_a_dead_end_are_refused_there() -> None:
    """Nothing ends this row, so nothing comes behind the whole of its grammar."""
    reader = matcher("ab", ends=[])
    root = reader.advance([])
    drawn = Draft(say("ab"), [-1, 0], [0.5] * 2, [False] * 2, law=[np.ones(VOCAB) / VOCAB] * 2)
    followed = reader.follow(drawn, root, ROOMY)
    assert followed.draft is drawn and not followed.masks[tuple(say("ab"))].any()
    assert reader.follow(Draft.chain(say("ab")), root, ROOMY).draft.token == say("a")


class TestJoin:
    def test_nothing_forced(self) -> None:
        draft = Draft.chain([1, 2])
        assert join([], draft, 8) is draft

    def test_equal_guesses_are_the_same_node(self) -> None:
        draft = Draft([7, 3, 8, 9, 4], [-1, -1, 0, 2, 1], [0.5] * 5, [False] * 5, source=[1, 2, 1, 1, 2])
        joined = join([7, 8], draft, 8)
        assert (joined.token, joined.parent) == ([7, 8, 9], [-1, 0, 1]), "what says otherwise than the forced tokens is gone"
        assert joined.confidence == [1.0, 1.0, 0.5] and list(joined.source) == [1, 1, 1]

    def test_several_go_on_behind_the_chain(self) -> None:
        draft = Draft([7, 7, 8, 9], [-1, -1, 0, 1], [0.5] * 4, [False] * 4)
        joined = join([7], draft, 8)
        assert (joined.token, joined.parent) == ([7, 8, 9], [-1, 0, 0])

    @pytest.mark.parametrize(("nodes", "depth", "text"), [(1, 8, "a"), (8, 1, "a"), (2, 8, "ab"), (3, 2, "ab"), (8, 8, "abcd"), (0, 8, "")])
    def test_room(self, nodes: int, depth: int, text: str) -> None:
        reader = matcher("abcd")
        root = reader.advance([])
        assert reader.follow(Draft.none(), root, ROOMY._replace(nodes=nodes, depth=depth)).draft.token == say(text)

    @settings(max_examples=50, deadline=None)
    @given(st.integers(0, 2**31), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 12), st.integers(1, 12))
    def test_every_path_of_the_whole_is_one_of_the_two(self, seed: int, forced: list[int], size: int, nodes: int) -> None:
        draft = random_tree(torch.Generator().manual_seed(seed), size, 6)
        chain = forced[:nodes]
        joined = join(chain, draft, nodes)
        ways = {tuple(chain[:end]) for end in range(1, len(chain) + 1)}
        given_paths = {tuple(path) for path in draft.paths()}
        for path, parent in zip(joined.paths(), joined.parent):
            assert parent < len(joined.token) and (tuple(path) in given_paths | ways)
            assert list(path[: len(chain)]) == chain[: len(path)]
        assert not chain or joined.count <= nodes


def test_the_answer_follows_its_grammar_and_ends() -> None:
    answers = [Sequence_(PROMPT, params(sample=True, seed=seed, temperature=3.0)) for seed in range(8)]
    front = Front(tiny_engine())
    for answer in answers:
        front.admit(answer)
    front.run()
    for answer in answers:
        assert answer.finish == "eos_token" and not answer.error
        assert re.fullmatch(SHAPE, text_of(answer.tokens[:-1]))


def test_a_cut_by_length_is_allowed() -> None:
    answer = alone(PROMPT, params(max_new_tokens=4))
    assert answer.finish == "length" and text_of(answer.tokens).startswith('{"o')


def test_logprobs_are_those_behind_the_mask() -> None:
    answer = alone(PROMPT, params(top_n=4))
    forced = [i for i, top in enumerate(answer.top) if len(top) == 1]
    assert forced and all(answer.logprobs[i] == 0.0 for i in forced), "the only way has probability one"
    assert all(np.isclose(sum(np.exp(p) for _, p in top), 1.0, atol=1e-5) for top in answer.top if len(top) < 4)


def test_an_unusable_grammar_ends_its_own_row() -> None:
    front = Front(tiny_engine())
    bad = Sequence_(PROMPT, params_for(PROMPT, grammar="{}"))
    good, plain = Sequence_(PROMPT, params()), Sequence_(PROMPT, params_for(PROMPT))
    for sequence in (bad, good, plain):
        front.admit(sequence)
    front.run()
    assert "the grammar cannot be compiled" in bad.error and not bad.tokens
    assert good.answer == alone(PROMPT, params()).answer and plain.answer == alone(PROMPT, params_for(PROMPT)).answer


def test_a_grammar_that_comes_to_nothing_ends_its_own_row() -> None:
    """Its first tokens are sound."""
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    row = alone(PROMPT, params_for(PROMPT, grammar=LLMatcher.grammar_from_json_schema(json.dumps(endless)), max_new_tokens=100))
    assert row.finish == "length" or "the grammar cannot be followed" in row.error


def test_a_model_without_a_tokenizer_has_no_grammars() -> None:
    def load() -> Any:
        raise GrammarError("no tokenizer")

    grammars = Grammars(load)
    assert grammars.why_not() == "no tokenizer"
    front = Front(tiny_engine(grammars=grammars))
    row, other = Sequence_(PROMPT, params()), Sequence_(PROMPT, params_for(PROMPT))
    front.admit(row)
    front.admit(other)
    front.run()
    assert row.error == "no tokenizer" and not other.error


class Chain:
    """Guesses the same every time."""

    needs = Needs(most=8)

    def absorb(self, commit: Commit) -> None:
        return None

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        return [Draft.chain(say("0123")[:most]) for most in budget]

    def forget(self, rows: list[int]) -> None:
        return None


def test_guesses_against_the_grammar_cost_no_rows() -> None:
    """The drafter says digits throughout: rows are computed for what may come, and for what must."""
    front = Front(tiny_engine(Chain()))
    row = Sequence_(PROMPT, params())
    front.admit(row)
    front.run(guess=4)
    assert row.answer == alone(PROMPT, params()).answer
    assert row.accepted >= 3, "forced tokens were guessed"
    computed = sum(rows for rows, _ in front.engine._backend.calls)
    assert computed == len(PROMPT) + (len(front.engine._backend.calls) - 1) + row.drafted


class Panic(BaseException):
    """What the library's bindings raise where it gives up altogether."""


def test_a_panic_of_the_library_ends_the_row_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(self: Matcher, tokens: Sequence[int]) -> Bits:
        raise Panic("it panicked")

    monkeypatch.setattr(Matcher, "advance", advance)
    assert alone(PROMPT, params()).error == "it panicked"


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_grammar_that_fails_on_guesses_costs_these_and_no_drafter(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def follow(self: Matcher, draft: Draft, root: Bits, room: Room) -> Followed:
        raise kind("no")

    monkeypatch.setattr(Matcher, "follow", follow)
    front = Front(tiny_engine(Chain()))
    row = Sequence_(PROMPT, params())
    front.admit(row)
    front.run(guess=4)
    assert row.answer == alone(PROMPT, params()).answer and row.drafted == 0
    assert front.engine._speculator.failures.count == 0


class Failing:
    """A matcher of the library of which one call fails, when it has done its work."""

    def __init__(self, live: LLMatcher, call: int) -> None:
        self._live, self._calls = live, itertools.count(-call)

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*given: object) -> object:
            result = getattr(self._live, name)(*given)
            if next(self._calls) == 0:
                raise Panic
            return result

        return call


def test_where_following_fails_halfway_nothing_of_it_is_left() -> None:
    """Whichever call of the library it is: what becomes true is read as if nothing had been guessed."""
    draft = Draft(say("abba"), [-1, 0, -1, 2], [0.5] * 4, [False] * 4)
    expected = matcher("[a-c]{4}")
    masks = [expected.advance([token]) for token in say("abcc")]
    for call in itertools.count():
        reader = matcher("[a-c]{4}")
        root = reader.advance(say("a"))
        reader._live = Failing(reader._live, call)  # type: ignore[assignment]
        try:
            reader.follow(draft, root, ROOMY)
        except Panic:
            assert all((reader.advance([token]) == mask).all() for token, mask in zip(say("bcc"), masks[1:]))
        else:
            break
    assert call > 10, "it is called for each guess"


def test_compiled_grammars_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "KEPT", 2)
    grammars = Grammars(tables, tiny_grammars()._threads)
    for pattern in ("a", "b", "a", "c", "a"):
        grammars.open(params(pattern), [])
    assert list(grammars._compiled) == [regex("c"), regex("a")]


def test_nobody_is_asked_where_there_is_nothing_to_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens are allowed and nothing was guessed: the step does not wait for a matcher."""

    class Nothing(Chain):
        def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
            return [Draft.none() for _ in budget]

    monkeypatch.setattr(matching, "MOST_BEGINNINGS", 0)
    asked: list[Draft] = []
    monkeypatch.setattr(Matcher, "follow", lambda self, draft, root, room: asked.append(draft) or Followed(draft, {}))
    front = Front(tiny_engine(Nothing()))
    row = Sequence_(PROMPT, params(max_new_tokens=6))
    front.admit(row)
    front.run(guess=4)
    assert row.answer == alone(PROMPT, params(max_new_tokens=6)).answer and not asked
