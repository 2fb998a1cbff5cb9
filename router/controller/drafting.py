"""What drafting adds to a step: by the number of sequences that the drafter is asked about, and by what it has not read of them yet.

A drafter that looks things up takes its time for each sequence, one that computes takes it for all of them at once: so the time is learned
for 1, 2, 3–4, 5–8, … sequences, and where nothing was seen yet it is in proportion to the nearest that was. A drafter that computes also
reads a whole prompt when it is first asked about a sequence. That is paid once, so it must not count as what every ask takes. Nor does what
a join of drafters spends on those of them that it need not have asked: it weighs that itself, and were it the price of every ask, a dear
source would close the cheap one beside it.

A process that is stopped, or waits for its processor, books that on whatever it was at. So no measurement moves anything far, and one that
is out of all proportion teaches nothing, unless another one was so not long before: then it is how things are.
"""

from __future__ import annotations

import math

USUAL = 24
"""tokens a sequence that are news in any step: what a step brings, with guesses; more is something to catch up with"""
_BUCKETS = 12
_FIRST = 4
"""observations of which a mean is the plain one; from then on each newest has this share of what is between"""
_CLIP = 1.0
"""a surprise counts for no more than a factor of e"""
_STEP = 0.05
"""share of the newest step in how often drafters chose to do more"""
_LEAST = 0.05
"""share of a measured time that is attributed at the least to either"""
_ABSURD = 8.0
"""times what was expected that nobody believes at once"""
_ABSURD_STEPS = 30.0
"""the same where nothing is known: plain steps, and one more for each token that is read"""
_RARE = 16
"""asks among which no more than one is not believed"""


class _Rate:
    """Mean of logarithms with bounded steps: outliers count for little."""

    __slots__ = ("log", "seen")

    def __init__(self) -> None:
        self.log = 0.0
        self.seen = 0

    @property
    def value(self) -> float:
        return math.exp(self.log) if self.seen else 0.0

    def observe(self, value: float) -> None:
        new = math.log(value)
        self.seen += 1
        surprise = max(-_CLIP, min(_CLIP, new - self.log)) if self.seen > 1 else new
        self.log += surprise / min(self.seen, _FIRST)


class Drafting:
    def __init__(self) -> None:
        self._each = [_Rate() for _ in range(_BUCKETS)]
        """seconds for each sequence"""
        self._read = _Rate()
        self._choice = [_Rate() for _ in range(_BUCKETS)]
        """seconds of a step in which drafters spent some by their own choice"""
        self._often = [0.0] * _BUCKETS
        """share of such steps"""
        self._since = _RARE
        """asks since one was not believed"""

    @property
    def read_seconds(self) -> float:
        """What a token takes that the drafter has to catch up with; nothing as long as nothing is known."""
        return self._read.value

    def chosen(self, asked: int) -> float:
        """Seconds that drafters add by their own choice to a step in which so many are asked about."""
        at = _bucket(asked)
        return self._often[at] * self._choice[at].value if asked else 0.0

    def observe(self, asked: int, seconds: float, unread: int = 0, chosen: float = 0.0, plain: float = math.inf) -> float:
        """A step's drafting: what it took, and what was added to that by choice. `unread`: tokens it had to catch up with, beyond the
        usual; `plain`: seconds of a plain step. Returns what of all that is to be believed, in seconds; where it is absurd, what it
        usually is."""
        if asked < 1:
            return 0.0
        at = _bucket(asked)
        usual = self._usual(asked, unread, chosen > 0.0)
        limit = _ABSURD * usual if usual else (_ABSURD_STEPS + unread) * plain
        self._since += 1
        if seconds + chosen > limit and self._since > _RARE:
            self._since = 0
            return usual
        self._often[at] += _STEP * ((chosen > 0.0) - self._often[at])
        if chosen > 0.0:
            self._choice[at].observe(min(chosen, limit))
        if seconds > 0.0:
            self._learn(asked, min(seconds, limit), unread)
        return min(seconds + chosen, limit)

    def _usual(self, asked: int, unread: int, chose: bool) -> float:
        """Seconds of such a step; nothing as long as some part of them is not known."""
        parts = [self.seconds(asked)[asked]]
        if unread:
            parts.append(self._read.value * unread)
        if chose:
            parts.append(self._choice[_bucket(asked)].value)
        return sum(parts) if all(parts) else 0.0

    def _learn(self, asked: int, seconds: float, unread: int) -> None:
        reading, asking = self._read.value * unread, self.seconds(asked)[asked]
        if unread and not reading:  # the first one: nobody knows what took how long
            reading = seconds / 2 if not asking else max(seconds - asking, _LEAST * seconds)
            self._read.observe(reading / unread)
            if asking:
                return
        elif unread and reading >= asking:
            self._read.observe(max(seconds - asking, _LEAST * seconds) / unread)
            return
        self._each[_bucket(asked)].observe(max(seconds - reading, _LEAST * seconds) / asked)

    def seconds(self, most: int) -> list[float]:
        """Of steps in which 0, 1, … `most` sequences are asked about, and nothing has to be caught up with; nothing as long as nothing is
        known."""
        known = [at for at, rate in enumerate(self._each) if rate.seen]
        if not known:
            return [0.0] * (most + 1)
        found = [0.0]
        for bucket in range(_bucket(max(most, 1)) + 1):
            each = self._each[min(known, key=lambda at: abs(at - bucket))].value
            found += [asked * each for asked in range(len(found), min(1 << bucket, most) + 1)]
        return found


def _bucket(asked: int) -> int:
    return min(max(asked - 1, 0).bit_length(), _BUCKETS - 1)
