"""The two ends of a transformers model, for drafters that share them: its embedding table and its output head.

Not looked up but tried, as in `transformers.py`: what the first layer reads must be rows of the table times one number, and the logits
must be the head's products with what the body returns, times one number, capped as the configuration says. An architecture that does more
(learned positions added to the embedding, a projection in between) cannot be shared, and says so.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.backends.base import Ops, Weight
from forerun.engine.errors import StartError
from forerun.engine.models.model import Shared

CURE = "use a head that brings its own embedding and output head, or --speculator suffix or model=DIR"
TRIED = [3, 5, 7, 11, 13]


class Tried(Protocol):
    """What the trial needs of an adapted model. `states`: tap → what was heard there in the last run."""

    model: Any
    layers: int
    device: torch.device
    states: dict[int, Tensor]

    def run(self, tokens: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor: ...


def share_ends(adapted: Tried, ops: Ops) -> Shared:
    """StartError (with its cure) for a model whose ends are more than a table and a matrix."""
    name = type(adapted.model).__name__
    embedding = adapted.model.get_input_embeddings()
    table = getattr(embedding, "table", getattr(embedding, "weight", None))
    output = adapted.model.get_output_embeddings()
    head: Weight | None = getattr(output, "packed", None)
    if table is None or head is None:
        raise StartError(f"{name} has no plain {'embedding' if table is None else 'output head'} that a drafter could share", CURE)
    tokens = torch.tensor(TRIED, device=adapted.device)
    adapted.states = {-1: tokens, adapted.layers: tokens}
    logits = adapted.run(tokens, torch.arange(len(TRIED), device=adapted.device))
    rows, last = adapted.states[-1], adapted.states[adapted.layers]
    embed_scale = ratio(rows, ops.embed(table, tokens.int()))
    cap = float(getattr(adapted.model.config.get_text_config(), "final_logit_softcapping", None) or 0.0)
    raw = cap * torch.atanh((logits / cap).clamp(-1 + 1e-6, 1 - 1e-6)) if cap else logits
    plain = ops.matmul(last.float(), head, output.bias)
    scale = ratio(raw, plain)
    if embed_scale is None or scale is None:
        what = "embedding" if embed_scale is None else "output head"
        raise StartError(f"the {what} of {name} is more than a matrix, so a drafter cannot share it", CURE)
    bias = None if output.bias is None else output.bias * scale
    return Shared(table, embed_scale, head, bias, scale, cap) if bias is None else Shared(table, embed_scale, head, bias)


def ratio(whole: Tensor, part: Tensor) -> float | None:
    """The number r with whole = r · part; None if there is none. A power of two or a round number is meant exactly."""
    whole, part = whole.double().flatten(), part.double().flatten()
    found = float(whole @ part / (part @ part))
    exact = round(found, 4)
    close = [each for each in (exact, found) if torch.allclose(whole, each * part, rtol=2e-3, atol=2e-3 * float(whole.abs().max()))]
    return close[0] if close else None
