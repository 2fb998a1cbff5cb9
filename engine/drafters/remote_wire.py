"""The worker's end of the line to a draft service: a thread that says what became true and takes what is guessed.

Nobody waits here but the thread. Whatever goes wrong (nobody there, too slow, an answer that is no answer, another epoch) ends
the conversation: what was guessed is thrown away, a new epoch begins, and after a pause that doubles each time the service is greeted anew
and told everything. Knows nothing of rows or of the engine.

    worker's thread                          this thread
    say(key, tokens)      ─▶ outbox  ─────▶  POST ask  ─▶ service
    take(key)             ◀─ drafts  ◀─────  Answer
"""

from __future__ import annotations

import dataclasses
import http.client
import logging
import math
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from forerun.drafting import ASK, HELLO, Answer, Ask, Guess, Heard, Hello, Refusal, Welcome
from forerun.messages import SamplingParams

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1.0
"""an answer that takes longer is none"""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
MOST_BYTES = 1 << 22
"""of an answer"""
REST_SECONDS = 1.0
"""A service that has no room for a sequence is asked for it again so much later, and then for one of those that wait, not for all."""
MOST_TOLD = 1 << 20
"""Tokens of a question, unless one sequence alone has more: after a break all is told again, and a service takes questions of 16 MB."""
MOST_GUESSES = 1024
"""behind one sequence: a step looks through them"""
BROKEN = (OSError, http.client.HTTPException, ValueError, msgspec.MsgspecError)
"""what a service that is dead, slow or lying makes of a question"""
_HEADERS = {"Content-Type": "application/msgpack"}


class Refused(Exception):
    """The service does not want to draft for this target: what it said, and the cure."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.error)
        self.refusal = refusal


@dataclasses.dataclass(eq=False, slots=True)
class Text:
    """A sequence as the worker's thread tells it. `told`: tokens that the service has been sent in this epoch. `most`: guesses wanted, 0 =
    none for now, so nothing is sent. `unserved`: the service had no room for it."""

    tokens: list[int]
    params: SamplingParams | None
    scope: str
    told: int = 0
    most: int = 0
    asked: bool = False
    unserved: bool = False


class Wire:
    """`url`: http://host:port. `hello`: says who we are; its epoch is ours to count. `clock`, `pause`: seconds."""

    def __init__(self, url: str, hello: Hello, timeout: float = TIMEOUT_SECONDS, pause: float = FIRST_PAUSE) -> None:
        self._place = urlsplit(url)
        self._hello = hello
        self._timeout, self._first_pause = timeout, pause
        self._lock = threading.Condition()
        self._texts: dict[int, Text] = {}
        self._closed: list[int] = []
        self._drafts: dict[int, Guess] = {}
        self._epoch = hello.epoch
        self._over = False
        self._answers = msgspec.msgpack.Decoder(Answer | Refusal)
        self._welcomes = msgspec.msgpack.Decoder(Welcome | Refusal)
        self._connection: http.client.HTTPConnection | None = None
        self._latency = 0.0
        self._sent = 0.0
        """when the question was sent that is not answered yet; 0 = there is none"""
        self._full_until = 0.0
        """when one of the sequences that found no room may be asked for again"""
        self._said_full = False
        self.failures = 0
        self.open = False
        """the service answers"""
        self._thread = threading.Thread(target=self._run, name="drafts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def latency(self) -> float:
        """Seconds that an answer takes, smoothed, or that the next one has taken already."""
        sent = self._sent
        return max(self._latency, time.monotonic() - sent) if sent else self._latency

    def close(self) -> None:
        """All sequences are over."""
        with self._lock:
            for key in list(self._texts):
                self.end(key)
            self._over = True
            self._lock.notify_all()

    # -- the worker's thread; nothing here takes longer than a look -----------------------------------------------------------

    def begin(self, key: int, params: SamplingParams | None, scope: str) -> None:
        with self._lock:
            self._texts[key] = Text([], params, scope)

    def say(self, key: int, tokens: list[int], most: int) -> None:
        """These tokens came; so many guesses at what follows are wanted."""
        with self._lock:
            text = self._texts[key]
            text.tokens += tokens
            text.most = most
            text.asked = most > 0 and not self._rests(text)
            if text.asked:
                self._lock.notify_all()

    def _rests(self, text: Text) -> bool:
        now = time.monotonic()
        if not text.unserved or now < self._full_until:
            return text.unserved
        self._full_until = now + REST_SECONDS
        return False

    def unserved(self, keys: Sequence[int]) -> set[int]:
        """Those that the service had no room for when it was asked last."""
        with self._lock:
            return {key for key in keys if self._texts[key].unserved}

    def end(self, key: int) -> None:
        with self._lock:
            text = self._texts.get(key)
            if text is not None and text.told:
                self._closed.append(key)
                self._full_until = 0.0  # it leaves room
                self._lock.notify_all()
            self._texts.pop(key, None)
            self._drafts.pop(key, None)

    def take(self, keys: dict[int, int], seconds: float) -> dict[int, Guess]:
        """The newest guesses for these sequences (key → tokens known), waiting at most so long for those that are not of the newest
        state."""
        until = time.monotonic() + seconds
        with self._lock:
            while self.open and not self._over and any(self._late(key, known) for key, known in keys.items()):
                left = until - time.monotonic()
                if left <= 0.0:
                    break
                self._lock.wait(left)
            return {key: self._drafts[key] for key in keys if key in self._drafts}

    def _late(self, key: int, known: int) -> bool:
        draft, text = self._drafts.get(key), self._texts.get(key)
        return text is not None and text.most > 0 and not text.unserved and (draft is None or draft.base < known)

    # -- this thread ------------------------------------------------------------------------------------------------------------

    def greet(self) -> Welcome:
        """Raises Refused, or one of BROKEN."""
        with self._lock:
            hello = msgspec.structs.replace(self._hello, epoch=self._epoch)
        answer = self._welcomes.decode(self._post(HELLO, hello))
        if isinstance(answer, Refusal):
            raise Refused(answer)
        if answer.epoch != hello.epoch:
            raise ValueError(f"it welcomes epoch {answer.epoch}, this is {hello.epoch}")
        return answer

    def _run(self) -> None:
        pause = self._first_pause
        while not self._over:
            try:
                welcome = self.greet()
                log.info("guesses come from %s: %s", self._place.netloc, welcome.drafter)
                with self._lock:
                    self.open = True
                    self._lock.notify_all()
                while self._converse():
                    pause = self._first_pause
            except Refused as wrong:
                log.error("the draft service at %s refused: %s; %s", self._place.netloc, wrong, wrong.refusal.cure)
                pause = LONGEST_PAUSE
            except Exception as wrong:  # BROKEN, and whatever else a service makes us stumble over: the thread goes on
                level = logging.WARNING if pause == self._first_pause else logging.DEBUG  # once, not with each try
                log.log(level, "no guesses from %s: %s: %s", self._place.netloc, type(wrong).__name__, wrong)
            self._forget()
            with self._lock:
                self._lock.wait_for(lambda: self._over, pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _forget(self) -> None:
        """A new epoch: nothing was said and nothing is believed."""
        self._hang_up()
        with self._lock:
            self.open, self._sent = False, 0.0
            self.failures += 1
            self._epoch += 1
            self._full_until = 0.0
            self._drafts.clear()
            self._closed.clear()
            for text in self._texts.values():
                text.told, text.asked, text.unserved = 0, text.most > 0, False
            self._lock.notify_all()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _converse(self) -> bool:
        """One question and its answer; False at the end. Raises what `greet` does."""
        with self._lock:
            # What is over is told though nobody asks: it has a row of the service, which others may want.
            self._lock.wait_for(lambda: self._over or self._closed or any(text.asked for text in self._texts.values()))
            if self._over and not self._closed:
                return False
            ask = self._question()
        self._sent = began = time.monotonic()
        answer = self._answers.decode(self._post(ASK, ask))
        if isinstance(answer, Refusal):
            raise ValueError(answer.error)
        took = time.monotonic() - began
        if ask.rows:
            self._latency += (took - self._latency) * (0.1 if self._latency else 1.0)
        self._sent = 0.0
        if set(answer.lost) & {row.key for row in ask.rows if not row.base}:
            raise ValueError("it lost what it was just told")
        if not set(answer.full) <= {row.key for row in ask.rows if not row.base}:
            raise ValueError("it has no room for what it was not asked to take")
        if answer.epoch != ask.epoch:
            raise ValueError(f"it answers epoch {answer.epoch}, this is {ask.epoch}")
        for draft in answer.drafts:
            _checked(draft, self._hello.vocab)
        with self._lock:
            self._settle_room(ask, set(answer.full))
            for key in answer.lost:
                if key in self._texts:
                    self._texts[key].told, self._texts[key].asked = 0, True
            for draft in answer.drafts:
                text = self._texts.get(draft.key)
                if text is not None and draft.base <= len(text.tokens):
                    self._drafts[draft.key] = draft
            self._lock.notify_all()
        return True

    def _settle_room(self, ask: Ask, full: set[int]) -> None:
        """Who found room, and who found none: as long as all did, the others may ask at once."""
        for key in (row.key for row in ask.rows if not row.base and row.key in self._texts):
            text = self._texts[key]
            if key in full:
                text.told, text.asked, text.unserved = 0, False, True
            elif text.unserved:
                text.unserved, text.asked, self._full_until = False, text.most > 0 and text.told < len(text.tokens), 0.0
        if full:
            self._full_until = time.monotonic() + REST_SECONDS
            if not self._said_full:
                log.warning("%s has no room for all sequences: some go without its guesses; start it with more --rows", self._place.netloc)
            self._said_full = True

    def _question(self) -> Ask:
        """What is asked for, as far as it goes into one question; the rest goes into the next. The longest first, or none would have room
        for it."""
        rows: list[Heard] = []
        room = MOST_TOLD
        asked = [(key, text) for key, text in self._texts.items() if text.asked]
        for key, text in sorted(asked, key=lambda each: each[1].told - len(each[1].tokens)):
            new, first = text.tokens[text.told :], text.told == 0
            if rows and len(new) > room:
                continue
            room -= len(new)
            rows.append(Heard(key, text.told, new, text.most, text.params if first else None, text.scope if first else ""))
            text.told, text.asked = len(text.tokens), False
        closed, self._closed = self._closed, []
        return Ask(self._hello.session, self._epoch, rows, closed)

    def _post(self, path: str, message: Hello | Ask) -> bytes:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._place.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(self._place.hostname or "", self._place.port, timeout=self._timeout)
        try:
            self._connection.request("POST", self._place.path.rstrip("/") + path, msgspec.msgpack.encode(message), _HEADERS)
            response = self._connection.getresponse()
            data = response.read(MOST_BYTES + 1)
        except BROKEN:
            self._hang_up()  # it may be in the middle of anything
            raise
        if response.status not in (200, 409) or len(data) > MOST_BYTES:
            raise ValueError(f"it answered {response.status} with {len(data)} bytes")
        return data


def _checked(draft: Guess, vocab: int) -> None:
    """ValueError for guesses that are no tree of token ids with probabilities."""
    count = len(draft.token)
    if not count == len(draft.parent) == len(draft.confidence):
        raise ValueError("a guess whose lists are not of one length")
    if count > MOST_GUESSES:
        raise ValueError(f"{count} guesses behind one sequence")
    if any(not 0 <= token < vocab for token in draft.token):
        raise ValueError("a guess that is no token of the target")
    if any(not -1 <= parent < i for i, parent in enumerate(draft.parent)):
        raise ValueError("a guess that is no tree")
    if any(not math.isfinite(confidence) for confidence in draft.confidence):
        raise ValueError("a confidence that is no number")
