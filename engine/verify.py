"""Walk a draft from its root by comparing integers. Nothing else happens here: no tensors, no probabilities, no state.

`Accept` is who decides what of a draft becomes true: `follow` for all but `--acceptance rejection` (rejection.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forerun.engine.drafters.draft import Draft
from forerun.engine.models.model import Output
from forerun.engine.rows import Share
from forerun.engine.sampler import Ask, Choice


class Accept(Protocol):
    def __call__(self, share: Share, asks: Sequence[Ask], picked: list[Choice], output: Output) -> list[int]:
        """The accepted nodes of a share's draft, root side first. asks, picked: of its root and then of its nodes; output: of the
        whole step. The row's new tokens are then the picks at the root and at the accepted nodes, which may be replaced."""
        ...


def follow(share: Share, asks: Sequence[Ask], picked: list[Choice], output: Output) -> list[int]:
    """Shared dice: what the target picked decides."""
    return walk(share.draft, [choice.token for choice in picked])


def walk(draft: Draft, picks: Sequence[int]) -> list[int]:
    """The accepted nodes, root side first. `picks[0]` is the target's token at the root, `picks[1 + i]` the one at node i.

    From where we stand, step to the first child that carries the token the target picked there; stop where there is none: the pick
    there is the bonus. A probe is never stepped to. Since a parent comes before its child, one pass over the nodes is the whole walk.
    """
    path: list[int] = []
    at = -1
    for node, (token, parent) in enumerate(zip(draft.token, draft.parent)):
        if parent == at and token == picks[at + 1] and not draft.probe[node]:
            path.append(node)
            at = node
    return path
