"""Which token comes next at each node, and how likely it was.

At a node the parameters are applied as if the node's path had been generated: penalties count it, the watermark looks at its last
token, the dice are those of its index. Every node is computed by itself or in an op whose rows do not depend on each other, so a result
is the same bits in any batch. Knows nothing of drafts, pages or why a node is asked for.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from forerun.backends.base import Draws, Ops, Picks
from forerun.engine import processing
from forerun.engine.models.model import Output
from forerun.engine.processing import Ids, Scores
from forerun.engine.rows import Row
from forerun.kernels.dice import signed

log = logging.getLogger(__name__)

NOT_A_NUMBER = "the model computed something that is not a number"
NOTHING_ALLOWED = "the grammar allows no token here that the model has"


@dataclasses.dataclass(slots=True)
class Ask:
    """A node: `at`, its row of the logits; `path`, the guessed tokens after the row's own, ending with the node's."""

    at: int
    row: Row
    path: Sequence[int]

    @property
    def index(self) -> int:
        """Index of the token that is picked here, among the generated ones."""
        return self.row.generated + len(self.path)


@dataclasses.dataclass(slots=True)
class Choice:
    """What was picked. An `error` takes the token's place."""

    token: int
    logprob: float = 0.0
    top: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    error: str = ""


@dataclasses.dataclass(slots=True)
class _Candidates:
    """A node whose support is narrow, or whose alternatives are reported. `ids`: the support, ascending, or None = all."""

    place: int
    ask: Ask
    scores: Scores
    ids: Ids | None


class Sampler:
    def __init__(self, ops: Ops, vocab: int, gamma: float, delta: float) -> None:
        self._ops = ops
        self._vocab = vocab
        self._watermark = processing.Watermark(vocab, gamma, delta)

    def choose(self, logits: Tensor, asks: Sequence[Ask]) -> list[Choice]:
        """logits float32 [m, V] → one choice for each of `asks`."""
        plain = [i for i, ask in enumerate(asks) if ask.row.plain]
        choices = [Choice(-1)] * len(asks)
        if plain:
            whole = len(plain) == len(asks) == logits.shape[0]
            self._pick(plain, logits if whole else logits[[asks[i].at for i in plain]], None, choices)
        if len(plain) < len(asks):
            self._process(logits, asks, choices)
            self._unprocessed(logits, asks, choices)
        return choices

    def decide(self, output: Output, asks: Sequence[Ask]) -> list[Choice]:
        """As `choose` from the output's logits, bit for bit; where every row is one of `asks` and none asks for more than a temperature and
        dice, the choice is made in the output head and nobody's logits are ever written to memory."""
        head, hidden = output.head, output.hidden
        simple = all(ask.row.plain or ask.row.drawn for ask in asks)
        if output.scores is not None or head is None or hidden is None or not simple or len(asks) != hidden.shape[0]:
            return self.choose(output.logits, asks)
        choices = [Choice(-1)] * len(asks)
        self._note(range(len(asks)), head.choose(hidden, _draws(asks, hidden.device)), choices)
        return choices

    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], top_n: int) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """Log-softmax of raw logits [k, V] at one target id each, and where it is highest."""
        rows: Scores = logits.cpu().numpy()
        normalizers = [processing.log_normalizer(row) for row in rows]
        own = [processing.single(float(row[t]) - normalizer) for row, t, normalizer in zip(rows, targets, normalizers)]
        return own, [processing.most_likely(row, None, normalizer, top_n) for row, normalizer in zip(rows, normalizers) if top_n]

    def _pick(self, places: Sequence[int], scores: Tensor, noise: Tensor | None, choices: list[Choice]) -> None:
        self._note(places, self._ops.pick(scores, noise), choices)

    def _note(self, places: Sequence[int], picks: Picks, choices: list[Choice]) -> None:
        for place, token, logprob in zip(places, picks.tokens.tolist(), picks.logprobs.tolist()):
            choices[place] = Choice(token, logprob) if token >= 0 and isfinite(logprob) else Choice(-1, error=NOT_A_NUMBER)

    def _process(self, logits: Tensor, asks: Sequence[Ask], choices: list[Choice]) -> None:
        """The nodes that are not plain: those whose whole vocabulary stays possible go through `ops.pick`, the others stay here."""
        wide: dict[bool, list[tuple[int, Scores]]] = {False: [], True: []}
        narrow: list[_Candidates] = []
        for place, ask in enumerate(asks):
            params = ask.row.params
            if ask.row.plain:
                continue
            try:
                scores = self.processed(logits[ask.at].cpu().numpy(), ask)
                narrowing = params.sample and (params.top_k or params.top_p < 1.0 or params.typical_p < 1.0)
                if narrowing:
                    ids = processing.narrow(scores, params)
                    narrow.append(_Candidates(place, ask, scores[ids], ids))
                elif params.top_n:
                    narrow.append(_Candidates(place, ask, scores, None))
                else:
                    wide[params.sample].append((place, scores))
            except Exception as error:
                choices[place] = Choice(-1, error=_failed(error))
        for sample, found in wide.items():
            if found:
                stacked = torch.from_numpy(np.stack([scores for _, scores in found])).to(logits.device)
                places = [place for place, _ in found]
                self._pick(places, stacked, self._noise([asks[place] for place in places]) if sample else None, choices)
        for candidates, noise in zip(narrow, self._noise_of(narrow)):
            choices[candidates.place] = _best(candidates, noise)

    def _unprocessed(self, logits: Tensor, asks: Sequence[Ask], choices: list[Choice]) -> None:
        """The model's own log-probabilities in place of those after processing, where they are asked for."""
        for ask, choice in zip(asks, choices):
            params = ask.row.params
            if params.raw_logprobs and not ask.row.plain and not choice.error and (params.logprobs or params.top_n):
                raw: Scores = logits[ask.at].cpu().numpy()
                normalizer = processing.log_normalizer(raw)
                choice.logprob = processing.single(float(raw[choice.token]) - normalizer)
                choice.top = processing.most_likely(raw, None, normalizer, params.top_n) if params.top_n else []

    def processed(self, raw: Scores, ask: Ask) -> Scores:
        """A processed copy of one row of logits, before the support is narrowed."""
        row, params, scores = ask.row, ask.row.params, raw.copy()
        if not np.isfinite(scores.max()):
            raise ArithmeticError(NOT_A_NUMBER)
        if params.watermark:
            self._watermark.apply(scores, ask.path[-1] if ask.path else row.tokens[-1])
        processing.bias(scores, params)
        if row.counts is not None:
            with row.counts.ahead(ask.path):
                processing.penalize(scores, row.counts.ids, row.counts.counts, row.counts.length, params)
        if row.said is not None:
            with row.said.ahead(ask.path):
                processing.discourage(scores, row.said.ids, row.said.counts, params)
        if row.matching is not None and (allowed := row.matching.at(ask.path)) is not None:
            processing.forbid(scores, allowed)
            if scores.max() == -np.inf:
                raise ArithmeticError(NOTHING_ALLOWED)
        if params.sample and params.temperature != 1.0:
            scores /= np.float32(params.temperature)
        return scores

    def _noise(self, asks: Sequence[Ask]) -> Tensor:
        return torch.stack([self._ops.noise(ask.row.params.seed, ask.index, self._vocab) for ask in asks])

    def _noise_of(self, found: Sequence[_Candidates]) -> list[Scores | None]:
        """The dice at each candidate's support, None where it is greedy; all narrow supports are thrown together."""
        noise: list[Scores | None] = [None] * len(found)
        thrown: list[int] = []
        seeds, indices, tokens = [], [], []
        for i, candidates in enumerate(found):
            ask, ids = candidates.ask, candidates.ids
            if not ask.row.params.sample:
                continue
            if ids is None:
                noise[i] = self._ops.noise(ask.row.params.seed, ask.index, self._vocab).cpu().numpy()
                continue
            thrown.append(i)
            seeds.append(np.full(len(ids), signed(ask.row.params.seed), np.int64))
            indices.append(np.full(len(ids), ask.index, np.int64))
            tokens.append(ids)
        if thrown:
            places = (torch.from_numpy(np.concatenate(parts)) for parts in (seeds, indices, tokens))
            values = self._ops.noise_at(*places).cpu().numpy()
            for i, part in zip(thrown, np.split(values, np.cumsum([len(ids) for ids in tokens])[:-1])):
                noise[i] = part
        return noise


def _draws(asks: Sequence[Ask], device: torch.device) -> Draws:
    params = [ask.row.params for ask in asks]
    temperatures = torch.tensor([each.temperature if each.sample else 1.0 for each in params], dtype=torch.float32)
    sampled = torch.tensor([each.sample for each in params], dtype=torch.int32)
    seeds = torch.tensor([signed(each.seed) for each in params], dtype=torch.int64)
    indices = torch.tensor([ask.index for ask in asks], dtype=torch.int64)
    return Draws(*(each.to(device) for each in (temperatures, sampled, seeds, indices)))


def _best(candidates: _Candidates, noise: Scores | None) -> Choice:
    """Argmax of scores and noise (ties to the lowest id), with log-probabilities over the candidates."""
    scores, ids = candidates.scores, candidates.ids
    place = int(np.argmax(scores if noise is None else scores + noise))
    normalizer = processing.log_normalizer(scores)
    if not isfinite(normalizer):
        return Choice(-1, error=NOT_A_NUMBER)
    n = candidates.ask.row.params.top_n
    top = processing.most_likely(scores, ids, normalizer, n) if n else []
    return Choice(place if ids is None else int(ids[place]), processing.single(float(scores[place]) - normalizer), top)


def _failed(error: Exception) -> str:
    if type(error) is not ArithmeticError:
        log.error("processing of a row failed", exc_info=error)
    return str(error) or type(error).__name__
