"""`suffix` and `suffix+grams` in one call a step: what `suffix.py`, `grams.py` and `dag.py` say, in C++ (`kernels/lookup/lookup.h`).

A plain step of a small model takes four to six milliseconds, and look-ups took a quarter of one: not for what they compute, but because a
forward reads all weights and leaves nothing of the interpreter's own code in the caches. So what became true is only written down, as words
on a tape, and the tape is played with the next question. The drafts are those of the Python forms, bit by bit: these say what is right, and
serve where there is no compiler, and in joins with sources that compute.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forerun.engine.drafters import dag, grams, suffix
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Terms
from forerun.engine.drafters.history import fresh
from forerun.engine.drafters.registry import Setting
from forerun.kernels.build import BuildError
from forerun.kernels.lookup.build import build

log = logging.getLogger(__name__)

_BEGIN, _TELL, _FORGET, _PROPOSE, _COMPETE = range(5)
_LONGEST_TAPE = 1 << 14
"""words that wait for a question"""
_FAULTS = {1: "a tape of look-ups makes no sense", 2: "out of memory in look-ups"}
"""after which every row is forgotten, and guessed for again when it begins anew"""
_SLOT = 32
"""bytes of a context and what follows it"""


class _Sources(ctypes.Structure):
    """`fr_sources` of `kernels/lookup/forerun_lookup.h`."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("tree", "shared", "most_grams", "scopes")),
        *((name, ctypes.c_int64) for name in ("own_tokens", "shared_tokens", "contexts")),
        *((name, ctypes.c_void_p) for name in ("rates", "joint", "keys", "tokens", "chances")),
    )


class Lookups:
    """`library`: has `fr_lookup_…`. `texts`, `table`: what is looked up; without a table, texts alone."""

    def __init__(self, library: Path, texts: suffix.Texts, table: grams.Table | None = None, most_grams: int = grams.MOST) -> None:
        weights = _SLOT << (len(table.keys) * 3 // 2).bit_length() if table is not None else 0
        self.needs = Needs(most=texts.most, lazy=True, weight_bytes=weights, chooses=True)
        self._joined = table is not None
        # The interpreter's lock is kept: a call takes a few microseconds, and nobody else would be done with it by then.
        lib = ctypes.PyDLL(str(library))
        lib.fr_lookup_open.restype = ctypes.c_void_p
        lib.fr_lookup_open.argtypes = [ctypes.c_void_p]
        lib.fr_lookup_close.argtypes = [ctypes.c_void_p]
        self._run = lib.fr_lookup_run
        part = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [ctypes.c_void_p, *part, *part, *part, *part]
        self._context = _opened(lib, texts, table, most_grams)
        weakref.finalize(self, lib.fr_lookup_close, self._context)
        self._known: dict[int, int] = {}
        """tokens that were told, by row"""
        self._tape = array("i")
        self._nodes, self._confidences = array("i"), array("d")

    @classmethod
    def open(cls, values: Sequence[str], setting: Setting) -> Lookups | None:
        """`values`: of `suffix`, and of `grams` where both are joined. None where there is no library."""
        texts = suffix.Texts.read(values[0], setting)
        table = grams.Table.find(values[1], setting) if len(values) > 1 else None
        try:
            return cls(build(), texts, table, min(setting.nodes or grams.MOST, grams.MOST))
        except (BuildError, OSError) as error:  # nothing to build it with, or a library that this machine cannot load
            log.warning("look-ups go on in Python and are slower: %s", str(error).partition("\n")[0])
            return None

    def absorb(self, commit: Commit) -> None:
        """All of it or, where a word makes no sense, nothing."""
        words: list[int] = []
        told: dict[int, int] = {}
        for i, number in enumerate(commit.rows):
            known = self._known.get(number, 0) if commit.start[i] else 0
            new = fresh(commit, i, known)
            if not commit.start[i]:
                tokens = len(commit.tokens[i])
                scope = commit.scope[i].encode() if commit.scope else b""
                words += _BEGIN, number, commit.prompt[i] if commit.prompt else tokens, tokens, len(scope), *scope
            words += _TELL, number, len(new), *new
            told[number] = known + len(new)
        if min(words, default=0) < 0:
            raise ValueError("look-ups were told something negative")
        self._tape.extend(array("i", words))  # as an array: of a list it would take what comes before a misfit
        self._known |= told
        if len(self._tape) > _LONGEST_TAPE:
            self._play([], [0.0, 0.0, 1.0])

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        asked, most, bids = len(rows), sum(budget), terms.bids
        least = max(suffix.LEAST_SURVIVAL, suffix.SLACK * terms.price)
        if len(self._nodes) < 3 * most + asked + 1 or len(self._confidences) < most + asked:
            for part, needed in ((self._nodes, 3 * most + asked + 1), (self._confidences, most + asked)):
                part.frombytes(bytes(part.itemsize * max(0, needed - len(part))))
        if bids is None:
            self._play([word for row in zip(rows, budget) for word in (_PROPOSE, *row)], [least, 0.0, 1.0])
            return self._all(asked)
        question = [_COMPETE, asked, bids.vocab, len(bids.weight) > 0]
        for row in zip(rows, budget, bids.depth):
            question += row
        self._play(question, [least, bids.entry, bids.discount, *bids.weight, *terms.toll[: bids.most]])
        return self._best(asked) if self._nodes[0] else [Draft.none()] * asked

    def _all(self, asked: int) -> list[Draft]:
        """The answers to so many questions."""
        nodes, confidences = self._nodes, self._confidences
        drafts: list[Draft] = []
        at = said = 0
        for _ in range(asked):
            count = nodes[at]
            tokens, parents, sources = at + 1, at + 1 + count, at + 1 + 2 * count
            at = sources + count * self._joined
            token, parent = nodes[tokens:parents].tolist(), nodes[parents:sources].tolist()
            source = nodes[sources:at].tolist() if self._joined else ()
            drafts.append(Draft(token, parent, confidences[said : said + count].tolist(), [False] * count, source))
            said += count
        return drafts

    def _best(self, asked: int) -> list[Draft]:
        """What is left of so many drafts that competed."""
        kept = self._nodes[0]
        parents, sources = asked + kept, asked + 2 * kept
        words, numbers = self._nodes[1 : 1 + sources + kept * self._joined].tolist(), self._confidences[: asked + kept].tolist()
        drafts: list[Draft] = []
        first = 0
        for row in range(asked):
            count = words[row]
            if not count:
                drafts.append(Draft.none())
                continue
            last = first + count
            token, parent = words[asked + first : asked + last], words[parents + first : parents + last]
            source = words[sources + first : sources + last] if self._joined else ()
            drafts.append(Draft(token, parent, numbers[asked + first : asked + last], [False] * count, source, (), numbers[row]))
            first = last
        return drafts

    def forget(self, rows: list[int]) -> None:
        self._tape.extend(array("i", [word for number in rows if number in self._known for word in (_FORGET, number)]))
        for number in rows:
            self._known.pop(number, None)

    def _play(self, question: Sequence[int], terms: Sequence[float]) -> None:
        """Everything that was written down, and then the question. What is not played stays on the tape, but for the question. A signal
        that raises in between may lose what was told: a drafter knows less then, and guesses are checked whatever they come from."""
        tape, given = self._tape, array("d", terms)
        told = len(tape)
        try:
            tape.extend(array("i", question))
            nodes, confidences = self._nodes.buffer_info(), self._confidences.buffer_info()
            told = 0  # from here on it counts as played, even if a signal raises when it was: nothing is told twice
            fault = self._run(self._context, *tape.buffer_info(), *given.buffer_info(), *nodes, *confidences)
        finally:
            del tape[told:]
        if fault:
            raise RuntimeError(_FAULTS[fault])


def _opened(lib: ctypes.CDLL, texts: suffix.Texts, table: grams.Table | None, most_grams: int) -> ctypes.c_void_p:
    rates, joint = (np.asarray(prior, np.float64) for prior in (suffix.cells(), dag.cells(2)))
    parts = [
        np.ascontiguousarray(part) for part in (rates, joint, *((table.keys, table.tokens, table.chances) if table is not None else ()))
    ]
    numbers = texts.tree, texts.shared, most_grams, suffix.MOST_SCOPES, texts.own_tokens, texts.shared_tokens
    sources = _Sources(*numbers, -1 if table is None else len(table.keys), *(part.ctypes.data for part in parts))
    context = ctypes.c_void_p(lib.fr_lookup_open(ctypes.byref(sources)))
    if not context.value:
        raise MemoryError("out of memory for look-ups")
    return context
