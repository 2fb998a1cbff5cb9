"""A draft service without its network: sessions of several workers, their sequences, and one drafter for all of them.

Owns which sequence has which row of the drafter, and what was told of it. A sequence that is over leaves its row with all that the drafter
has computed for it; the next one takes the row whose text begins most like its own, so that prefixes are computed once. When rows run out,
the sequence that was heard of longest ago gives way, but none that is in use (`KEPT_SECONDS`): where all are, the newcomer is turned away
and nothing is kept of it, so that more sequences than rows cost those who have one nothing. A worker whose sequence is not known (any more)
is told that it is lost and says everything again; what nobody asks about is forgotten (`expire`), since nobody says that a worker is dead.

    Ask ─▶ absorb ─▶ drafted ahead already?  ─ yes ─▶ Answer, at once    ─▶ ahead: draft once more, as far as the drafter reaches,
                                             └ no ──▶ propose ─▶ Answer  ─┘  while nobody asks: it holds if all of the answer does

Knows nothing of HTTP, and of drafters only the three verbs.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from forerun.drafting import VERSION, Answer, Ask, Guess, Heard, Hello, Refusal, Welcome
from forerun.engine.drafters.draft import FREE, Commit, Draft, Drafter, Needs, Room, Terms, prune
from forerun.engine.drafters.remote import rerooted
from forerun.messages import SamplingParams

log = logging.getLogger(__name__)

MOST_WORKERS = 256
"""workers that are remembered; one that was not heard of for longest has to say hello again"""
IDLE_SECONDS = 120.0
"""texts of sequences that were not heard of for so long are forgotten, and so are those that free rows had last"""
KEPT_SECONDS = 5.0
"""a sequence that was heard of within this time keeps its row, however many others want one: it would have to be computed anew"""
MOST_LONG = 1024
"""sequences without a row that are remembered"""
WORTH = Terms(price=0.05)
"""a guess less likely than this is not worth the time of the others"""
NOWHERE = -1
"""the row of a sequence that has none any more: it is too long"""
Key = tuple[str, int]


class Refused(Exception):
    def __init__(self, error: str, cure: str = "") -> None:
        super().__init__(error)
        self.refusal = Refusal(error, cure)


@dataclasses.dataclass(eq=False, slots=True)
class _Sequence:
    """`tokens`: all that was told, `count` of them; of a sequence without a row only the count is kept. `ahead`: guesses that are at hand,
    built on `base` of them. `heard`: when it was told of last."""

    row: int
    tokens: list[int]
    params: SamplingParams
    scope: str
    count: int = 0
    heard: float = 0.0
    most: int = 0
    ahead: Draft = dataclasses.field(default_factory=Draft.none)
    base: int = -1


class DraftService:
    """`tokens`: fingerprint of the drafter's tokenizer; `vocab`: its ids are below it; `rows`, `longest`: sequences and their tokens."""

    def __init__(
        self,
        drafter: Drafter,
        name: str,
        vocab: int,
        tokens: str,
        rows: int,
        longest: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter = drafter
        self._clock = clock
        self._name, self._vocab, self._tokens = name, vocab, tokens
        self._rows, self._longest = rows, longest
        self._epochs: dict[str, int] = {}
        self._sequences: dict[Key, _Sequence] = {}
        """those heard of longest ago first"""
        self._free: dict[int, tuple[list[int], float]] = {row: ([], 0.0) for row in range(rows)}
        """free rows, with the text that each had last, and since when"""
        self.asked = self.at_once = self.turned_away = 0
        """sequences that guesses were wanted for, those of them that needed no forward, and those that found no row"""

    def hello(self, hello: Hello) -> Welcome:
        """Raises Refused."""
        if hello.version != VERSION:
            raise Refused(f"it speaks version {VERSION}, the worker {hello.version}", "run the same release of forerun on both sides")
        if hello.tokens != self._tokens:
            raise Refused(
                f"the target's tokens are not those of {self._name}",
                "draft with a model that has the target's tokenizer (the same tokenizer.json), or use --speculator suffix",
            )
        if hello.epoch >= self._epochs.get(hello.session, 0):
            self._leave([key for key in self._sequences if key[0] == hello.session])
            self._epochs.pop(hello.session, None)
            self._epochs[hello.session] = hello.epoch
        if len(self._epochs) > MOST_WORKERS:
            oldest = next(iter(self._epochs))
            del self._epochs[oldest]
            self._leave([key for key in self._sequences if key[0] == oldest])
        return Welcome(hello.epoch, self._drafter.needs.most, self._name)

    def expire(self) -> None:
        """Forget what was not heard of for long. To be called now and then."""
        until = self._clock() - IDLE_SECONDS
        self._leave([key for key, one in self._sequences.items() if one.heard <= until])
        for row, (text, since) in self._free.items():
            if text and since <= until:
                self._free[row] = [], since

    def ask(self, ask: Ask) -> Answer:
        """Raises Refused for a worker that did not say hello, or has said it again since."""
        if self._epochs.get(ask.session) != ask.epoch:
            raise Refused(f"session {ask.session} has no epoch {ask.epoch}", "say hello first")
        self._leave([(ask.session, key) for key in ask.closed])
        lost: set[int] = set()
        full: set[int] = set()
        for heard in sorted(ask.rows, key=lambda heard: heard.base == 0):  # who has a row is in use, before others look for one
            self._hear(ask.session, heard, lost, full)
        wanted = [
            key for key in dict.fromkeys(heard.key for heard in ask.rows) if key not in lost and (ask.session, key) in self._sequences
        ]
        sequences = [self._sequences[ask.session, key] for key in wanted]
        self.asked += len(sequences)
        missing = [one for one in sequences if not self._at_hand(one)]
        self.at_once += len(sequences) - len(missing)
        self._propose(missing, [min(one.most, self._drafter.needs.most) for one in missing])
        return Answer(ask.epoch, [_guess(key, one) for key, one in zip(wanted, sequences)], sorted(lost), sorted(full))

    def draft_ahead(self, ask: Ask) -> None:
        """Goes on behind what was just answered."""
        keys = dict.fromkeys((ask.session, heard.key) for heard in ask.rows)
        sequences = [self._sequences[key] for key in keys if key in self._sequences]
        most = self._drafter.needs.most
        shallow = [one for one in sequences if 4 * self._reach(one) < 3 * most]
        self._propose(shallow, [most] * len(shallow))

    @property
    def facts(self) -> dict[str, int | str]:
        sequences, remembered = len(self._sequences), sum(len(one.tokens) for one in self._sequences.values())
        remembered += sum(len(text) for text, _ in self._free.values())
        counts = {
            "workers": len(self._epochs),
            "rows": self._rows,
            "rows_used": self._running,
            "sequences": sequences,
            "tokens": remembered,
        }
        return {"drafter": self._name, **counts, "asked": self.asked, "at_once": self.at_once, "turned_away": self.turned_away}

    @property
    def _running(self) -> int:
        """Sequences with a row."""
        return self._rows - len(self._free)

    def _hear(self, session: str, heard: Heard, lost: set[int], full: set[int]) -> None:
        """Where the sequence is not known as far as the worker believes it is lost, and where it finds no row it is full here. Refused for
        what is no sequence of ours."""
        key = session, heard.key
        if heard.tokens and not (min(heard.tokens) >= 0 and max(heard.tokens) < self._vocab):
            raise Refused("a token is not below the vocabulary", "draft with a model of the target's vocabulary")
        one = self._sequences.pop(key, None)
        if one is not None and not 0 < heard.base == one.count:
            self._release(one)
            one = None
        if one is None and heard.base:
            lost.add(heard.key)
            return
        one = one or self._open(session, heard)
        if one is None:
            full.add(heard.key)
            self._turn_away()
            return
        self._sequences[key] = one
        if one.count + len(heard.tokens) > self._longest:
            self._release(one)
            if len(self._sequences) - self._running > MOST_LONG:
                del self._sequences[next(key for key, other in self._sequences.items() if other.row == NOWHERE)]
        one.most, one.heard = heard.most, self._clock()
        self._tell(one, heard.tokens)

    def _open(self, session: str, heard: Heard) -> _Sequence | None:
        """None where there is no row for it."""
        params = heard.params or SamplingParams(seed=0, prompt_tokens=len(heard.tokens), max_new_tokens=1 << 30)
        one = _Sequence(NOWHERE, [], params, f"{session}/{heard.scope}")
        if len(heard.tokens) > self._longest:
            return one
        if not self._free and not self._make_room():
            return None
        one.row = max(self._free, key=lambda row: _common(self._free[row][0], heard.tokens))
        del self._free[one.row]
        return one

    def _make_room(self) -> bool:
        """The row that was heard of longest ago is free, unless it is in use."""
        until = self._clock() - KEPT_SECONDS
        for key, one in self._sequences.items():
            if one.heard > until:
                return False
            if one.row != NOWHERE:
                self._release(self._sequences.pop(key))
                return True
        return False

    def _turn_away(self) -> None:
        if not self.turned_away:
            log.warning("all %d rows are in use: further sequences get no guesses until one is over; more --rows serve more", self._rows)
        self.turned_away += 1

    def _tell(self, one: _Sequence, new: list[int]) -> None:
        if not new:
            return
        known = one.count
        one.count += len(new)
        if one.row == NOWHERE:
            return
        one.tokens += new
        start = max(0, known - 1)
        told = Commit([one.row], [start], [one.tokens[start:-1]], [new[-1]], None, [one.params.prompt_tokens], [one.scope], [one.params])
        self._drafter.absorb(told)
        if one.ahead.count:
            ahead = Guess(0, one.base, one.ahead.token, one.ahead.parent, one.ahead.confidence)
            token, parent, confidence = rerooted(ahead, new, one.ahead.count)
            one.ahead, one.base = Draft(token, parent, confidence, [False] * len(token)), len(one.tokens)

    def _at_hand(self, one: _Sequence) -> bool:
        """What was drafted ahead reaches half as far as is wanted."""
        return 2 * self._reach(one) >= max(2, min(one.most, self._drafter.needs.most))

    def _reach(self, one: _Sequence) -> int:
        return max(one.ahead.depths(), default=0) if one.base == one.count else 0

    def _propose(self, sequences: Sequence[_Sequence], most: Sequence[int]) -> None:
        able = [(one, count) for one, count in zip(sequences, most) if count > 0 and one.tokens and one.row != NOWHERE]
        drafts = self._drafter.propose([one.row for one, _ in able], [count for _, count in able], WORTH) if able else []
        for (one, count), draft in zip(able, drafts):
            one.ahead, one.base = prune(draft, Room(count, count, self._vocab, 0.0)), len(one.tokens)

    def _leave(self, keys: Sequence[Key]) -> None:
        for key in keys:
            one = self._sequences.pop(key, None)
            if one is not None:
                self._release(one)

    def _release(self, one: _Sequence) -> None:
        if one.row != NOWHERE:
            self._drafter.forget([one.row])
            self._free[one.row] = one.tokens, self._clock()
            one.row, one.tokens, one.ahead = NOWHERE, [], Draft.none()


class Written:
    """A drafter out of a function: `guess(text, most)` returns up to `most` token ids that may follow the ids in `text`. For anybody's own
    model; what it costs to call it again and again with a growing text is the function's business."""

    def __init__(self, guess: Callable[[list[int], int], Sequence[int]], most: int) -> None:
        self.needs = Needs(most=most, lazy=True)
        self._guess = guess
        self._texts: dict[int, list[int]] = {}

    def absorb(self, commit: Commit) -> None:
        for row, start, tokens, newest in zip(commit.rows, commit.start, commit.tokens, commit.next):
            text = self._texts.setdefault(row, [])
            del text[start:]
            text += tokens if newest is None else [*tokens, newest]

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        return [Draft.chain([int(token) for token in self._guess(list(self._texts[row]), most)][:most]) for row, most in zip(rows, budget)]

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            self._texts.pop(row, None)


def _guess(key: int, one: _Sequence) -> Guess:
    draft = one.ahead if one.base == one.count else Draft.none()
    return Guess(key, one.count, draft.token, draft.parent, draft.confidence)


def _common(known: Sequence[int], tokens: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((place for place, (left, right) in enumerate(zip(known, tokens)) if left != right), min(len(known), len(tokens)))
