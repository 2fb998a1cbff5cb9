"""Guesses from elsewhere: what arrives, what is made of it, and that nothing a service does costs more than guesses."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from forerun.drafting import HELLO, Answer, Ask, Guess, Heard, Hello, Refusal, Welcome
from forerun.engine.drafters.draft import Commit, Draft, Terms
from forerun.engine.drafters.registry import open_drafter
from forerun.engine.drafters.remote import Remote, check, rerooted
from forerun.engine.drafters.remote_wire import REST_SECONDS, TIMEOUT_SECONDS, Wire
from forerun.engine.draftservice import Written
from forerun.engine.errors import StartError
from forerun.messages import SamplingParams
from tests.engine.drafters.companions import setting, write_target
from tests.engine.drafters.services import TOKENS, Running, answering, honest, running, service
from tests.engine.test_identity import fresh, truth
from tests.engine.tiny import VOCAB, Front, tiny_engine

WRONG = """
    127.0.0.1:80  http://x,speed=3  http://x,wait=long  ftp://x:1  http://  http://:9001  http://x:99999  http://x:0  http://x:  http://x:port
    http://x:-1  http://[::1:9001  http://%41:1  http://me@x:1  http://me:secret@x:1  http://x:1?a=b  http://x:1#a
"""
WRONG_WORDS = [*WRONG.split(), "", "http://two words:1", "http://x\n:1", "http://a b/"]
LONG = 100.0
"""seconds that a test waits for what must come"""


def count_up(text: list[int], most: int) -> list[int]:
    return [(text[-1] + 1 + i) % VOCAB for i in range(most)]


def remote(url: str, most: int = 8, wait: float = LONG, timeout: float = LONG, session: str = "tester") -> Remote:
    wire = Wire(url, Hello(session, 0, VOCAB, TOKENS), timeout, pause=0.01)
    wire.start()
    return Remote(wire, most, wait)


def tell(drafter: Remote, row: int, known: list[int], new: list[int]) -> None:
    """Of a row whose `known` tokens were told: these came."""
    start = max(0, len(known) - 1)
    told = [*known, *new]
    drafter.absorb(Commit([row], [start], [told[start:-1]], [told[-1]]))


def eventually(check: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG
    while not check():
        assert time.monotonic() < until
        time.sleep(0.005)


class TestTogether:
    def test_what_the_service_guesses_is_proposed(self) -> None:
        with running(honest(service(Written(count_up, 12)))) as url:
            drafter = remote(url)
            eventually(lambda: drafter._wire.open)
            tell(drafter, 3, [], [5, 6, 7])
            (draft,) = drafter.propose([3], [8])
            assert draft.token == [8, 9, 10, 11, 12, 13, 14, 15] and draft.parent == list(range(-1, 7))
            tell(drafter, 3, [5, 6, 7], [8, 9, 20])
            assert drafter.propose([3], [2])[0].token == [21, 22]
            drafter.forget([3])
            assert drafter.propose([3], [8]) == [Draft.none()]

    def test_many_rows_and_several_targets(self) -> None:
        """Each with its own keys; what one says of its row is nothing to the other."""
        shared = service(Written(count_up, 12))
        with running(honest(shared)) as url:
            left, right = remote(url), remote(url, session="another")
            for drafter, first in ((left, 10), (right, 40)):
                eventually(lambda drafter=drafter: drafter._wire.open)  # type: ignore[misc]
                for row in range(3):
                    tell(drafter, row, [], [first + row])
            assert [draft.token[0] for draft in left.propose([0, 1, 2], [4] * 3)] == [11, 12, 13]
            assert [draft.token[0] for draft in right.propose([2, 0], [4] * 2)] == [43, 41]
            left.forget([0, 1, 2])
            tell(left, 0, [], [60])
            left.propose([0], [1])
            assert shared.facts["sequences"] == 3 and shared.facts["workers"] == 2

    def test_what_is_over_leaves_its_row_to_others_though_nobody_asks(self) -> None:
        shared = service(Written(count_up, 12), rows=2)
        with running(honest(shared)) as url:
            drafter = remote(url)
            eventually(lambda: drafter._wire.open)
            for row in range(2):
                tell(drafter, row, [], [1, 2])
            assert all(draft.count for draft in drafter.propose([0, 1], [4, 4]))
            drafter.forget([1])
            eventually(lambda: shared.facts["sequences"] == 1)

    def test_whoever_is_gone_leaves_all_its_rows(self) -> None:
        shared = service(Written(count_up, 12))
        with running(honest(shared)) as url:
            drafters = [remote(url)]
            eventually(lambda: drafters[0]._wire.open)
            tell(drafters[0], 0, [], [1, 2])
            assert drafters[0].propose([0], [4])[0].count and shared.facts["sequences"] == 1
            drafters.clear()
            gc.collect()
            eventually(lambda: shared.facts["sequences"] == 0)

    def test_a_row_whose_end_failed_is_over_when_its_number_begins_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else it would be told of again after every break, and take a row of the service."""
        shared = service(Written(count_up, 12))
        with running(honest(shared)) as url:
            drafter = remote(url)
            eventually(lambda: drafter._wire.open)
            tell(drafter, 0, [], [1, 2])
            assert drafter.propose([0], [4])[0].count
            with monkeypatch.context() as broken:
                broken.setattr(drafter._wire, "end", None)
                with pytest.raises(TypeError):
                    drafter.forget([0])
            tell(drafter, 0, [], [3, 4])
            assert drafter.propose([0], [4])[0].token[0] == 5
            assert len(drafter._wire._texts) == shared.facts["sequences"] == 1

    def test_a_row_that_is_not_asked_about_is_not_told_of(self) -> None:
        """The price is too high for a while: no traffic, and afterwards everything at once."""
        shared = service(Written(count_up, 12))
        with running(honest(shared)) as url:
            drafter = remote(url)
            eventually(lambda: drafter._wire.open)
            tell(drafter, 0, [], [1, 2])
            drafter.propose([0], [4])
            text = [1, 2]
            for token in range(30, 60):
                tell(drafter, 0, text, [token])
                text.append(token)
            asked = int(shared.facts["asked"])
            assert asked < 10
            assert drafter.propose([0], [3])[0].token == [60, 61, 62]

    def test_what_is_too_much_for_one_question_goes_into_several(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a break all texts are told anew at once, and a service does not read questions of any size."""
        monkeypatch.setattr("forerun.engine.drafters.remote_wire.MOST_TOLD", 10)
        wire = Wire("http://127.0.0.1:9", Hello("tester", 0, VOCAB, TOKENS))
        texts = {key: [key] * length for key, length in enumerate((4, 30, 5, 4, 0, 10))}
        for key, text in texts.items():
            wire.begin(key, None, "")
            wire.say(key, text, 4)
        told: dict[int, list[int]] = {}
        while rows := wire._question().rows:
            assert sum(len(row.tokens) for row in rows) <= 10 or len([row for row in rows if row.tokens]) == 1
            assert not told.keys() & {row.key for row in rows}
            told |= {row.key: row.tokens for row in rows}
        assert told == texts

    def test_a_grammar_stays_here(self) -> None:
        """A service follows none, and large ones of many rows would be more than it reads at once."""
        drafter = Remote(Wire("http://127.0.0.1:9", Hello("tester", 0, VOCAB, TOKENS)), 4)
        params = SamplingParams(seed=1, prompt_tokens=1, max_new_tokens=9, sample=True, grammar="a" * 1000)
        drafter.absorb(Commit([0], [0], [[1]], [2], params=[params]))
        assert drafter.propose([0], [4]) == [Draft.none()]
        (told,) = drafter._wire._question().rows
        assert told.tokens == [1, 2] and told.params == msgspec.structs.replace(params, grammar="")

    def test_answers_that_are_not_there_are_counted(self) -> None:
        with running(honest(service(Written(count_up, 12)))) as url:
            drafter = remote(url)
            eventually(lambda: drafter._wire.open)
            tell(drafter, 0, [], [1, 2])
            drafter.propose([0], [4])
            assert drafter.needs.late().answers == 0
        tell(drafter, 0, [1, 2], [9])
        drafter._wait = 0.0
        drafter.propose([0], [4])
        assert drafter.needs.late().answers == 1
        drafter.propose([7], [4])
        assert drafter.needs.late().answers == 1, "nobody was asked about that row"

    def test_rows_that_a_service_has_no_room_for_cost_nothing(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """They are not told of, waited for or called late, and what was learned of answers does not suffer; when a row is free, one asks,
        then the next."""
        monkeypatch.setattr("forerun.engine.drafters.remote_wire.REST_SECONDS", LONG)
        shared = service(Written(count_up, 12), rows=2)
        with running(honest(shared)) as url:
            drafter = remote(url)
            eventually(lambda: drafter._wire.open)
            texts = {row: [10 * row, 10 * row + 1] for row in range(4)}
            for row, text in texts.items():
                tell(drafter, row, [], text)
            served = {row for row, draft in zip(texts, drafter.propose(list(texts), [4] * 4)) if draft.count}
            assert len(served) == 2 == len(drafter._wire.unserved(list(drafter._keys.values())))
            gain, before = drafter._gain, drafter.needs.late()
            for token in range(50, 70):
                for row, text in texts.items():
                    tell(drafter, row, text, [token])
                    text.append(token)
                drafts = drafter.propose(list(texts), [4] * 4)
                assert {row for row, draft in zip(texts, drafts) if draft.count} == served
            assert drafter.needs.late() == before._replace(unserved=2 * 20) and drafter._gain > gain
            assert shared.facts["turned_away"] == 2 and caplog.text.count("no room for all") == 1
            drafter.forget(list(served))
            drafter._wire._full_until = 0.0  # the rest is over
            for row in texts.keys() - served:
                tell(drafter, row, texts[row], [80])
                eventually(lambda row=row: not drafter._wire.unserved([drafter._keys[row]]))  # type: ignore[misc]
                assert drafter.propose([row], [2])[0].token == [81, 82]
            assert shared.facts["turned_away"] == 2

    def test_of_those_that_wait_one_asks_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wire = Wire("http://127.0.0.1:9", Hello("tester", 0, VOCAB, TOKENS))
        now = [0.0]
        monkeypatch.setattr("forerun.engine.drafters.remote_wire.time.monotonic", lambda: now[0])

        def step() -> list[int]:
            for key in range(5):
                wire.say(key, [key], 4)
            asked = wire._question()
            with wire._lock:
                wire._settle_room(asked, {row.key for row in asked.rows if not row.base})
            return [row.key for row in asked.rows]

        for key in range(5):
            wire.begin(key, None, "")
        assert step() == [0, 1, 2, 3, 4]
        asked: list[int] = []
        for _ in range(100):
            now[0] += REST_SECONDS / 10
            asked += step()
        assert 8 <= len(asked) <= 10

    def test_what_came_while_room_was_asked_for_is_told_at_once(self) -> None:
        """A step would wait for guesses that nobody was asked for."""
        wire = Wire("http://127.0.0.1:9", Hello("tester", 0, VOCAB, TOKENS))
        for key in (1, 2):
            wire.begin(key, None, "")
            wire.say(key, [5], 4)
        wire._settle_room(wire._question(), {2})
        wire.say(2, [6], 4)
        assert not wire._question().rows
        wire.end(1)  # and leaves its room
        wire.say(2, [7], 4)
        asked = wire._question()
        assert (asked.closed, asked.rows) == ([1], [Heard(2, 0, [5, 6, 7], 4)])
        wire.say(2, [8], 4)
        wire._settle_room(asked, set())
        assert wire._question().rows == [Heard(2, 3, [8], 4)]

    def test_the_engine_writes_the_same_with_it(self) -> None:
        with running(honest()) as url:
            drafter = remote(url)
            eventually(lambda: drafter._wire.open)
            front = Front(tiny_engine(drafter))
            for kind in ("greedy", "everything"):
                answer = truth(kind, 1, 21)
                sequence = fresh(answer)
                front.admit(sequence)
                front.run(guess=6)
                assert sequence.answer == answer.answer
                assert kind == "everything" or sequence.accepted > 0


class TestRerooting:
    @given(st.data())
    def test_what_is_left_is_what_hangs_below(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 12))
        token = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        parent = [data.draw(st.integers(-1, i - 1)) for i in range(count)]
        draft = Draft(token, parent, [0.5] * count, [False] * count)
        since = data.draw(st.lists(st.integers(0, 2), max_size=4))
        most = data.draw(st.integers(0, 12))
        left, parents, sure = rerooted(Guess(1, 7, token, parent, [0.5] * count), since, most)
        found = Draft(left, parents, sure, [False] * len(left)).paths()
        at = next((node for node, path in enumerate(draft.paths()) if path == since), -1) if since else -1
        if since and at < 0:
            assert not found
        elif not since:
            assert found == draft.paths()[:most]
        else:
            assert all([*since, *path] in draft.paths() for path in found) and len(found) <= most

    def test_an_answer_that_is_a_step_old_is_walked(self) -> None:
        assert rerooted(Guess(1, 7, [4, 5, 6, 9], [-1, 0, 1, 0], [0.9, 0.8, 0.7, 0.1]), [4], 8) == ([5, 6, 9], [-1, 0, -1], [0.8, 0.7, 0.1])
        assert rerooted(Guess(1, 7, [4, 5], [-1, 0], [0.9, 0.8]), [4, 6], 8) == ([], [], [])


class TestFailures:
    def test_nobody_is_there_and_then_somebody_is(self) -> None:
        """Killed in the middle and started again on the same port; the texts go on all the while."""
        first = Running(honest(service(Written(count_up, 12))))
        drafter = remote(first.url)
        eventually(lambda: drafter._wire.open)
        tell(drafter, 0, [], [1, 2])
        assert drafter.propose([0], [1])[0].token == [3]
        first.stop()
        tell(drafter, 0, [1, 2], [7])
        eventually(lambda: drafter.propose([0], [4]) == [Draft.none()] and not drafter._wire.open)
        tell(drafter, 0, [1, 2, 7], [8, 9])
        second = Running(honest(service(Written(count_up, 12))), first.port)
        eventually(lambda: drafter._wire.open)
        assert drafter.propose([0], [2])[0].token == [10, 11]
        second.stop()

    def test_a_service_that_says_nothing_is_not_waited_for(self) -> None:
        """It welcomes and then stalls: after one patience no step waits, and when its time is over it is broken off."""
        stalled = asyncio.Event()

        async def stall(path: str, body: bytes) -> web.Response:
            if path == HELLO:
                return welcome(body)
            await stalled.wait()
            raise AssertionError

        with running(answering(stall)) as url:
            drafter = remote(url, wait=0.01, timeout=0.2)
            eventually(lambda: drafter._wire.open)
            tell(drafter, 0, [], [1, 2])
            drafter.propose([0], [4])
            eventually(lambda: drafter._wire.latency > 0.01 or drafter._wire.failures > 0)
            drafter._wait = 3600.0
            drafter._gain = 0.001
            for token in range(20):  # an hour each, if it waited
                tell(drafter, 0, [1, 2, *range(token)], [token])
                assert drafter.propose([0], [4], Terms(0.0, 1.0)) == [Draft.none()]
            eventually(lambda: drafter._wire.failures > 0)

    @pytest.mark.parametrize(
        "name, answer",
        {
            "noise": lambda ask: web.Response(body=b"\xff\x00garbage"),
            "nothing": lambda ask: web.Response(body=b""),
            "an error": lambda ask: web.Response(status=500, text="no"),
            "another page": lambda ask: web.Response(text="<html>hello</html>"),
            "a refusal": lambda ask: web.Response(status=409, body=msgspec.msgpack.encode(Refusal("no"))),
            "another epoch": lambda ask: said(Answer(ask.epoch + 1, [Guess(1, 2, [5], [-1], [0.9])])),
            "no token": lambda ask: said(Answer(ask.epoch, [Guess(1, 2, [VOCAB], [-1], [0.9])])),
            "a negative token": lambda ask: said(Answer(ask.epoch, [Guess(1, 2, [-1], [-1], [0.9])])),
            "a huge token": lambda ask: said(Answer(ask.epoch, [Guess(1, 2, [1 << 63], [-1], [0.9])])),
            "no tree": lambda ask: said(Answer(ask.epoch, [Guess(1, 2, [5, 6], [-1, 1], [0.9, 0.9])])),
            "half a tree": lambda ask: said(Answer(ask.epoch, [Guess(1, 2, [5, 6], [-1], [0.9, 0.9])])),
            "no number": lambda ask: said(Answer(ask.epoch, [Guess(1, 2, [5], [-1], [math.nan])])),
            "endless guesses": lambda ask: said(Answer(ask.epoch, [Guess(1, 2, [5] * 9999, list(range(-1, 9998)), [0.9] * 9999)])),
            "endless loss": lambda ask: said(Answer(ask.epoch, [], [row.key for row in ask.rows])),
            "too much": lambda ask: web.Response(body=bytes(5 << 20)),
        }.items(),
    )
    def test_a_service_that_lies_is_left(self, name: str, answer: Callable[[Ask], web.Response]) -> None:
        async def lie(path: str, body: bytes) -> web.Response:
            return welcome(body) if path == HELLO else answer(msgspec.msgpack.decode(body, type=Ask))

        with running(answering(lie)) as url:
            drafter = remote(url)
            eventually(lambda: drafter._wire.open)
            tell(drafter, 0, [], [1, 2])
            assert drafter.propose([0], [4]) == [Draft.none()], name
            eventually(lambda: drafter._wire.failures > 0)

    def test_guesses_about_nobody_are_nothing(self) -> None:
        """Of sequences that nobody asked about, of a length that is not reached yet, or of none; beside them a good one."""

        async def stray(path: str, body: bytes) -> web.Response:
            if path == HELLO:
                return welcome(body)
            ask = msgspec.msgpack.decode(body, type=Ask)
            wrong = [Guess(99, 2, [5], [-1], [0.9]), Guess(1, 1 << 40, [6], [-1], [0.9])]
            return said(Answer(ask.epoch, [Guess(1, 2, [7, 8], [-1, 0], [1e9, -1e9]), *wrong]))

        with running(answering(stray)) as url:
            drafter = remote(url)
            eventually(lambda: drafter._wire.open)
            tell(drafter, 0, [], [1, 2])
            (draft,) = drafter.propose([0], [4])
            assert draft.token == [7, 8] and all(0 < sure < 1 for sure in draft.confidence)

    def test_confidences_are_measured_before_they_are_believed(self) -> None:
        with running(honest(service(Written(lambda text, most: [(text[-1] + 5) % VOCAB] * most, 4)))) as url:
            drafter = remote(url, most=2)
            eventually(lambda: drafter._wire.open)
            text = [1]
            tell(drafter, 0, [], text)
            before = drafter.propose([0], [2])[0].confidence[0]
            for _ in range(80):
                token = (text[-1] + 1) % VOCAB
                tell(drafter, 0, text, [token])
                text.append(token)
                (draft,) = drafter.propose([0], [2])
            assert draft.confidence[0] < 0.3 * before

    def test_the_thread_ends_with_its_drafter(self) -> None:
        with running(honest()) as url:
            drafter = remote(url)
            wire, thread = drafter._wire, drafter._wire._thread
            eventually(lambda: wire.open)
            del drafter
            gc.collect()
            thread.join(LONG)
            assert not thread.is_alive()


class TestOpening:
    def test_other_tokens_are_refused_with_a_cure(self, tmp_path: Path) -> None:
        around = setting(write_target(tmp_path))
        with running(honest(service(tokens="another's"))) as url, pytest.raises(StartError) as refused:
            open_drafter(f"remote={url}", around)
        assert "tokenizer" in refused.value.cure

    def test_a_service_may_come_later(self, tmp_path: Path) -> None:
        drafter = open_drafter("remote=http://127.0.0.1:9,wait=1", setting(write_target(tmp_path)))
        drafter.absorb(Commit([0], [0], [[1, 2]], [3]))
        assert drafter.propose([0], [4]) == [Draft.none()]

    @pytest.mark.parametrize(("value", "seconds"), [("", TIMEOUT_SECONDS), (",wait=1", TIMEOUT_SECONDS), (",wait=4500", 4.5)])
    def test_an_answer_may_take_as_long_as_a_step_may_wait(self, value: str, seconds: float, tmp_path: Path) -> None:
        """A model of one's own takes its time. Were an answer given up before that, nobody would ever hear a guess of it."""
        drafter = open_drafter(f"remote=http://127.0.0.1:9{value}", setting(write_target(tmp_path)))
        assert drafter._wire._timeout == seconds  # type: ignore[attr-defined]

    def test_a_service_that_is_slow_to_wake_is_greeted_anew(self) -> None:
        """The first greeting is given up in the middle; the next one does not suffer from it."""
        calls: list[str] = []

        async def sleepy(path: str, body: bytes) -> web.Response:
            calls.append(path)
            if len(calls) == 1:
                await asyncio.sleep(LONG)
            return welcome(body)

        with running(answering(sleepy)) as url:
            wire = Wire(url, Hello("tester", 0, VOCAB, TOKENS), 0.2, pause=0.01)
            with pytest.raises(TimeoutError):
                wire.greet()
            wire._timeout = LONG
            assert wire.greet().epoch == 0 and len(calls) == 2

    @pytest.mark.parametrize("value", WRONG_WORDS)
    def test_what_is_no_address_is_refused(self, value: str, tmp_path: Path) -> None:
        with pytest.raises(StartError) as refused:
            open_drafter(f"remote={value}", setting(write_target(tmp_path)))
        assert "remote=http://" in refused.value.cure

    @pytest.mark.parametrize(
        "url", ["http://x", "http://127.0.0.1:9001", "https://a-b.example.org:443/drafts", "http://[::1]:9001", "http://draft_1:9"]
    )
    def test_what_is_an_address_is_taken(self, url: str) -> None:
        check(url)

    def test_a_host_that_nobody_knows_is_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may come later, as in a group of containers that start together, so it is no reason not to start."""

        def unknown(*_: object) -> None:
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        open_drafter("remote=http://draft.invalid:9001", setting(write_target(tmp_path)))
        assert "is not known here" in caplog.text and "correct remote=" in caplog.text


def welcome(body: bytes) -> web.Response:
    return said(Welcome(msgspec.msgpack.decode(body, type=Hello).epoch, 8, "a liar"))


def said(message: Answer | Welcome) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(message))


def test_messages_survive_the_wire() -> None:
    ask = Ask("s", 3, [Heard(1, 0, [4, 5], 8)], [2])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ask), type=Ask) == ask
