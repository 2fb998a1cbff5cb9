"""Two controllers that know nothing of costs, confidences and each other's sequences: baselines, and a way out."""

from __future__ import annotations

from forerun.messages import Profile
from forerun.router.guesses import Allowance, Round, Snapshot
from forerun.router.request import Sequence


class Fixed:
    """`--speculation-controller fixed`: always `most` guesses a sequence, up to `cutoff` sequences."""

    def __init__(self, most: int, cutoff: int | None = None) -> None:
        self._most = most
        self._cutoff = cutoff
        self._last = Allowance([], 0)

    def __call__(self, sequences: list[Sequence], prompts: int = 0) -> Allowance | None:
        if self._cutoff is not None and len(sequences) > self._cutoff:
            return None
        guess = [self.window(sequence) for sequence in sequences]
        self._last = Allowance(guess, sum(guess))
        return self._last if self._last.total else None

    def window(self, sequence: Sequence) -> int:
        """Guesses that this sequence may have now."""
        asked = sequence.request.speculate
        return self._most if asked is None else min(asked, self._most)

    def landed(self, sequence: Sequence, nodes: int, accepted: int, expected: float) -> None:
        return None

    def stepped(self, round: Round) -> None:
        return None

    def forget(self, sequence: Sequence) -> None:
        return None

    def profiled(self, profile: Profile) -> None:
        return None

    def snapshot(self) -> Snapshot:
        asked = sum(guess > 0 for guess in self._last.guess)
        return Snapshot(type(self).__name__.lower(), self._last.total > 0, self._last.total, asked)


class Aimd(Fixed):
    """`--speculation-controller aimd`: a window for each sequence, as TCP has one for each connection. A draft that held in full opens it
    by one, a loss in the first half halves it, a later one leaves it. It never closes below one guess."""

    def __init__(self, most: int, cutoff: int | None = None) -> None:
        super().__init__(most, cutoff)
        self._windows: dict[Sequence, int] = {}

    def window(self, sequence: Sequence) -> int:
        return min(super().window(sequence), self._windows.get(sequence, 2))

    def landed(self, sequence: Sequence, nodes: int, accepted: int, expected: float) -> None:
        window = self._windows.get(sequence, 2)
        if nodes and accepted >= nodes:
            self._windows[sequence] = min(self._most, window + 1)
        elif nodes and 2 * accepted < window:
            self._windows[sequence] = max(1, window // 2)

    def forget(self, sequence: Sequence) -> None:
        self._windows.pop(sequence, None)
