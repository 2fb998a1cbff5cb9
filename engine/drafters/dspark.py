"""DSpark: a block drafter whose guesses know each other, and that says how sure it is (2607.05147): `--speculator dspark=DIR`.

The drafter is `dflash.py`'s `Blocks`; this is its voice. At place k, behind the token x (the root, then what was chosen):

    e = W1[x]                                            a row of a table of rank r
    logits = head(h) + W2 z     vanilla   z = e
                                gated     z = σ(G [h; e] + b) · e
                                rnn       g, c, o = J [s; e; h] + b;   s ← σ(g) s + (1 − σ(g)) tanh(c);   z = tanh(o),   s = 0 at first
    confidence = σ(w · [h; e] + b)                       that what is chosen here is accepted, if all before it was; or of h alone

Guesses beside the chain are leaves. What the confidence head says is a kind of guess (`lattice.py`) and counts for what came of it. The
heads are known by their tensors and the configuration, whatever the checkpoint is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.backends.base import Ops, Weight
from forerun.engine.drafters.dflash_load import Config
from forerun.engine.drafters.heads import Heads
from forerun.engine.drafters.voice import Heard, Said
from forerun.engine.models.decoder import Linear


@dataclasses.dataclass(frozen=True, slots=True)
class Markov:
    """`before`: W1, [V, r]; `after`: W2, [V', r]. `inner`: of the gated [r, H + r] and the recurrent [3r, 2r + H] kind."""

    kind: str
    before: Tensor
    after: Weight
    inner: Linear | None

    def step(self, ops: Ops, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens int32 [n], hidden [n, H], state [n, r] → (e [n, r], what is added to the logits [n, V'], the next state)."""
        e = ops.embed(self.before, tokens)
        z = e
        if self.inner is not None and self.kind == "gated":
            z = torch.sigmoid(self.inner(ops, torch.cat([hidden, e], 1))) * e
        elif self.inner is not None:
            keep, candidate, out = self.inner(ops, torch.cat([state, e, hidden], 1)).chunk(3, 1)
            keep = torch.sigmoid(keep)
            state = keep * state + (1.0 - keep) * torch.tanh(candidate)
            z = torch.tanh(out)
        return e, ops.matmul(z, self.after), state


@dataclasses.dataclass(frozen=True, slots=True)
class Spark:
    """A `Voice`. `sure`: weight [H (+ r)] and bias of the confidence head; `paired`: it reads e too."""

    ops: Ops
    output: Callable[[Ops, Tensor], Tensor]
    markov: Markov | None
    sure: tuple[Tensor, Tensor] | None
    paired: bool
    free: bool

    def says(self, hidden: Tensor) -> Said:
        return _Sparks(self, hidden)


class _Sparks:
    def __init__(self, own: Spark, hidden: Tensor) -> None:
        self._own = own
        self._heard = Heard(hidden, lambda x: own.output(own.ops, x))
        rank = 0 if own.markov is None else own.markov.before.shape[1]
        self._state = torch.zeros(hidden.shape[0], rank, device=hidden.device)

    def level(self, place: int, newest: Sequence[int]) -> tuple[Tensor, list[float] | None]:
        own = self._own
        logits, hidden = self._heard.at(place), self._heard.hidden[:, place].contiguous()
        e = self._state
        if own.markov is not None:
            tokens = torch.tensor(newest, dtype=torch.int32, device=hidden.device)
            e, added, self._state = own.markov.step(own.ops, tokens, hidden, self._state)
            logits = logits + added
        if own.sure is None:
            return logits, None
        weight, bias = own.sure
        read = torch.cat([hidden, e], 1) if own.paired else hidden
        return logits, torch.sigmoid(read @ weight + bias).tolist()

    def keep(self, rows: Sequence[int]) -> None:
        self._heard.keep(rows)
        self._state = self._state[list(rows)]


def has_heads(heads: Heads) -> bool:
    """Whether the checkpoint has what DSpark adds."""
    return any(name.startswith(("markov_head.", "confidence_head.")) for name in heads.names())


def read_spark(
    heads: Heads, config: Config, ops: Ops, output: Callable[[Ops, Tensor], Tensor], hidden: int, vocab: int, reduced: int
) -> Spark:
    """`vocab`: of the tokens that are read; `reduced`: of those that are guessed."""
    markov = read_markov(heads, config, hidden, vocab, reduced)
    paired = bool(config.get("confidence_head_with_markov", markov is not None))
    heads.demand(not paired or markov is not None, "its confidence head reads a Markov head that is not there", "fetch the heads again")
    sure = None
    if heads.has("confidence_head.proj.weight"):
        width = hidden + (markov.before.shape[1] if paired and markov is not None else 0)
        weight = heads.keep(heads.tensor("confidence_head.proj.weight", (1, width)).float()[0])
        sure = weight, heads.vector("confidence_head.proj.bias", 1)
    return Spark(ops, output, markov, sure, paired, free=markov is None)


def read_markov(heads: Heads, config: Config, hidden: int, vocab: int, reduced: int) -> Markov | None:
    if not heads.has("markov_head.markov_w1.weight"):
        return None
    rank = heads.checkpoint.shape(f"{heads.prefix}markov_head.markov_w1.weight")[1]
    said = config.get("markov_rank")
    heads.demand(said in (None, rank), f"markov_rank is {said}, its tensors have {rank}", "fetch config.json of these heads again")
    kind = str(config.get("markov_head_type") or "vanilla").lower()
    heads.demand(kind in ("vanilla", "gated", "rnn"), f"its Markov head is {kind!r}", "use one that is vanilla, gated or rnn")
    before = heads.table("markov_head.markov_w1.weight", vocab, rank)
    after = heads.weight("markov_head.markov_w2.weight", reduced, rank)
    inner = None
    if kind == "gated":
        inner = heads.linear("markov_head.gate_proj", rank, hidden + rank)
    elif kind == "rnn":
        inner = heads.linear("markov_head.joint_proj", 3 * rank, 2 * rank + hidden)
    return Markov(kind, before, after, inner)
