"""The controller: who is asked for guesses in the next step, and what guesses have to bring.

`__call__` is the scheduler's `Budget`; `landed`, `stepped` and `forget` are how it hears what became of it. Decides for one replica; knows
of sequences their length and their own limit only.

    yields, costs ──▶ G, the tokens a second to expect ──▶ tolls ──▶ the worker keeps the guesses that are worth them
                                 └──▶ who is worth the drafter's time
    a finished step ──▶ costs (how long it took), yields (what each ask brought), guard (did it pay, all in all)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from forerun.messages import Profile
from forerun.router.controller.cost import Costs, CostTable
from forerun.router.controller.drafting import USUAL, Drafting
from forerun.router.controller.guard import Breaker
from forerun.router.controller.proof import Proof
from forerun.router.controller.toll import MOST, Tolls, tolls
from forerun.router.controller.weight import weights
from forerun.router.controller.yields import Curiosity, Honesty, Mean, Yield
from forerun.router.guesses import Allowance, Round, Snapshot
from forerun.router.request import Sequence
from forerun.router.standstill import Standstill

LARGEST_STEP = 2048
"""rows up to which costs are looked up; a step with more costs in proportion"""
LOOK_ROUNDS = 32
"""at least so many between two looks at what a plain step takes now"""
LOOKS = 3
"""rounds of a look"""
HOPE_ROUNDS = 32
"""one decision in so many takes sizes of steps that were not seen for long to be as cheap as they may be"""
FIRST_NODES, GROWTH = 32, 4
"""a step may have so many nodes, and so many times what is usual"""
SURE = 2.0
"""standard deviations by which guessing must be ahead for nobody to look soon whether it is"""
LOOK_SHARE = 0.005
"""what looks may cost where guessing is surely ahead: nobody is sure for ever, since weather and text change"""
BEST = 0.95
"""survival of guesses than which none are expected to be better: where not even these are worth their toll, nobody is asked"""
REST, PATIENCE = 4, 8
"""Deciding takes the longer the more sequences there are, on a machine whose cores are busy with the steps. Where nobody is worth asking
about, up to a round for every so many sequences goes by before it is decided again: one more after every so many decisions in vain."""
CROWD = 8
"""Sequences beyond which guesses must be sure to pay: what a step takes longer than expected, every sequence of a crowd pays for."""
SHORTFALL, CARE, DEAR = 1.0, 0.01, 0.1
"""What a crowd's guesses must bring beyond what they take, as a share of its tokens: so many standard deviations of what is in doubt about
their step, and at the least what deciding takes (`CARE`) and, where a node costs nearly as much as a token is worth, `DEAR` times that
price: there is little to win then, and step times are not known that well."""
PROVEN = 0.5, 0.75
"""Prices of a node from which, and from which in full, a crowd is charged what its guesses lacked of what was hoped: where nodes are cheap,
a text that has become unpredictable says nothing of the others."""
READ_ASKS = 16
"""asks over which it is spread what a drafter takes to read a sequence that it is asked about for the first time, or after a pause"""
_LATE = 3
"""decisions within which the guesses of a look have landed if they ever do"""
_SHOWN = 32
"""sequences up to which a snapshot says what drafting takes"""
_OUTLIER = 5.0
"""A step that took longer than expected by more than so many usual surprises says nothing about guesses: the guard sees no more than
that."""


class Price:
    """`most`: guesses a sequence may have in a step. `cutoff`: decoding sequences above which nobody guesses (the hard stop; below it the
    tolls close speculation by themselves). `changed` is told when a breaker changed its state: (least number of sequences it is for,
    state). `nodes`: guesses of a step, all sequences together. `rough`: better costs will be told."""

    def __init__(
        self,
        costs: Costs,
        most: int,
        cutoff: int | None = None,
        changed: Callable[[int, str], None] | None = None,
        nodes: int = MOST,
        rough: bool = False,
    ) -> None:
        self._rough = rough
        self._costs = CostTable(costs, LARGEST_STEP)
        self._drafting = Drafting()
        self._most = most
        self._nodes = min(nodes, MOST)
        self._cutoff = cutoff
        self._changed = changed
        self._all = Mean()
        self._yields: dict[Sequence, Yield] = {}
        self._breakers: dict[int, Breaker] = {}
        self._proofs: dict[int, Proof] = {}
        self._round = 0
        self._plain_round = 0
        """the last one without guesses"""
        self._seen = 0
        """the last one of which a step without guesses was seen"""
        self._looks = 0
        """rounds left of a look at plain steps"""
        self._decisions = 0
        self._vain = 0
        """decisions in a row by which nobody was worth asking about"""
        self._rest = 0
        """rounds until it is decided again"""
        self._honesty = Honesty()
        self._curiosity = Curiosity()
        self._landed: list[tuple[Sequence, int, int, float]] = []
        """(sequence, nodes, accepted, expected) of the step that is being told"""
        self._weighing = False
        """the last sequences had priorities"""
        self._standstill = Standstill()
        """among steps without prompts"""
        self._last = Allowance([], 0)
        self._lambda = 0.0
        """what a node of the last step that had guesses cost on average"""
        self._gain = 1.0
        self._expected = self._measured = 0.0

    def __call__(self, sequences: list[Sequence], prompts: int = 0) -> Allowance | None:
        self._round += 1
        roots = len(sequences)
        allowance = None
        self._rest = min(self._rest, roots // REST)  # what a crowd has earned is not for the few that remain of it
        if self._rest > 0:
            self._rest -= 1
            self._curiosity.earn(roots)
        elif self._most > 0 and roots > 0 and (self._cutoff is None or roots <= self._cutoff) and self._breaker(roots).allows():
            allowance = self._allow(sequences, prompts)
        if allowance is None:
            self._plain_round = self._round
        return allowance

    def landed(self, sequence: Sequence, nodes: int, accepted: int, expected: float) -> None:
        self._landed.append((sequence, nodes, accepted, expected))

    def stepped(self, round: Round) -> None:
        costs, roots, read = self._costs, round.roots, round.read
        usual = costs.seconds(roots, roots, read, read) if roots else math.inf
        unread, chosen = self._caught_up(), round.chosen_seconds
        if round.caught_up >= 0:  # it reads in parts, and knows better
            unread = round.caught_up
        drafting = self._drafting.observe(round.asked, round.draft_seconds - chosen, unread, chosen, usual)
        if not roots:
            return
        scored = read + round.nodes * read // roots
        plain = costs.seconds(round.rows - round.nodes, roots, read, read)
        verifying = costs.seconds(round.rows, roots, read, scored, True) if round.nodes else plain
        urgent = self._learn(max(0.0, verifying - plain) / max(1, round.nodes), round.caught_up > 0)
        if round.prefill_tokens:
            return
        forward = round.seconds - round.draft_seconds
        if self._standstill.saw(forward, verifying):
            return
        if not round.nodes:
            self._seen = self._round
        self._expected, self._measured = verifying + drafting, round.seconds
        costs.correct(forward, round.rows, roots, read, scored, round.nodes > 0)
        if roots > CROWD:
            self._prove(round, round.tokens + urgent, forward + drafting, plain)
        if round.asked:
            breaker = self._breaker(roots)
            seconds = min(forward + drafting, (1 + _OUTLIER * costs.usual_surprise) * self._expected)
            if breaker.observe(round.tokens + urgent, seconds, roots, plain) and self._changed:
                self._changed(_least(roots), breaker.state)

    def _prove(self, round: Round, tokens: float, seconds: float, plain: float) -> None:
        """A step of a crowd brought `tokens`, those of urgent sequences for what they are worth, as they are hoped for, in `seconds`, where
        one without guesses was expected to take `plain`."""
        proof, roots = self._proof(round.roots), round.roots
        if round.asked:
            noise = 1.5 * self._costs.usual_surprise
            proof.guessed(tokens / roots, seconds / plain, round.nodes / roots**2, noise)
        else:
            proof.plain(seconds / plain)

    def _caught_up(self) -> int:
        """Tokens of the sequences of this step that their drafter had not read, beyond the usual."""
        unread = 0
        for sequence, _, _, _ in self._landed:
            known = self._yields.get(sequence)
            if known is not None:
                unread += max(0, len(sequence.tokens) - known.read - USUAL)
                known.read = len(sequence.tokens)
        return unread

    def _learn(self, seconds: float, reading: bool = False) -> float:
        """What came of the asks of a step in which each node took so many seconds. Returns what accepted guesses were worth beyond one
        token each, for being urgent. `reading`: the drafter reads on, and says nothing of what it has not read."""
        urgent = 0.0
        for sequence, nodes, accepted, expected in self._landed:
            known = self._yields.get(sequence)
            if known is not None and (nodes or not reading):
                self._honesty.observe(accepted, expected)
                earned = self._honesty.factor * expected if expected else accepted
                known.mean.observe(nodes, earned, nodes * seconds)
                self._all.observe(nodes, earned, nodes * seconds)
                if known.tried is not None:
                    if self._round - known.looked <= _LATE:
                        self._curiosity.settle(known.weight * (accepted - known.tried))
                    known.tried = None
                urgent += (known.weight - 1.0) * accepted
        self._landed = []
        return urgent

    def forget(self, sequence: Sequence) -> None:
        self._yields.pop(sequence, None)

    def profiled(self, profile: Profile) -> None:
        """What was learned about the old costs goes with them, and what guesses were short of by them: the new ones were measured just now.
        None: they stay as they are."""
        self._rough = profile.rough
        if profile.costs:
            self._proofs.clear()
            self._costs = CostTable(Costs(profile.costs, profile.segment_seconds, profile.contexts), LARGEST_STEP)

    def snapshot(self) -> Snapshot:
        last, costs = self._last, self._costs
        asked = sum(guess > 0 for guess in last.guess)
        return Snapshot(
            "price",
            guessing=self._plain_round != self._round,
            budget=last.total,
            asked=asked,
            price=self._lambda,
            gain=self._gain,
            expected_seconds=self._expected,
            measured_seconds=self._measured,
            surprise=costs.surprise,
            drift=costs.drift,
            guards={least: breaker.view() for least, breaker in sorted(self._breakers.items())},
            costs=costs.table(),
            contexts=costs.costs.contexts,
            jump=costs.jump,
            drafting=self._drafting.seconds(_SHOWN),
            honesty=self._honesty.factor,
            earned=self._all.accepted,
            rough=self._rough,
        )

    def _allow(self, sequences: list[Sequence], prompts: int) -> Allowance | None:
        roots = len(sequences)
        lengths = [len(sequence.tokens) for sequence in sequences]
        read = sum(lengths)
        known = [self._yields.get(sequence) or self._open(sequence) for sequence in sequences]
        weighed = self._weigh(sequences, known)
        drafting = self._drafting.seconds(roots)
        goodput, nodes = self._outlook(known, read, drafting)
        # A step with prompts shows nothing of plain ones, and would be looked at for ever.
        if not prompts and self._looks_at_plain(roots, nodes):
            return None
        self._decisions += 1
        rows = min(roots + prompts, LARGEST_STEP - MOST)
        hopeful = self._decisions % HOPE_ROUNDS == 0
        plain = self._costs.seconds(rows, roots, read, read)
        # No more than may be of use soon; each entry takes time.
        most = min(self._nodes, roots * self._most, FIRST_NODES + GROWTH * round(nodes))
        climb = self._costs.climb(rows, roots, most, plain, hopeful)
        charged = tolls(climb, goodput, self._costs.entry_seconds(rows, roots, read / roots), max(weighed, default=1.0))
        late = [news - USUAL if (news := length - one.told) > USUAL else 0 for length, one in zip(lengths, known)]
        least = 0.0 if hopeful else self._margin(roots, nodes, charged, prompts > 0) / max(weighed, default=1.0)
        self._ask(known, goodput, drafting, late, charged.pays(BEST), least)
        for length, one in zip(lengths, known):
            if one.asked:
                one.told = length
        guess = [self._limit(sequence, charged) if one.asked else 0 for sequence, one in zip(sequences, known)]
        total = min(sum(guess), len(charged.toll))
        if not total:
            return None
        if roots > CROWD and not prompts:
            asked = [one.worth(goodput) for one in known if one.asked]
            self._proof(roots).hope((sum(asked) - goodput * drafting[len(asked)]) / roots)
        discount = min(1.0, 1 / self._gain)
        self._lambda = charged.price(nodes)
        least = charged.least * discount / max(weighed, default=1.0)
        self._last = Allowance(guess, total, least, charged.toll[:total], charged.entry, discount, goodput, weighed)
        return self._last

    def _margin(self, roots: int, nodes: float, charged: Tolls, prompts: bool) -> float:
        """Tokens that guesses must bring beyond what they take. Few sequences need none. A step with prompts proves nothing, so that what
        was proven elsewhere is not charged there: it would never fade where every step has some."""
        beyond = max(0, roots - CROWD)
        doubt = SHORTFALL * self._costs.doubt(roots, roots + round(nodes)) if beyond else 0.0
        price = charged.price(roots / 4)
        margin = beyond * max(CARE, doubt, DEAR * price * beyond / roots)
        if not beyond or prompts:
            return margin
        dear = min(1.0, max(0.0, (price - PROVEN[0]) / (PROVEN[1] - PROVEN[0])))
        return margin + self._proof(roots).charge * dear * roots

    def _weigh(self, sequences: list[Sequence], known: list[Yield]) -> list[float]:
        """Set what the guesses of each sequence are worth. Empty: as much as each other's."""
        weighed = weights([sequence.request.priority for sequence in sequences])
        if weighed or self._weighing:
            for one, weight in zip(known, weighed or [1.0] * len(known)):
                one.weight = weight
        self._weighing = bool(weighed)
        return weighed

    def _outlook(self, known: list[Yield], read: int, drafting: list[float]) -> tuple[float, float]:
        """Tokens a second and nodes to expect of a step without prompts, if the same sequences are asked about as in the last."""
        roots = len(known)
        plain = self._costs.seconds(roots, roots, read, read)
        accepted = nodes = seconds = 0.0
        asked = 0
        for one in known:
            if one.asked:
                accepted += one.weight * one.mean.accepted
                nodes += one.mean.nodes
                seconds += one.mean.seconds
                asked += 1
        guessing = (roots + accepted) / (plain + seconds + drafting[asked] + self._drafting.chosen(asked))
        self._gain = guessing * plain / roots
        return max(roots / plain, guessing), nodes

    def _looks_at_plain(self, roots: int, nodes: float) -> bool:
        """Whether to go without guesses in this round, because it is long ago that a plain step was seen: the longer, the more guessing
        seems to pay."""
        if self._looks == 0:
            rounds = self._round - self._seen
            if rounds < LOOK_ROUNDS:
                return False
            sure = math.log(self._gain) > SURE * self._costs.doubt(roots, roots + round(nodes))
            if sure and rounds * LOOK_SHARE < LOOKS * (self._gain - 1.0):
                return False
            self._looks = LOOKS
        self._looks -= 1
        return True

    def _ask(self, known: list[Yield], goodput: float, drafting: list[float], late: list[int], pays: bool, least: float) -> None:
        """Decide who is asked about. `drafting[k]`: seconds that k asks take; `late`: tokens of each that the drafter has to catch up
        with; `pays`: good drafts would be worth their toll; `least`: tokens that all of it must bring."""
        worth = [-1.0 if one.mute else one.worth(goodput) for one in known]
        read = goodput * self._drafting.read_seconds
        if any(late):
            worth = [value - read * unread / READ_ASKS for value, unread in zip(worth, late)]
        order = sorted(range(len(known)), key=worth.__getitem__, reverse=True)
        earned, best, chosen = 0.0, least, 0
        for count, i in enumerate(order, 1):
            if worth[i] <= 0.0 or not pays:
                break
            earned += worth[i]
            if earned - goodput * drafting[count] > best:
                best, chosen = earned - goodput * drafting[count], count
        for place, i in enumerate(order):
            known[i].asked = place < chosen
        self._vain = 0 if chosen else self._vain + 1
        self._rest = min(self._vain // PATIENCE, len(known) // REST)
        self._curiosity.earn(len(known))
        rest = [i for i in order[chosen:] if not known[i].mute]
        if rest:
            cost = goodput * drafting[max(chosen, 1)] / max(chosen, 1)
            self._look(rest, known, worth, lambda i: cost + read * late[i], 0.0 if chosen else least)

    def _look(self, rest: list[int], known: list[Yield], worth: list[float], cost: Callable[[int], float], risk: float) -> None:
        """Ask about some that are not worth it as well, whose turn it is. `worth[i]`: tokens that asking about one is expected to bring,
        `cost(i)`: that it takes; `risk`: that it may take to have guesses at all in a step that would have none."""
        rest.sort(key=lambda i: known[i].looked)
        for i in rest:
            if not self._curiosity.affords(cost(i) + risk - worth[i]):
                return
            risk = 0.0
            known[i].asked = True
            known[i].looked = self._round
            known[i].tried = known[i].mean.accepted

    def _limit(self, sequence: Sequence, charged: Tolls) -> int:
        asked = sequence.request.speculate
        return min(self._most if asked is None else min(asked, self._most), len(charged.toll))

    def _open(self, sequence: Sequence) -> Yield:
        opened = self._yields[sequence] = Yield(self._all, sequence.request.speculate == 0)
        return opened

    def _proof(self, roots: int) -> Proof:
        return self._proofs.setdefault(_least(roots), Proof())

    def _breaker(self, roots: int) -> Breaker:
        return self._breakers.setdefault(_least(roots), Breaker())


def _least(roots: int) -> int:
    """Batches of 1, 2, 3–4, 5–8, … sequences have a breaker each."""
    return 1 if roots == 1 else (1 << (roots - 1).bit_length() - 1) + 1
