"""The draft service: what it remembers of whom, drafting ahead, models that draft, and the example of the documentation."""

from __future__ import annotations

import json
import re
import socket
import sys
import types
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from forerun.cli import main
from forerun.drafting import ASK, HELLO, Answer, Ask, Heard, Hello, Refusal
from forerun.engine.drafters.draft import Commit
from forerun.engine.draftserver import open_service
from forerun.engine.draftservice import IDLE_SECONDS, KEPT_SECONDS, DraftService, Refused, Written
from forerun.engine.testmodel import write_model
from forerun.messages import SamplingParams
from tests.engine.drafters.companions import word, write_draft, write_target
from tests.engine.drafters.services import TOKENS, honest, running, service
from tests.engine.tiny import VOCAB

ROOT = Path(__file__).resolve().parents[2]


def hello(of: DraftService, session: str = "a", epoch: int = 0) -> None:
    of.hello(Hello(session, epoch, VOCAB, TOKENS))


def counting(calls: list[list[int]]) -> Written:
    def guess(text: list[int], most: int) -> list[int]:
        calls.append(list(text))
        return [(text[-1] + 1 + i) % VOCAB for i in range(most)]

    return Written(guess, 8)


class Noting:
    """`absorbed`: all tokens that were told."""

    def __init__(self, inner: Written, absorbed: list[int]) -> None:
        self.needs, self.propose, self.forget = inner.needs, inner.propose, inner.forget
        self._inner, self._absorbed = inner, absorbed

    def absorb(self, commit: Commit) -> None:
        for start, tokens, newest in zip(commit.start, commit.tokens, commit.next):
            self._absorbed += [*tokens, newest][start > 0 :]  # a token that was the newest before is told again as known
        self._inner.absorb(commit)


def ask(of: DraftService, *rows: Heard, session: str = "a", epoch: int = 0, closed: list[int] | None = None) -> Answer:
    return of.ask(Ask(session, epoch, list(rows), closed or []))


class TestSessions:
    def test_a_stranger_is_refused_and_an_old_epoch_too(self) -> None:
        of = service()
        with pytest.raises(Refused):
            ask(of, Heard(1, 0, [3], 4))
        hello(of, epoch=2)
        ask(of, Heard(1, 0, [3], 4), epoch=2)
        hello(of, epoch=1)
        with pytest.raises(Refused):
            ask(of, Heard(1, 0, [3], 4), epoch=1)
        assert ask(of, Heard(1, 1, [4], 4), epoch=2).lost == []

    def test_a_new_epoch_begins_with_nothing(self) -> None:
        of = service()
        hello(of)
        ask(of, Heard(1, 0, [3, 4], 4))
        hello(of, epoch=1)
        assert ask(of, Heard(1, 2, [5], 4), epoch=1).lost == [1]
        assert of.facts["sequences"] == 0

    def test_what_does_not_fit_what_is_known_is_lost(self) -> None:
        of = service(counting([]))
        hello(of)
        ask(of, Heard(1, 0, [3, 4], 4))
        assert ask(of, Heard(1, 5, [9], 4)).lost == [1]
        answer = ask(of, Heard(1, 0, [3, 4, 5], 4))
        assert not answer.lost and answer.drafts[0].base == 3 and answer.drafts[0].token[:2] == [6, 7]

    def test_who_was_heard_of_longest_ago_makes_room(self) -> None:
        now = [0.0]
        of = service(counting([]), rows=2, clock=lambda: now[0])
        hello(of)
        for key in (1, 2):
            ask(of, Heard(key, 0, [10 * key], 4))
        now[0] += KEPT_SECONDS
        ask(of, Heard(1, 1, [11], 4))
        assert not ask(of, Heard(3, 0, [30], 4)).full
        answer = ask(of, Heard(1, 2, [12], 4), Heard(2, 1, [21], 4))
        assert answer.lost == [2] and [draft.key for draft in answer.drafts] == [1]

    def test_who_has_a_row_keeps_it_while_it_is_in_use(self) -> None:
        """More sequences than rows, of two workers whose steps take longer than a row is kept: those that came first have guesses all the
        time and are computed once, the others cost nothing; a row that is free goes to who asks next."""
        now, absorbed = [0.0], list[int]()
        drafter = counting([])
        of = service(Noting(drafter, absorbed), rows=3, clock=lambda: now[0])
        hello(of), hello(of, "b")
        first = ask(of, *(Heard(key, 0, [key, 7], 4) for key in range(5)))
        assert [draft.key for draft in first.drafts] == [0, 1, 2] and first.full == [3, 4] and not first.lost
        for known in range(2, 30):
            now[0] += 1.0
            of.expire()
            told = [Heard(key, 0, [key, *[7] * known], 4) for key in (4, 3)] + [Heard(key, known, [7], 4) for key in range(3)]
            answer = ask(of, *told)
            assert {draft.key for draft in answer.drafts} == {0, 1, 2} and answer.full == [3, 4] and not answer.lost
            assert ask(of, Heard(1, 0, [9], 4), session="b").full == [1]
        assert len(absorbed) == 3 * 30, "no token twice"
        assert of.facts == of.facts | {"rows": 3, "rows_used": 3, "sequences": 3, "turned_away": 2 + 3 * 28}
        now[0] += 2 * KEPT_SECONDS
        assert ask(of, Heard(3, 0, [3], 4), *(Heard(key, 30, [7], 4) for key in range(3))).full == [3], "they are in use: this step says so"
        assert ask(of, Heard(4, 0, [4], 4), closed=[1]).full == []

    def test_a_text_that_is_too_long_takes_no_row(self) -> None:
        of = service(counting([]), rows=1, longest=4)
        hello(of)
        ask(of, Heard(1, 0, [1], 4))
        answer = ask(of, Heard(2, 0, [1] * 5, 4), Heard(1, 1, [2], 4))
        assert not answer.full and not answer.lost and {draft.key: draft.token[:1] for draft in answer.drafts} == {1: [3], 2: []}

    def test_that_it_is_full_is_said_once_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        of = service(counting([]), rows=1)
        hello(of)
        for key in range(9):
            ask(of, Heard(key, 0, [1], 4))
        assert [record.levelname for record in caplog.records] == ["WARNING"] and "more --rows" in caplog.text

    def test_one_sequence_twice_in_a_question_is_asked_about_once(self) -> None:
        of = service(counting(calls := []), rows=2)
        hello(of)
        answer = ask(of, Heard(1, 0, [5], 4), Heard(1, 1, [6], 4), Heard(1, 1, [6], 4))
        assert not answer.drafts and answer.lost == [1] and not calls
        twice = Ask("a", 0, [Heard(1, 0, [5], 4), Heard(1, 0, [5, 6], 4)])
        assert len(of.ask(twice).drafts) == len(calls) == 1
        of.draft_ahead(twice)
        assert len(calls) == 2

    def test_a_worker_that_is_not_heard_of_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forerun.engine.draftservice.MOST_WORKERS", 2)
        of = service(counting([]))
        for session in "abc":
            hello(of, session)
            ask(of, Heard(1, 0, [5], 4), session=session)
        assert of.facts["workers"] == 2 and of.facts["sequences"] == 2
        with pytest.raises(Refused):
            ask(of, Heard(1, 1, [6], 4), session="a")

    def test_a_text_that_grows_too_long_goes_on_without_guesses(self) -> None:
        of = service(counting([]), longest=4)
        hello(of)
        assert ask(of, Heard(1, 0, [1, 2, 3], 4)).drafts
        for base, new in ((3, [4, 5]), (5, [6])):  # and is not told anew each time
            answer = ask(of, Heard(1, base, new, 4))
            assert not answer.lost and [draft.token for draft in answer.drafts] == [[]]
        assert not ask(of, *(Heard(key, 0, [key], 4) for key in range(2, 18))).full
        assert ask(of, Heard(17, 1, [5], 4)).drafts[0].token[0] == 6, "nor takes a row from the others"

    @pytest.mark.parametrize("token", [-1, VOCAB])
    def test_what_is_no_token_is_refused(self, token: int) -> None:
        of = service()
        hello(of)
        with pytest.raises(Refused):
            ask(of, Heard(1, 0, [1, token], 4))

    def test_the_row_with_the_same_beginning_is_taken(self) -> None:
        of = service(counting([]), rows=3)
        hello(of)
        for key, text in ((1, [1, 2, 3, 4]), (2, [1, 9, 9]), (3, [7])):
            ask(of, Heard(key, 0, text, 1))
        rows = {key: of._sequences["a", key].row for key in (1, 2, 3)}
        ask(of, closed=[1, 2, 3])
        ask(of, Heard(4, 0, [1, 2, 3, 5], 1))
        ask(of, Heard(5, 0, [7, 8], 1))
        assert of._sequences["a", 4].row == rows[1] and of._sequences["a", 5].row == rows[3]


class TestMemory:
    def test_a_worker_that_died_leaves_nothing_behind(self) -> None:
        """Nobody says that it is dead. One that lives is told that it was forgotten, and says everything again."""
        now = [0.0]
        of = DraftService(counting([]), "a test", VOCAB, TOKENS, 4, 100, lambda: now[0])
        for session in ("dead", "quiet", "busy"):
            hello(of, session)
            ask(of, Heard(1, 0, [5, 6, 7], 4), session=session)
        ask(of, closed=[1], session="quiet")
        assert (of.facts["sequences"], of.facts["tokens"]) == (2, 9)
        for known in range(3, 3 + 2 * round(IDLE_SECONDS)):
            now[0] += 1.0
            ask(of, Heard(1, known, [1], 1), session="busy") if known < 90 else of.ask(Ask("busy", 0, [Heard(1, 90, [], 1)]))
            of.expire()
        assert (of.facts["sequences"], of.facts["tokens"]) == (1, 90)
        assert ask(of, Heard(1, 3, [8], 4), session="dead").lost == [1]
        assert ask(of, Heard(1, 0, [5, 6, 7, 8], 4), session="dead").drafts[0].token[0] == 9

    def test_texts_that_are_too_long_are_not_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forerun.engine.draftservice.MOST_LONG", 10)
        of = service(counting([]), rows=4, longest=8)
        hello(of)
        for key in range(100):
            ask(of, Heard(key, 0, [1] * 500, 4))
        assert of.facts == of.facts | {"sequences": 10, "tokens": 0}
        assert ask(of, Heard(99, 500, [1], 4)).lost == [] and ask(of, Heard(1, 500, [1], 4)).lost == [1]

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(1, 9), st.booleans(), st.integers(0, 80)), max_size=60))
    def test_whatever_is_said_rows_and_texts_are_bounded(self, said: list[tuple[str, int, int, bool, int]]) -> None:
        """Two workers that say true and wrong things of six sequences, over three rows, with pauses: what they know of a sequence is what
        they were answered for, or they are told that it is lost."""
        now, rows, longest = [0.0], 3, 12
        of = DraftService(counting([]), "a test", VOCAB, TOKENS, rows, longest, lambda: now[0])
        known: dict[tuple[str, int], list[int]] = {}
        for session in "ab":
            hello(of, session)
        for session, key, count, closes, pause in said:
            now[0] += pause
            of.expire()
            text = known.get((session, key), [])
            new = [key * 10 + i for i in range(count)]
            answer = ask(of, Heard(key, len(text), new, 2), session=session)
            if answer.lost:
                answer = ask(of, Heard(key, 0, [*text, *new], 2), session=session)
            assert int(of.facts["tokens"]) <= rows * longest
            if answer.full:
                assert answer == Answer(0, [], full=[key]) and all(one.heard > now[0] - KEPT_SECONDS for one in of._sequences.values())
                known.pop((session, key), None)
                continue
            text = known[session, key] = [*text, *new]
            (draft,) = answer.drafts
            assert not answer.lost and draft.base == len(text)
            assert draft.token[:1] == ([] if len(text) > longest else [(text[-1] + 1) % VOCAB])
            rows_used = [one.row for one in of._sequences.values() if one.row >= 0]
            assert sorted([*rows_used, *of._free]) == list(range(rows))
            if closes:
                ask(of, closed=[key], session=session)
                del known[session, key]


class TestAhead:
    def test_what_was_drafted_ahead_is_answered_at_once(self) -> None:
        calls: list[list[int]] = []
        of = service(counting(calls))
        hello(of)
        first = Ask("a", 0, [Heard(1, 0, [5], 3)])
        assert of.ask(first).drafts[0].token == [6, 7, 8]
        of.draft_ahead(first)
        made = len(calls)
        answer = ask(of, Heard(1, 1, [6, 7, 8], 3))
        assert answer.drafts[0].token == [9, 10, 11, 12, 13] and answer.drafts[0].base == 4 and len(calls) == made
        assert of.facts["at_once"] == 1

    def test_what_came_otherwise_is_drafted_anew(self) -> None:
        of = service(counting([]))
        hello(of)
        first = Ask("a", 0, [Heard(1, 0, [5], 3)])
        of.ask(first)
        of.draft_ahead(first)
        assert ask(of, Heard(1, 1, [6, 20], 3)).drafts[0].token == [21, 22, 23]


def greedy(folder: Path, text: list[int], count: int) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        for _ in range(count):
            text = [*text, int(model(torch.tensor([text])).logits[0, -1].argmax())]
    return text[-count:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("draft")
    write_model("llama", 0, made, num_hidden_layers=1)
    return made


def test_a_model_drafts_what_it_would_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a text comes in portions, and when another took its row in between."""
    monkeypatch.setattr("forerun.engine.draftservice.KEPT_SECONDS", 0.0)
    of = open_service(str(folder), "model", 1, 200, 6, 1)
    of.hello(Hello("a", 0, 512, of._tokens))
    text = [17, 300, 45, 6, 201]
    params = SamplingParams(seed=1, prompt_tokens=5, max_new_tokens=100)

    def chain(heard: Heard) -> list[int]:
        (draft,) = of.ask(Ask("a", 0, [heard])).drafts
        found, at = [], -1
        for node, (token, parent) in enumerate(zip(draft.token, draft.parent)):
            if parent == at and draft.parent.index(at) == node:
                found.append(token)
                at = node
        return found

    first = chain(Heard(1, 0, text, 4, params))
    assert len(first) >= 2 and first == greedy(folder, text, len(first))
    chain(Heard(2, 0, [9, 9, 9], 4, params))
    longer = [*text, *first, 77]
    assert ask_lost(of, Heard(1, 5, longer[5:], 4))
    again = chain(Heard(1, 0, longer, 4, params))
    assert again == greedy(folder, longer, len(again))


def test_a_draft_with_fewer_tokens_speaks_its_targets(tmp_path: Path) -> None:
    """As its trainer makes them: ids are its own, and the rest of the target's tokens it reads as unknown."""
    target = write_target(tmp_path / "target")
    words = ["unknown", *(word(id) for id in range(VOCAB - 1, 10, -2))]
    draft = write_draft(tmp_path / "draft", words, "unknown")
    of = open_service(str(draft), "model", 2, 64, 6, 1, str(target))
    of.hello(Hello("a", 0, VOCAB, TOKENS))
    (guess,) = of.ask(Ask("a", 0, [Heard(1, 0, [3, VOCAB - 1, 7], 4)])).drafts
    assert guess.token and all(10 < token < VOCAB and token % 2 == (VOCAB - 1) % 2 for token in guess.token)


def ask_lost(of: DraftService, heard: Heard) -> bool:
    return of.ask(Ask("a", 0, [heard])).lost == [heard.key]


class TestHttp:
    def test_bad_questions_are_answered_with_their_fault(self) -> None:
        with running(honest()) as url:
            for path, body, status in ((HELLO, b"junk", 400), (ASK, b"", 400), (ASK, msgspec.msgpack.encode(Ask("x", 0, [])), 409)):
                assert post(url + path, body)[0] == status
            status, data = post(url + HELLO, msgspec.msgpack.encode(Hello("x", 0, VOCAB, "other")))
            assert status == 409 and "tokenizer" in msgspec.msgpack.decode(data, type=Refusal).cure
            assert json.load(urllib.request.urlopen(url + "/health"))["workers"] == 0

    def test_that_it_is_full_is_seen_in_health_and_metrics(self) -> None:
        with running(honest(of := service(counting([]), rows=2))) as url:
            hello(of)
            for known in range(3):
                ask(of, *(Heard(key, 0, [key] * (known + 1), 4) for key in range(5)))
            facts = json.load(urllib.request.urlopen(url + "/health"))
            assert facts == {"drafter": "a test"} | facts | {"workers": 1, "rows": 2, "rows_used": 2, "sequences": 2, "turned_away": 9}
            page = urllib.request.urlopen(url + "/metrics").read().decode()
        read = {family.name: family for family in text_string_to_metric_families(page)}
        assert {name.removeprefix("forerun_draft_"): family.samples[0].value for name, family in read.items()} == {
            name: value for name, value in facts.items() if name != "drafter"
        }
        assert [family.type for family in read.values()].count("counter") == 3

    def test_a_drafter_that_raises_fails_the_question_only(self) -> None:
        def broken(text: list[int], most: int) -> list[int]:
            if len(text) == 2:
                raise RuntimeError("no")
            return [1]

        with running(honest(service(Written(broken, 4)))) as url:
            post(url + HELLO, msgspec.msgpack.encode(Hello("x", 0, VOCAB, TOKENS)))
            assert post(url + ASK, msgspec.msgpack.encode(Ask("x", 0, [Heard(1, 0, [1, 2], 4)])))[0] == 500
            assert post(url + ASK, msgspec.msgpack.encode(Ask("x", 0, [Heard(2, 0, [1], 4)])))[0] == 200


def post(url: str, body: bytes) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, method="POST")) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_example_of_the_documentation_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An application's own model in ten lines: what stands in docs/drafters.md, with a folder of ours."""
    page = (ROOT / "docs" / "drafters.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "draftserver" in code)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    served: list[Any] = []
    stand_in = types.ModuleType("forerun.engine.draftserver")
    stand_in.serve = lambda guess, tokenizer, port: served.append((guess, tokenizer))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "forerun.engine.draftserver", stand_in)
    exec(code.replace('"DRAFT"', repr(str(folder))), {})
    ((guess, tokenizer),) = served
    assert tokenizer == str(folder)
    of = service(Written(guess, 4), vocab=512)
    hello(of)
    text = [17, 300, 45]
    assert ask(of, Heard(1, 0, text, 4)).drafts[0].token == greedy(folder, text, 4)


def test_a_port_that_is_taken_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["draft-server", "--model-id", str(folder), "--speculator", "suffix", "--port", port]) == 1
    assert "choose another --hostname or --port" in capsys.readouterr().err


def test_a_folder_that_is_none_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft-server", "--model-id", "./nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--rows", "--max-total-tokens", "--speculate"])
@pytest.mark.parametrize("value", ["0", "-3", "many", ""])
def test_a_size_that_is_none_is_wrong_usage(flag: str, value: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["draft-server", "--model-id", str(folder), f"{flag}={value}"])
    assert refused.value.code == 2 and f"argument {flag}" in capsys.readouterr().err


def test_more_than_fits_is_refused_with_the_cure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pool is made of memory that is touched later: the machine would give way in the middle of a text."""
    assert main(["draft-server", "--model-id", str(folder), "--rows", str(10**6), "--max-total-tokens", "128"]) == 1
    assert "lower --rows or --max-total-tokens" in capsys.readouterr().err
