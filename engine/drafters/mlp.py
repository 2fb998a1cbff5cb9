"""MLPSpeculator: a small recurrent net on the last hidden state and the tokens guessed so far (Wertheimer et al. 2404.19124):
`--speculator mlp=DIR[,tree=chain]`.

    s0 = the target's last hidden state, behind the final norm, where the root x0 was picked      (scale_input: s0 ← norm(s0) / √2)
    s(i+1) = GELU(LN_i(P_i s(i) + a · E_i[x(i)]))           logits = head_i s(i+1)  ─▶  x(i+1)

    a = √((1 − w²) · inner / 2) / w,   w = 0.5^(0.5 / stages)          LN(x) = x / √(mean(x²) + 1e−6) · weight + bias

Layouts, by tensors and configuration:

    IBM, TGI, Arctic's MLP    speculator.{emb,proj,head,ln}.{i}.…     stages that share weights (`tie_weights`) are stored once or as copies
    Arctic's RNN              {emb,proj,ln}.{i}.0.…                   the same net in lists, dimensions as text
    Arctic's LSTM             {forget,input,output,cell}_proj.{0,1}, forget_emb, cell_ln, state_ln, head    one tied stage, with a cell c:
                              f, i, o, g = P s + a · [E E E E][x];  c ← σ(f) c + σ(i) GELU(LN(g));  s ← σ(o) GELU(LN(c))
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backends.base import Ops, Weight
from forerun.engine.drafters.draft import FREE, Commit, Draft, Needs, Place, Terms
from forerun.engine.drafters.heads import Heads, parse_value
from forerun.engine.drafters.lattice import Lattice, Levels
from forerun.engine.drafters.registry import Host, Setting
from forerun.engine.drafters.tips import Tips
from forerun.engine.drafters.voice import rehearse, speak

log = logging.getLogger(__name__)

EPS = 1e-6
WIDTH = 2
"""nodes of a tree for each stage, unless told otherwise: the chain and as many beside it"""


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """x / √(mean(x²) + eps) · weight + bias."""

    weight: Tensor
    bias: Tensor

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.norm(x, self.weight, EPS) + self.bias


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """`table`: [V, inner]; `project`: [inner, H or inner]; `head`: [V, inner]."""

    table: Tensor
    project: Weight
    norm: Norm
    head: Weight


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """`project`: [4 · inner, H or inner], rows forget, input, output, candidate. `table`: [V, inner]; `head`: [V, inner]."""

    table: Tensor
    project: Weight
    cell_norm: Norm
    state_norm: Norm
    head: Weight


class Net(Protocol):
    """`count`: stages. What it remembers of a row is a list of tensors [n, …]."""

    count: int

    def begin(self, state: Tensor) -> list[Tensor]:
        """state [n, H] of the target."""
        ...

    def step(self, stage: int, tokens: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """tokens int32 [n], the newest of each row → (logits [n, V], memory behind it)."""
        ...


class _Scaled:
    """What all nets do with the target's state and with embeddings. `inner`: their width; `scale_input`: the state is normed first."""

    def __init__(self, ops: Ops, count: int, inner: int, hidden: int, scale_input: bool, device: torch.device) -> None:
        self.ops = ops
        self.count = count
        keep = 0.5 ** (0.5 / count)
        self.weigh = math.sqrt((1 - keep * keep) * (inner / 2)) / keep
        self._ones = torch.ones(hidden, device=device) if scale_input else None

    def begin(self, state: Tensor) -> list[Tensor]:
        return [state if self._ones is None else self.ops.norm(state, self._ones, EPS) / math.sqrt(2)]


class StageNet(_Scaled):
    """The published net: stages in a row."""

    def __init__(self, stages: Sequence[Stage], ops: Ops, hidden: int, scale_input: bool, device: torch.device) -> None:
        super().__init__(ops, len(stages), stages[0].project.shape[0], hidden, scale_input, device)
        self._stages = stages

    def step(self, stage: int, tokens: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        ops, own = self.ops, self._stages[stage]
        mixed = ops.add(ops.embed(own.table, tokens), ops.matmul(memory[0], own.project), self.weigh)
        state = F.gelu(own.norm(ops, mixed))
        return ops.logits(state, own.head), [state]


class CellNet(_Scaled):
    """Arctic's LSTM: `cells[0]` reads the target's state, `cells[1]` its own."""

    def __init__(self, cells: Sequence[Cell], count: int, ops: Ops, hidden: int, scale_input: bool, device: torch.device) -> None:
        super().__init__(ops, count, cells[0].table.shape[1], hidden, scale_input, device)
        self._cells = cells

    def begin(self, state: Tensor) -> list[Tensor]:
        return [*super().begin(state), torch.zeros(state.shape[0], self._cells[0].table.shape[1], device=state.device)]

    def step(self, stage: int, tokens: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        ops, own = self.ops, self._cells[min(stage, 1)]
        mixed = ops.add(ops.embed(own.table, tokens).repeat(1, 4), ops.matmul(memory[0], own.project), self.weigh)
        forget, read, write, candidate = mixed.chunk(4, 1)
        cell = memory[1] * torch.sigmoid(forget) + F.gelu(own.cell_norm(ops, candidate.contiguous())) * torch.sigmoid(read)
        state = F.gelu(own.state_norm(ops, cell)) * torch.sigmoid(write)
        return ops.logits(state, own.head), [state, cell]


class _Chained:
    """A net over rows [n, H], stage by stage."""

    def __init__(self, net: Net, state: Tensor) -> None:
        self._net = net
        self._memory = net.begin(state)

    def level(self, place: int, newest: Sequence[int]) -> tuple[Tensor, list[float] | None]:
        tokens = torch.tensor(newest, dtype=torch.int32, device=self._memory[0].device)
        logits, self._memory = self._net.step(place, tokens, self._memory)
        return logits, None

    def keep(self, rows: Sequence[int]) -> None:
        self._memory = [part[list(rows)] for part in self._memory]


class Mlp:
    """`most`: nodes of a draft."""

    def __init__(self, net: Net, levels: Levels, host: Host, most: int, weight_bytes: int, work_bytes: int) -> None:
        self.net = net
        self.levels = levels
        self._tips = Tips()
        self._hidden, self._device = host.model.hidden, host.backend.device
        self.needs = Needs(
            (host.model.layers,), (), most, lazy=False, weight_bytes=weight_bytes, work_bytes=work_bytes, attach=self._attach
        )

    @classmethod
    def open(cls, value: str, setting: Setting) -> Mlp:
        """`value`: the folder or hub id; `tree`: `best` (the default) or `chain`."""
        host = setting.worker
        place, options = parse_value("mlp", value, {"tree": ("best", "chain")})
        heads = Heads.open(place, host)
        net = read_net(heads, host.backend.ops, host.model.hidden, host.model.vocab)
        heads.close()
        tree = setting.tree and options.get("tree") != "chain"
        most = setting.nodes or net.count * (WIDTH if tree else 1)
        log.info("%s has an MLP speculator of %d stages", heads.path, net.count)
        work = 4 * host.start.max_rows * (12 * host.model.hidden + 3 * host.model.vocab)
        most = min(most, host.backend.caps.max_nodes)
        return cls(net, Levels.open(host, tree), host, most, heads.bytes, work)

    def absorb(self, commit: Commit) -> None:
        for number, new in self._tips.absorb(commit):
            self.levels.calibration.settle(number, new)

    def propose(self, rows: list[int], budget: list[int], terms: Terms = FREE) -> list[Draft]:
        ready = self._tips.ready(rows, budget)
        lattices = {row.number: Lattice(row, most, self.net.count) for row, _, most in ready}
        if ready:
            said = _Chained(self.net, torch.stack([state for _, state, _ in ready]))
            speak(self.levels, said, list(lattices.values()), self.net.count, terms)
        return [self.levels.finish(lattices.get(number)) for number in rows]

    def forget(self, rows: list[int]) -> None:
        self._tips.forget(rows)
        for number in rows:
            self.levels.calibration.forget(number)

    def _attach(self, place: Place) -> None:
        for rows in (place.rows, 1):
            state = torch.zeros(rows, self._hidden, device=self._device)
            rehearse(self.levels, _Chained(self.net, state), rows, self.net.count)


def read_net(heads: Heads, ops: Ops, hidden: int, vocab: int) -> Net:
    """The net that the configuration and the tensors describe. Sets the prefix. StartError for another kind, or another target's."""
    if any(name.startswith("speculator.") for name in heads.checkpoint.names()):
        heads.prefix = "speculator."
    config = heads.config
    count = int(config.get("n_predict") or 0)
    heads.demand(
        count > 0, "its config.json has no n_predict, so this is no MLP speculator", "see docs/drafters.md for each drafter's layouts"
    )
    said = int(config.get("vocab_size") or vocab)
    heads.demand(said == vocab, f"it guesses among {said} tokens, the target has {vocab}")
    scale = bool(config.get("scale_input"))
    device = heads.backend.device
    if config.get("method") == "sum_lstm":
        return CellNet(read_cells(heads, hidden, vocab), count, ops, hidden, scale, device)
    tied = bool(config.get("tie_weights"))
    heads.demand(not tied or count > 1, "one stage has nobody to share weights with (tie_weights)", "fetch the heads again")
    return StageNet(read_stages(heads, count, tied, hidden, vocab), ops, hidden, scale, device)


def width(heads: Heads, hidden: int, *names: str) -> int:
    """A dimension of the configuration, as a number or as text; 0 and none at all mean the target's."""
    values = [heads.config[name] for name in names if heads.config.get(name)]
    text = str(values[0]) if values else str(hidden)
    heads.demand(
        text.isdigit(), f"{names[0]} is {text!r}: nets of several layers a stage are not read", "use a speculator of single layers"
    )
    return int(text)


def read_stages(heads: Heads, count: int, tied: bool, hidden: int, vocab: int) -> list[Stage]:
    """Of tied stages the first has all, the second a projection of its own; copies in the file are not read."""
    inner = width(heads, hidden, "inner_dim")
    deep = ".0" if heads.has("emb.0.0.weight") else ""
    stages: list[Stage] = []
    for i in range(count):
        emb, proj, ln, head = f"emb.{i}{deep}.weight", f"proj.{i}{deep}.weight", f"ln.{i}{deep}", f"head.{i}.weight"
        if tied and i:
            heads.skip(emb, f"{ln}.weight", f"{ln}.bias", head, *([proj] if i > 1 else []))
            project = stages[-1].project if i > 1 else heads.weight(proj, inner, inner)
            stages.append(dataclasses.replace(stages[-1], project=project))
        else:
            project = heads.weight(proj, inner, inner if i else hidden)
            norm = read_norm(heads, ln, inner)
            stages.append(Stage(heads.table(emb, vocab, inner), project, norm, heads.weight(head, vocab, inner)))
    return stages


def read_cells(heads: Heads, hidden: int, vocab: int) -> list[Cell]:
    """The two cells differ in their projection alone. Copies of the one embedding are not read."""
    tied = bool(heads.config.get("tie_weights")) and bool(heads.config.get("tie_lstm_embs"))
    heads.demand(tied, "its LSTM does not share weights and embeddings", "use a speculator with tie_weights and tie_lstm_embs")
    inner = width(heads, hidden, "inner_dim")
    heads.skip("input_emb.0.weight", "output_emb.0.weight", "cell_emb.0.weight", *(f"head.{i}.weight" for i in range(1, 64)))
    table, head = heads.table("forget_emb.0.weight", vocab, inner), heads.weight("head.0.weight", vocab, inner)
    norms = read_norm(heads, "cell_ln.0", inner), read_norm(heads, "state_ln.0", inner)
    gates = ("forget", "input", "output", "cell")
    parts = [heads.joined([f"{gate}_proj.{i}.weight" for gate in gates], inner if i else hidden) for i in range(2)]
    heads.demand(
        all(part.shape[0] == 4 * inner for part in parts), f"its projections do not make gates of {inner}", "fetch the heads again"
    )
    return [Cell(table, part, *norms, head) for part in parts]


def read_norm(heads: Heads, name: str, size: int) -> Norm:
    return Norm(heads.vector(f"{name}.weight", size), heads.vector(f"{name}.bias", size))
