"""Medusa heads: `forerun serve --speculator medusa=DIR` (Cai et al. 2401.10774).

    h = the target's state behind its final norm at token i, whose output head says token i + 1
    head k:  h + SiLU(W h + b), read by the target's own output head, guesses token i + 2 + k

The layout is TGI's, in which the output head is the target's: a head of its own would be as large as the target's for each of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from forerun.train.kinds.flat import Flat, distilled
from forerun.train.kinds.registry import Setting
from forerun.train.kinds.source import SharedHead, Source, facts, frequent, to_draft, write
from forerun.train.shards import Record
from forerun.train.vocabulary import Vocabulary

FADE = 0.8
"""weight of each further head"""


class Medusa:
    """`vocabulary`: the tokens that are learnt."""

    def __init__(self, source: Source, setting: Setting, vocabulary: Vocabulary, heads: int) -> None:
        self.net: nn.ModuleList = nn.ModuleList(nn.Linear(source.hidden, source.hidden) for _ in range(heads))
        for head in self.net:
            nn.init.zeros_(head.weight)  # type: ignore[arg-type]
            nn.init.zeros_(head.bias)  # type: ignore[arg-type]
        self._source = source
        self._taps = setting.taps((source.layers,))
        self._to_draft = to_draft(vocabulary)
        self._head = SharedHead(source.head(), torch.from_numpy(vocabulary.kept))
        self.facts = facts(self.net, "medusa", vocabulary.vocab, 1.0)

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("the Medusa heads")
        group.add_argument("--heads", type=int, default=4, help="how many: guesses ahead (default: %(default)s)")
        group.add_argument("--vocab", type=int, default=8192, help="tokens that are learnt (default: %(default)s)")
        parser.set_defaults(rate=1e-3)

    @staticmethod
    def open(asked: argparse.Namespace, setting: Setting) -> Medusa:
        if asked.heads < 1:
            raise ValueError(f"--heads {asked.heads} is none: use --heads 4")
        source = Source.open(setting.target)
        vocabulary = frequent(setting, len(source.head()), asked.vocab)
        return Medusa(source, setting, vocabulary, asked.heads)

    def loss(self, batch: Sequence[Record]) -> Tensor:
        flat = Flat.of(batch)
        states = torch.cat([functional.pad(states, (0, 0, 0, 1)) for states in self._taps.read(batch)])  # a row for each token
        loss = torch.zeros(())
        for number in range(len(self.net)):
            places, goals = _aims(flat, number + 2)
            logits = self._head.logits(self._state(states[places], number))
            loss = loss + FADE**number * distilled(logits, self._to_draft[flat.candidates[goals]], flat.logprobs[goals])
        return loss / sum(FADE**number for number in range(len(self.net)))

    def hits(self, record: Record, depth: int) -> NDArray[np.bool_]:
        """Head d, at the row that made the token before place p, guesses the token at place p + d."""
        right = np.zeros((record.generated, depth), bool)
        with torch.inference_mode():
            flat = Flat.of([record])
            (states,) = self._taps.read([record])
            first = max(record.prompt - 2, 0)
            for d in range(min(depth, len(self.net))):
                rows = states[first : len(states) - 1 - d]
                held = self._head.best(self._state(rows, d)) == flat.tokens[first + 2 + d :]
                skipped = first - (record.prompt - 2)
                right[skipped : skipped + len(held), d] = held.numpy()
        return right

    def tensors(self) -> dict[str, Tensor]:
        return {f"{number}.0.linear.{name}": value for number, head in enumerate(self.net) for name, value in head.state_dict().items()}

    def config(self) -> dict[str, Any]:
        source = self._source
        config = {"model_type": "medusa", "medusa_num_heads": len(self.net), "medusa_num_layers": 1}
        config |= {"hidden_size": source.hidden, "tokenizer_fingerprint": source.fingerprint(), "torch_dtype": "bfloat16"}
        return config | {"base_model_name_or_path": source.folder.name}

    def save(self, folder: Path) -> None:
        write(folder, self.config(), self.tensors(), "medusa_lm_head")

    def _state(self, states: Tensor, number: int) -> Tensor:
        out: Tensor = states + functional.silu(self.net[number](states))
        return out


def _aims(flat: Flat, ahead: int) -> tuple[Tensor, Tensor]:
    """Rows whose token `ahead` places on was generated, in the same text, behind at least one row that a draft can start from; and what is
    to be guessed there."""
    places = []
    for first, last, prompt in flat.segments():
        places.append(torch.arange(first + max(prompt - 2, 0), max(first + max(prompt - 2, 0), last - ahead)))
    rows = torch.cat(places)
    return rows, flat.goal[rows + ahead]
